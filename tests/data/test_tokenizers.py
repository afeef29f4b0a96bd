"""Tokenizers against the libraries that define them, and the round trip of every kind of text."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers

from megalite.config.errors import FlagError, UserError
from megalite.config.schema import TokenizerConfig
from megalite.data.tokenizer_base import IncrementalDetokenizer
from megalite.data.tokenizers import Tokenizer, build_tokenizer, require_eod
from tests.data.corpora import CHINESE, CODE, EMOJI, ENGLISH, ODD, SAMPLES, byte_level, sentencepiece_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def sentencepiece_file(folder: Path) -> str:
    return sentencepiece_model(folder)


@pytest.fixture(scope="module")
def bpe_files(folder: Path) -> tuple[str, str]:
    """vocab.json and merges.txt of a byte-level BPE that holds `<|endoftext|>`."""
    byte_level(400, "<|endoftext|>").save_model(str(folder), "bpe")
    return str(folder / "bpe-vocab.json"), str(folder / "bpe-merges.txt")


@pytest.fixture(scope="module")
def hf_folder(folder: Path) -> Path:
    """A byte-level tokenizer.json that asks for truncation, has a hole in its ids, and names its EOS beside it."""
    learner = byte_level(400, "<bos>", "<stop>")
    place = folder / "hf"
    place.mkdir()
    learner.enable_truncation(4)
    learner.save(str(place / "tokenizer.json"))
    content = json.loads((place / "tokenizer.json").read_text())
    content["model"]["vocab"]["ThisNeverMerges"] = 777
    (place / "tokenizer.json").write_text(json.dumps(content))
    config = {
        "eos_token": {"__type": "AddedToken", "content": "<stop>"},
        "bos_token": "<bos>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


def ranks_of_bytes(*more: bytes) -> list[bytes]:
    return [bytes([i]) for i in range(256)] + list(more)


MERGED = (b"th", b"he", b" the", b"qu", b"  ", b"    ", b"re", b"\xe4\xbb", "今".encode(), b"tu", b"rn", b"return"[:4])


@pytest.fixture(scope="module")
def tiktoken_json(folder: Path) -> str:
    entries = [
        {"rank": n, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for n, token in enumerate(ranks_of_bytes(*MERGED))
    ]
    (folder / "tik.json").write_text(json.dumps(entries))
    return str(folder / "tik.json")


@pytest.fixture(scope="module")
def tiktoken_ranks(folder: Path) -> str:
    lines = (base64.b64encode(token) + b" %d\n" % n for n, token in enumerate(ranks_of_bytes(*MERGED)))
    (folder / "ranks.tiktoken").write_bytes(b"".join(lines))
    return str(folder / "ranks.tiktoken")


@pytest.fixture(scope="module")
def every(
    sentencepiece_file: str, bpe_files: tuple[str, str], hf_folder: Path, tiktoken_json: str, tiktoken_ranks: str
) -> dict[str, Tokenizer]:
    return {
        "sentencepiece": build("SentencePieceTokenizer", tokenizer_model=sentencepiece_file),
        "huggingface": build("HuggingFaceTokenizer", tokenizer_model=str(hf_folder)),
        "gpt2": build("GPT2BPETokenizer", vocab_file=bpe_files[0], merge_file=bpe_files[1]),
        "tiktoken json": build("TikTokenizer", tokenizer_model=tiktoken_json),
        "tiktoken ranks": build("TikTokenizer", tokenizer_model=tiktoken_ranks),
    }


KINDS = ("sentencepiece", "huggingface", "gpt2", "tiktoken json", "tiktoken ranks")


def build(kind: str, **fields: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **fields))


@pytest.mark.parametrize(
    ("kind", "text"),
    # A special token written out is an id there, not text.
    [(k, t) for t in [*SAMPLES, *ODD, ""] for k in KINDS if not (k == "tiktoken json" and "<s>" in t)],
    ids=lambda value: repr(value)[:16],
)
def test_text_survives_the_round_trip(every: dict[str, Tokenizer], kind: str, text: str) -> None:
    ids = every[kind].tokenize(text)
    # SentencePiece itself reads U+2581 as a blank, and its ids are the law.
    assert every[kind].detokenize(ids) == (text.replace("▁", " ") if kind == "sentencepiece" else text)
    assert all(0 <= i < every[kind].vocab_size for i in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_gives_what_single_texts_give(every: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every[kind]
    assert tokenizer.tokenize_batch(SAMPLES) == [tokenizer.tokenize(text) for text in SAMPLES]
    assert tokenizer.tokenize_batch([]) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 7, 30, 31, 32])
def test_incremental_text_continues_after_a_prompt_in_whole_characters(
    every: dict[str, Tokenizer], kind: str, length: int
) -> None:
    tokenizer, text = every[kind], ENGLISH + CHINESE + EMOJI + CODE
    ids = tokenizer.tokenize(text)
    shown = len(tokenizer.detokenize(ids[:length]).rstrip("\ufffd"))
    stream = IncrementalDetokenizer(tokenizer, context=ids[:length])
    parts = [stream.add(i) for i in ids[length:]]
    assert "".join(parts) + stream.flush() == text[shown:]
    assert not any("\ufffd" in part for part in parts)


@pytest.fixture(scope="module")
def byte_fallback(folder: Path, sentencepiece_file: str) -> Tokenizer:
    """As transformers makes a tokenizer.json of Llama's: a run of bytes is all characters, or none."""
    import sentencepiece

    truth = sentencepiece.SentencePieceProcessor(model_file=sentencepiece_file)
    pieces = [truth.id_to_piece(number) for number in range(len(truth))]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(folder / "byte_fallback.json"))
    return build("HuggingFaceTokenizer", tokenizer_model=str(folder / "byte_fallback.json"))


@pytest.mark.parametrize("kind", [*KINDS, "byte fallback"])
def test_pieces_join_to_the_text_of_any_ids(every: dict[str, Tokenizer], byte_fallback: Tokenizer, kind: str) -> None:
    tokenizer = {**every, "byte fallback": byte_fallback}[kind]
    random = Random(kind)
    known = [*range(256), *range(1000, tokenizer.vocab_size)] if "tik" in kind else range(tokenizer.vocab_size)
    sign = tokenizer.tokenize("\ufffd") if "byte" not in kind else [tokenizer.tokenize("<0xEF>")[0]]
    for length in (1, 5, 70, 300):
        for _ in range(6):
            ids = [one for _ in range(length) for one in random.choice(([random.choice(known)], sign))]
            stream = IncrementalDetokenizer(tokenizer)
            assert "".join([*map(stream.add, ids), stream.flush()]) == tokenizer.detokenize(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replacement_character_of_the_prompt_is_not_written_again(every: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every[kind]
    prompt, answer = tokenizer.tokenize("a\ufffd"), tokenizer.tokenize("\ufffdb\ufffd")
    stream = IncrementalDetokenizer(tokenizer, context=prompt)
    assert "".join(map(stream.add, answer)) + stream.flush() == "\ufffdb\ufffd"
    assert IncrementalDetokenizer(tokenizer, context=prompt).flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_eod_is_no_text_and_unknown_ids_are_refused(every: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every[kind]
    assert tokenizer.eod is not None
    assert tokenizer.detokenize([*tokenizer.tokenize("a b"), tokenizer.eod]) == "a b"
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            tokenizer.detokenize([wrong])


def test_sentencepiece_ids_are_the_librarys(every: dict[str, Tokenizer], sentencepiece_file: str) -> None:
    import sentencepiece

    truth = sentencepiece.SentencePieceProcessor(model_file=sentencepiece_file)
    for text in (*SAMPLES, *ODD, "▁", "a▁b ▁ c", "今▁天"):
        assert every["sentencepiece"].tokenize(text) == truth.encode(text)
    assert every["sentencepiece"].vocab_size == truth.get_piece_size() == 400
    assert every["sentencepiece"].eod == truth.eos_id() == 2


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_cutting_long_texts_changes_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    import sentencepiece

    model = sentencepiece_model(tmp_path, model_type=model_type, vocab_size=365)
    truth = sentencepiece.SentencePieceProcessor(model_file=model)
    ours = build("SentencePieceTokenizer", tokenizer_model=model)
    for long_text in (1, 2, 5, 17):
        monkeypatch.setattr("megalite.data.tokenizers.LONG_TEXT", long_text)
        for text in (*SAMPLES, *ODD, ENGLISH * 9, "word" * 99, "      " * 99, "▁a ▁▁ b▁" * 9):
            assert ours.tokenize(text) == truth.encode(text)


def test_gpt2_ids_are_those_of_transformers(
    tmp_path: Path, every: dict[str, Tokenizer], bpe_files: tuple[str, str]
) -> None:
    from transformers import GPT2TokenizerFast

    truth = GPT2TokenizerFast(vocab=bpe_files[0], merges=bpe_files[1])
    ours = every["gpt2"]
    assert len(truth) == ours.vocab_size
    assert truth.eos_token_id == ours.eod
    for text in (*SAMPLES, *ODD, "one<|endoftext|>two"):
        assert ours.tokenize(text) == truth(text)["input_ids"]
    files = byte_level().save_model(str(tmp_path))  # without the end of text
    truth = GPT2TokenizerFast(vocab=files[0], merges=files[1])
    ours = build("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1])
    assert (ours.vocab_size, ours.eod) == (len(truth), truth.eos_token_id) == (301, 300)


def test_tokenizer_json_ids_are_those_of_transformers(every: dict[str, Tokenizer], hf_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    truth = PreTrainedTokenizerFast.from_pretrained(str(hf_folder))
    ours = every["huggingface"]
    assert (ours.eod, ours.bos) == (truth.eos_token_id, truth.bos_token_id)
    assert ours.vocab_size == 778  # the largest id + 1, though there are holes
    for text in (*SAMPLES, "a<stop>b"):
        assert ours.tokenize(text) == truth(text)["input_ids"]
    file = build("HuggingFaceTokenizer", tokenizer_model=str(hf_folder / "tokenizer.json"))
    assert (file.eod, file.tokenize(ENGLISH)) == (ours.eod, ours.tokenize(ENGLISH))


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken_ids_are_megatron_cores(tiktoken_json: str, pattern: str) -> None:
    module = pytest.importorskip("megatron.core.tokenizers.text.libraries.tiktoken_tokenizer")
    size = 1000 + 256 + len(MERGED)
    truth = module.TikTokenTokenizer(tiktoken_json, pattern=pattern, vocab_size=size)
    ours = build("TikTokenizer", tokenizer_model=tiktoken_json, tiktoken_pattern=pattern)
    assert (ours.vocab_size, ours.eod, ours.bos, ours.pad) == (size, truth.eos_id, truth.bos_id, truth.pad_id)
    for text in (*SAMPLES, *ODD):
        assert ours.tokenize(text) == truth.text_to_ids(text)


def test_tiktoken_vocab_size_cuts_the_ranks(tiktoken_json: str, every: dict[str, Tokenizer]) -> None:
    cut = build("TikTokenizer", tokenizer_model=tiktoken_json, vocab_size=1258)
    assert cut.vocab_size == 1258
    assert cut.tokenize(" the") == [1000 + ord(" "), 1256, 1000 + ord("e")]
    assert every["tiktoken json"].tokenize(" the") == [1258]
    for wrong in (1000, 5000):
        with pytest.raises(FlagError, match="1256 to 1268"):
            build("TikTokenizer", tokenizer_model=tiktoken_json, vocab_size=wrong)


def test_ranks_of_a_tiktoken_file_are_ids_and_eod_follows(every: dict[str, Tokenizer]) -> None:
    tokenizer = every["tiktoken ranks"]
    assert tokenizer.tokenize("Athe") == [ord("A"), 256, ord("e")]
    assert tokenizer.eod == 256 + len(MERGED) == tokenizer.vocab_size - 1


def test_null_tokenizer_reads_ids_and_has_one_more_for_eod() -> None:
    tokenizer = build("NullTokenizer", vocab_size=130)
    assert (tokenizer.vocab_size, tokenizer.eod) == (131, 130)
    assert tokenizer.tokenize(" 0 5\n129 ") == [0, 5, 129]
    assert tokenizer.detokenize([0, 5, 129, 130]) == "0 5 129"
    for wrong, message in (
        ("1 x", "'x' is not an id"),
        ("131", "0 to 130"),
        ("-1", "0 to 130"),
        ("1.0", "'1.0' is not an id"),
    ):
        with pytest.raises(UserError, match=message):
            tokenizer.tokenize(wrong)


def test_a_kind_of_tokenizer_that_a_stored_configuration_names_and_nobody_knows_is_refused() -> None:
    with pytest.raises(FlagError, match="BertWordPieceTokenizer is unknown: it must be one of SentencePieceTokenizer"):
        build("BertWordPieceTokenizer")


def test_a_tokenizer_json_without_eos_has_no_eod_and_append_eod_is_refused(folder: Path) -> None:
    byte_level().save(str(folder / "bare.json"))
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=str(folder / "bare.json"))
    assert tokenizer.eod is None
    assert tokenizer.detokenize(tokenizer.tokenize(CODE)) == CODE
    with pytest.raises(FlagError, match="--append-eod needs a tokenizer with an end-of-document id"):
        require_eod(tokenizer, "--append-eod")


def test_a_tokenizer_json_is_used_as_it_is_whatever_class_the_files_name(tmp_path: Path) -> None:
    """Llama's class in transformers would put a blank before the first word only, and none before another blank."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581\u2581"]
    vocabulary = {name: n for n, name in enumerate(names)}
    truth = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [("\u2581", "\u2581")], unk_token="<unk>", byte_fallback=True)
    )
    steps = [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    truth.normalizer = tokenizers.normalizers.Sequence(steps)
    truth.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in ("<s>", "</s>")])
    truth.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    blank, a, b, two = (vocabulary[name] for name in names[-4:])
    assert ours.tokenize(" a</s>b<s> b") == [two, a, 2, blank, b, 1, two, b]
    for text in (*SAMPLES, *ODD):
        assert ours.tokenize(text) == truth.encode(text).ids


@pytest.mark.parametrize("settings", [{"eos_token": "<|end|>", "bos_token": None}, {"eos_token": "<|end|>"}], ids=str)
def test_a_piece_of_text_has_no_role_whatever_its_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    byte_level(300, "<|end|>").save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["<s>"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert (ours.bos, ours.eod) == (None, 0)
    assert ours.detokenize([300]) == "<s>"


def test_a_role_that_is_null_is_of_no_token(tmp_path: Path) -> None:
    byte_level(300, "<s>", "</s>", "<pad>").save(str(tmp_path / "tokenizer.json"))
    ours = build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert (ours.bos, ours.eod, ours.pad) == (0, 1, 2)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null, "pad_token": {"content": "</s>"}}')
    ours = build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert (ours.bos, ours.eod, ours.pad) == (None, 1, 1)


def test_a_wrong_form_of_a_token_is_an_error(hf_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((hf_folder / "tokenizer.json").read_bytes())
    for content, message in (
        (
            '{"added_tokens_decoder": {"x": {}}}',
            "has a wrong token",
        ),
        ('{"added_tokens_decoder": [5]}', "has a wrong token"),
        ('{"eos_token": {}}', "has a wrong token"),
        ("[1]", "tokenizer_config.json: not a JSON object"),
        ("{", "tokenizer_config.json: broken JSON"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(UserError, match=message):
            build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer"])
@pytest.mark.parametrize("content", [b"", b"junk", b"[1, 2]", b"{}", b"\x00\xff" * 50, None])
def test_a_broken_file_is_named(tmp_path: Path, sentencepiece_file: str, kind: str, content: bytes | None) -> None:
    (tmp_path / "broken").write_bytes(Path(sentencepiece_file).read_bytes()[:5000] if content is None else content)
    with pytest.raises(UserError, match="--tokenizer-model .*broken"):
        build(kind, tokenizer_model=str(tmp_path / "broken"))
    with pytest.raises(UserError, match="--tokenizer-model .*absent.*No such file"):
        build(kind, tokenizer_model=str(tmp_path / "absent"))


def test_a_pointer_of_git_lfs_is_told_from_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(
        UserError, match=r"tokenizer\.json: a Git LFS pointer instead of the file: run `git lfs install"
    ):
        build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))


def test_broken_gpt2_files_are_named(bpe_files: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_text("no such\npair here at all\n")
    with pytest.raises(UserError, match=r"--merge-file .*merges.txt"):
        build("GPT2BPETokenizer", vocab_file=bpe_files[0], merge_file=str(tmp_path / "merges.txt"))
    with pytest.raises(UserError, match=r"--vocab-file absent.json: No such file"):
        build("GPT2BPETokenizer", vocab_file="absent.json", merge_file=bpe_files[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "--tokenizer-type is missing"),
        ({"tokenizer_type": "NullTokenizer"}, "NullTokenizer needs --vocab-size"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "--vocab-size 0"),
        ({"tokenizer_type": "SentencePieceTokenizer"}, "needs --tokenizer-model"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "needs --merge-file"),
    ],
)
def test_missing_flags_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        build_tokenizer(TokenizerConfig(**fields))


def test_a_vocab_size_that_contradicts_the_file_is_refused(sentencepiece_file: str) -> None:
    build("SentencePieceTokenizer", tokenizer_model=sentencepiece_file, vocab_size=400)
    with pytest.raises(FlagError, match="--vocab-size 32000, but the SentencePieceTokenizer has 400 ids"):
        build("SentencePieceTokenizer", tokenizer_model=sentencepiece_file, vocab_size=32000)


def test_importing_the_module_loads_none_of_the_libraries_and_a_missing_one_is_named() -> None:
    code = (
        "import sys\n"
        "from megalite.data.tokenizers import build_tokenizer\n"
        "from megalite.config.schema import TokenizerConfig\n"
        "names = ('sentencepiece', 'tokenizers', 'tiktoken', 'transformers', 'torch', 'numpy')\n"
        "print(*[name for name in names if name in sys.modules])\n"
        "for kind, name in zip(('SentencePiece', 'HuggingFace', 'Tik'), names):\n"
        "    sys.modules[name] = None\n"
        "    try:\n"
        "        build_tokenizer(TokenizerConfig(tokenizer_type=kind + 'Tokenizer', tokenizer_model='x'))\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[0] == ""
    assert [line.split("pip install ")[1].split()[0] for line in lines[1:3]] == ["sentencepiece", "tokenizers"]
