"""Fine-tuning data: what a line becomes, what is cut, how it is divided and ordered, and each mistake told by line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import FlagError, UserError
from megalite.config.schema import TokenizerConfig
from megalite.data.cache import SampleCache
from megalite.data.document_mask import SampleSource
from megalite.data.gpt_dataset import Datasets
from megalite.data.packing import RowDataset, TokenSequences
from megalite.data.sft import ReadReport, SftOptions, SftReader, SftSamples, build_sft_datasets, check_sft, hold_out
from megalite.data.tokenizer_base import Tokenizer
from megalite.data.tokenizers import HuggingFaceTokenizer, NullTokenizer, build_tokenizer
from tests.data.chat_files import CONVERSATION, REASONING_TEMPLATE, chat_tokenizer, pairs, put_template, write_lines

NULL = NullTokenizer(99)
EOD = 99
MESSAGES = [{"role": "user", "content": "q\nx"}, {"role": "assistant", "content": "a"}]
ANSWERS = [message["content"] for message in CONVERSATION if message["role"] == "assistant"]
SAME = {  # one conversation in each form
    "sharegpt": {"conversations": [{"from": "human", "value": "q\nx"}, {"from": "gpt", "value": "a"}]},
    "roles": {"conversations": MESSAGES},
    "alpaca": {"instruction": "q", "input": "x", "output": "a"},
    "alpaca without input": {"instruction": "q\nx", "input": "", "output": "a"},
}
Lines = Iterable[Mapping[str, Any]]


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("chat"))


def options(*data: str, **changes: Any) -> SftOptions:
    return SftOptions(**{"data": data, "seq_length": 64, "seed": 3, **changes})


def read(path: Path, lines: Lines, folder: Path | None = None, **changes: Any) -> tuple[SftSamples, ReadReport]:
    """What is read of a file of these lines, with the chat tokenizer of a folder, or else NullTokenizer."""
    file = write_lines(path / "a.jsonl", lines)
    tokenizer = NULL if folder is None else HuggingFaceTokenizer(str(folder))
    samples = SftReader(options(file, **changes), tokenizer, str(folder)).read([file], "--sft-data")
    return samples, samples.counts()


def sets(
    path: Path, lines: Lines, folder: Path | None = None, sizes: tuple[int, int, int] = (1, 0, 0), **changes: Any
) -> Datasets:
    """The sets of a file of these lines, with the chat tokenizer of a folder, or else NullTokenizer."""
    file = write_lines(path / "a.jsonl", lines)
    tokenizer = NULL if folder is None else HuggingFaceTokenizer(str(folder))
    return build_sft_datasets(options(file, **changes), tokenizer, str(folder), sizes)


def counting(lengths: Iterable[tuple[int, int]]) -> list[dict[str, str]]:
    """Lines of NullTokenizer ids: so many in the prompt, so many in the completion."""
    return [
        {"prompt": " ".join(["1"] * prompt), "completion": " ".join(str(2 + n % 90) for n in range(answer))}
        for prompt, answer in lengths
    ]


def samples(data: TokenSequences) -> list[list[int]]:
    return [data.tokens[a:b].tolist() for a, b in pairwise(data.begins)]


def answers(data: TokenSequences, folder: Path) -> list[str]:
    """The text of each sample that counts."""
    parts = [slice(a, b) for a, b in pairwise(data.begins)]
    return [HuggingFaceTokenizer(str(folder)).detokenize(data.tokens[part][data.counted[part]]) for part in parts]


def labels(dataset: RowDataset) -> list[list[int]]:
    return [item["labels"][item["loss_mask"]].tolist() for item in (dataset[n] for n in range(len(dataset)))]


def rows_of(source: SampleSource | None) -> RowDataset:
    assert isinstance(source, RowDataset)
    return source


def test_a_pair_counts_its_completion_and_eos(tmp_path: Path) -> None:
    item = rows_of(sets(tmp_path, [{"prompt": "1 2 3", "completion": "4 5"}]).train)[0]
    assert item["tokens"][:5].tolist() == [1, 2, 3, 4, 5]
    assert item["labels"][:5].tolist() == [2, 3, 4, 5, EOD]
    assert item["loss_mask"].tolist() == [False, False, True, True, True] + [False] * 59
    assert "document_ids" not in item


def test_a_pair_begins_with_what_the_tokenizer_puts_before_a_text_and_ends_with_one_eos(tmp_path: Path) -> None:
    folder = put_template(chat_tokenizer(tmp_path), "<|begin|> $A <|im_end|>")
    tokenizer = HuggingFaceTokenizer(str(folder))
    sequences, _ = read(tmp_path, [{"prompt": "The quick", "completion": " brown fox"}], folder)
    assert sequences.tokens.tolist() == tokenizer.tokenize("The quick brown fox")
    assert sequences.counted.sum() == len(tokenizer.tokenize_alone([" brown fox"], special=True)[0]) + 1


def test_conversations_and_pairs_may_share_a_file(tmp_path: Path, chat_folder: Path) -> None:
    sequences, report = read(tmp_path, [{"messages": CONVERSATION}, *pairs(1)], chat_folder, seq_length=999)
    assert answers(sequences, chat_folder) == ["".join(ANSWERS), " 0"]
    assert (report.samples, report.truncated, report.dropped, report.conversations) == (2, 0, 0, 1)
    assert report.answer_tokens == sequences.counted.sum()


@pytest.mark.parametrize("form", SAME)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_conversation_is_the_same_in_every_form(
    tmp_path: Path, chat_folder: Path, form: str, system: str | None
) -> None:
    opening = [] if system is None else [{"role": "system", "content": system}]
    data, _ = read(tmp_path, [{**SAME[form], "system": system}, {"messages": opening + MESSAGES}], chat_folder)
    first, second = samples(data)
    assert first == second


def test_alpacas_file_is_read_as_published_one_list_with_some_empty_outputs(tmp_path: Path, chat_folder: Path) -> None:
    values = [SAME["alpaca"], {**SAME["alpaca"], "output": ""}, SAME["alpaca"]]
    (tmp_path / "alpaca.json").write_text(json.dumps(values, indent=4))
    tokenizer = HuggingFaceTokenizer(str(chat_folder))
    data = build_sft_datasets(options(str(tmp_path / "alpaca.json")), tokenizer, str(chat_folder), (1, 0, 0))
    assert len(rows_of(data.train)) == 2
    assert any("1 lines with an empty output were left out" in note for note in data.notes)


def test_an_answer_of_weight_zero_is_context(tmp_path: Path, chat_folder: Path) -> None:
    for keys in ({"weight": 0}, {"train": False}, {"weight": 0, "train": False, "name": None, "loss": None}):
        lines = [{"messages": with_keys(**keys)}, {"messages": CONVERSATION}]
        data, _ = read(tmp_path, lines, chat_folder, seq_length=999)
        first, second = samples(data)
        assert first == second
        assert answers(data, chat_folder) == [ANSWERS[1], "".join(ANSWERS)]


def test_samples_of_one_conversation_are_held_out_together(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", REASONING_TEMPLATE)
    talks = [[message | {"content": f"{n}"} for message in CONVERSATION[1:]] for n in range(10, 30)]
    lines = [{"messages": messages} for messages in talks]
    data = sets(tmp_path, lines, folder, (1, 1, 0), seq_length=999, valid_share=0.3)
    train, valid = ([tuple(ids) for ids in labels(rows_of(source))] for source in (data.train, data.valid))
    assert (len(train), len(valid)) == (28, 12)
    assert not set(train) & set(valid)
    assert any("20 conversations became several samples" in note for note in data.notes)


class Deaf(NullTokenizer):
    """A tokenizer that must not be asked."""

    def tokenize_batch(self, texts: Any) -> list[list[int]]:
        assert not any(texts), "tokenized again"
        return [[] for _ in texts]


def test_samples_are_tokenized_once_and_again_where_anything_changed(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", counting([(2, 3), (1, 2)]))
    chosen = options(file, cache=SampleCache(str(tmp_path / "kept")))

    def rows(tokenizer: Tokenizer, **changes: Any) -> tuple[list[list[int]], list[str]]:
        data = build_sft_datasets(replace(chosen, **changes), tokenizer, None, (1, 0, 0))
        return labels(rows_of(data.train)), data.notes

    first = rows(NULL)
    assert rows(Deaf(99)) == first
    assert rows(Deaf(99), seed=9, packing=True)[0] != []
    with pytest.raises(AssertionError, match="tokenized again"):
        rows(Deaf(99), seq_length=63)
    with pytest.raises(AssertionError, match="tokenized again"):
        rows(Deaf(98))
    write_lines(tmp_path / "a.jsonl", counting([(2, 3), (1, 3)]))
    with pytest.raises(AssertionError, match="tokenized again"):
        rows(Deaf(99))


def test_kept_samples_are_those_of_the_tokenizer_and_template_that_are_loaded(
    tmp_path: Path, chat_folder: Path
) -> None:
    """Whatever files they come from: those beside a file that was named count, and those of other models don't."""
    place = shutil.copytree(chat_folder, tmp_path / "tokenizer")
    lines = [{"messages": CONVERSATION}, {"prompt": "a <|im_end|> b", "completion": "c"}]
    chosen = options(write_lines(tmp_path / "a.jsonl", lines), seq_length=400)
    kept = replace(chosen, cache=SampleCache(str(tmp_path / "kept")))

    def files_after_reading(parse: bool = False) -> int:
        model = str(place / "tokenizer.json")
        tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", model, parse_special_tokens=parse))
        found, truth = (build_sft_datasets(each, tokenizer, model, (1, 0, 0)) for each in (kept, chosen))
        assert labels(rows_of(found.train)) == labels(rows_of(truth.train))
        return len(list((tmp_path / "kept").iterdir()))

    one = files_after_reading()
    assert one > 0
    (place / "config.json").write_text("{}")
    (place / "README.md").write_text("new")
    settings = json.loads((place / "tokenizer_config.json").read_text())
    (place / "chat_template.jinja").write_text(settings["chat_template"])  # the same from another file
    assert files_after_reading() == one
    (place / "chat_template.jinja").write_text("{# new #}" + settings["chat_template"])
    assert files_after_reading() == 2 * one
    (place / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|endoftext|>"}))
    assert files_after_reading() == 3 * one
    assert files_after_reading(parse=True) == 4 * one
    shutil.rmtree(place)
    chat_tokenizer(place).joinpath("tokenizer.json").write_text(
        (chat_folder / "tokenizer.json").read_text().replace('"<|begin|>"', '"<|began|>"')
    )
    assert files_after_reading() == 5 * one


def test_what_truncation_costs_is_counted(tmp_path: Path) -> None:
    # A row of 10 places holds 11 tokens. Completions have an EOS more.
    lines = counting([(5, 5), (5, 6), (8, 7), (10, 3), (11, 3), (30, 2), (0, 9)])
    _, report = read(tmp_path, lines, seq_length=10, long_answers="truncate")
    assert (report.samples, report.truncated, report.dropped) == (5, 3, 2)
    assert report.lost_tokens == 1 + 5 + 3
    assert report.dropped_tokens == 4 + 3
    assert report.answer_tokens == 6 + 6 + 3 + 1 + 9
    for packing in (False, True):
        data = sets(tmp_path, lines, seq_length=10, packing=packing, long_answers="truncate")
        notes = "\n".join(data.notes)
        assert "3 samples were cut to --seq-length 10 and lost 9 answer tokens" in notes
        assert "2 samples with 7 answer tokens were left out" in notes
        assert sum(map(len, labels(rows_of(data.train)))) == report.answer_tokens
    assert not any("cut" in note for note in sets(tmp_path, counting([(5, 5)]), seq_length=10).notes)


def test_the_context_after_the_last_answer_that_fits_is_cut_too(tmp_path: Path, chat_folder: Path) -> None:
    lines = [{"messages": CONVERSATION}, {"messages": CONVERSATION[:3]}]
    whole, _ = read(tmp_path, lines, chat_folder, seq_length=10_000)
    short = int(whole.lengths[1])
    cut, report = read(tmp_path, lines, chat_folder, seq_length=short + 5, long_answers="truncate")
    assert cut.lengths.tolist() == [short, short]
    assert (report.truncated, report.dropped) == (1, 0)


@pytest.mark.parametrize("policy, kept", [("truncate", 2), ("drop", 1)])
def test_a_sample_whose_answers_exceed_a_row_is_an_error_unless_asked_otherwise(
    tmp_path: Path, policy: str, kept: int
) -> None:
    for prompt, answer in ((9, 3), (50, 3), (2, 9)):
        lines = counting([(2, 8), (prompt, answer)])
        says = rf"a\.jsonl:2: the sample has {prompt + answer + 1} tokens, {answer + 1} of them in .* allows 11"
        with pytest.raises(UserError, match=says):
            sets(tmp_path, lines, seq_length=10)
    assert len(rows_of(sets(tmp_path, lines, seq_length=10, long_answers=policy).train)) == kept


def with_keys(**keys: Any) -> list[dict[str, Any]]:
    """The conversation, its first answer with more keys."""
    return [*CONVERSATION[:2], {**CONVERSATION[2], **keys}, *CONVERSATION[3:]]


BAD = [
    ({"messages": [{"role": "human", "content": "x"}]}, 'message 1 has the role "human"; known are system, user'),
    ({"messages": [{"content": "x"}]}, "message 1 has no role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, r'message 1 has the role \["user"\]'),
    ({"messages": [*CONVERSATION[:2], {"role": "assistant", "content": " \n"}]}, "message 3 is an empty answer"),
    (
        {"messages": [*CONVERSATION[:2], {"role": "assistant", "content": None}]},
        "message 3.*must be a string, not null",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1 .user. must be a string, not"),
    ({"messages": CONVERSATION[:2]}, "no assistant turn"),
    ({"messages": []}, r"messages must be a list .* not \[\]"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": ["hello"]}, "message 1 must be an object"),
    ({"messages": CONVERSATION, "tools": "f"}, "tools must be a list"),
    ({"prompt": "a", "completion": ""}, "the completion is empty"),
    ({"prompt": "a", "completion": 5}, "completion must be a string, not 5"),
    ({"prompt": None, "completion": "a"}, "prompt must be a string, not null"),
    ({"prompt": "a"}, "messages, conversations, .* or prompt and completion are needed; the line's keys: prompt"),
    ({"prompt": "a", "completion": "b", "messages": CONVERSATION}, "messages and also prompt and completion"),
    ({"conversations": []}, "conversations must be a list of objects with from and value"),
    ({"conversations": [{"from": "bob", "value": "x"}]}, 'a turn from "bob"; known are human'),
    ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "the key history is not supported"),
    ({"messages": CONVERSATION, "system": "x"}, "both the key system and a first message"),
    ({"messages": with_keys(loss_mask=0)}, 'message 3 has the key "loss_mask".*"weight": 0 or "train": false'),
    ({"messages": with_keys(reasoning_content="x")}, 'message 3 has the key "reasoning_content", which is not'),
    ({"messages": with_keys(tool_calls=[{"name": "f"}])}, 'message 3 has the key "tool_calls", which is not supported'),
    ({"messages": CONVERSATION, "tools": [{"name": "f"}]}, "it has tools, and the chat template .* doesn't use them"),
    ({"messages": CONVERSATION, "weight": 0}, "the key weight is not supported.*in its message"),
    ({"prompt": "a", "completion": "b", "train": False}, "the key train is not supported"),
    ({"messages": CONVERSATION, "chat_template_kwargs": {"a": 1}}, "the key chat_template_kwargs is not supported"),
    ({"prompt": "a", "completion": "b", "system": "c"}, "it has system beside prompt and completion"),
    (
        {"messages": [*MESSAGES[:1], {"role": "assistant", "content": ""}], "system": "x"},
        "message 2 is an empty answer",
    ),
    ({"messages": with_keys(weight=0.5)}, "the weight of message 3 must be 0 or 1"),
    ({"messages": with_keys(weight=0, train=True)}, "weight and train of message 3 contradict"),
    ({"messages": [{**CONVERSATION[0], "train": True}, *CONVERSATION[1:]]}, "message 1 has the role system and train"),
    ({"messages": with_keys(train=False)[:3]}, "no assistant turn is trained"),
    ({}, "the line's keys: none"),
]


def test_tools_are_a_list_or_one_as_json_and_none_where_that_is_empty(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "reasoning", REASONING_TEMPLATE)
    tools = [{"name": "f"}]
    forms = [{"tools": tools}, {"tools": json.dumps(tools)}, {}, {"tools": []}, {"tools": "[]"}, {"tools": None}]
    data, _ = read(tmp_path, [{"messages": MESSAGES, **form} for form in forms], folder, seq_length=999)
    with_tools, same, *others = samples(data)
    assert with_tools == same
    assert all(other == others[0] != with_tools for other in others)


@pytest.mark.parametrize("value, message", BAD, ids=[str(n) for n in range(len(BAD))])
def test_a_bad_line_is_told_by_file_and_line(
    tmp_path: Path, chat_folder: Path, value: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl:2: .*" + message) as caught:
        read(tmp_path, [{"messages": CONVERSATION}, value], chat_folder, seq_length=999)
    assert str(caught.value).count("a.jsonl") == 1


class NoEnd(NullTokenizer):
    """A tokenizer without EOS."""

    def __init__(self) -> None:
        super().__init__(99)
        self.eod = None


def test_the_first_lines_show_what_is_wrong_with_flags_and_files(tmp_path: Path) -> None:
    bare = chat_tokenizer(tmp_path / "bare", None)
    tokenizer = HuggingFaceTokenizer(str(bare))
    good = write_lines(tmp_path / "a.jsonl", pairs(2))
    bad = write_lines(tmp_path / "b.jsonl", [{"messages": CONVERSATION}])

    def problems(used: Tokenizer = tokenizer, **changes: Any) -> list[str]:
        return check_sft(options(*changes.pop("data", [good]), **changes), used, str(bare))

    assert problems() == []
    assert problems(valid_share=0.5) == []
    (missing,) = problems(valid_data=["none.jsonl"])
    assert missing == "--sft-valid-data none.jsonl: no such file"
    (template,) = problems(data=[good, bad])
    assert "no chat template" in template
    (end,) = problems(NoEnd())
    assert "end-of-document id" in end
    assert problems(chat_template="none.jinja") == ["--chat-template none.jinja: No such file or directory"]
    (long,) = problems(seq_length=1)
    assert "a.jsonl:1: the sample has" in long
    (tmp_path / "empty.jsonl").write_text("\n")
    (empty,) = problems(valid_data=[str(tmp_path / "empty.jsonl")])
    assert empty.endswith("empty.jsonl: it has no samples")


def test_what_reading_finds_is_told_without_that_check_too(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="--sft-data needs a tokenizer with an end-of-document id"):
        build_sft_datasets(options("a.jsonl"), NoEnd(), None, (1, 0, 0))
    with pytest.raises(FlagError, match="no chat template .*--chat-template chatml"):
        sets(tmp_path, [{"messages": CONVERSATION}], chat_tokenizer(tmp_path / "bare", None))
    with pytest.raises(UserError, match=r"--sft-data .*a\.jsonl: it has no samples"):
        sets(tmp_path, [])
    with pytest.raises(UserError, match="none of its 2 samples fits --seq-length"):
        sets(tmp_path, counting([(70, 2), (80, 2)]), long_answers="drop")


@pytest.mark.parametrize("packing", [False, True])
def test_the_held_out_share_is_chosen_by_the_seed_and_apart_from_training(tmp_path: Path, packing: bool) -> None:
    lines = [{"prompt": "1", "completion": f" {n + 5}"} for n in range(90)]

    def divided(seed: int) -> list[set[int]]:
        data = sets(tmp_path, lines, sizes=(1, 1, 0), seed=seed, valid_share=0.2, packing=packing)
        return [{i for row in labels(rows_of(source)) for i in row} - {EOD} for source in (data.train, data.valid)]

    train, valid = divided(1)
    assert len(valid) == 18
    assert train | valid == set(range(5, 95))
    assert not train & valid
    assert divided(1) == [train, valid] != divided(2)


def test_a_share_always_leaves_something_on_both_sides() -> None:
    for count, share, sizes in ((2, 0.01, (1, 1)), (3, 0.99, (1, 2)), (1000, 0.1, (900, 100))):
        train, valid = hold_out(count, share, 0)
        assert (len(train), len(valid)) == sizes
        assert sorted([*train, *valid]) == list(range(count))
    with pytest.raises(UserError, match="only 1 sample"):
        hold_out(1, 0.5, 0)


def test_a_second_file_is_the_validation_set(tmp_path: Path) -> None:
    train, valid = counting([(1, 1)] * 5), write_lines(tmp_path / "b.jsonl", counting([(1, 2)] * 3))
    data = sets(tmp_path, train, sizes=(20, 6, 0), valid_data=[valid])
    assert (len(rows_of(data.train)), len(rows_of(data.valid)), data.test) == (5, 3, None)
    assert [(each.split, each.documents, each.samples, each.epochs) for each in data.summaries] == [
        ("train", 5, 20, 4.0),
        ("valid", 3, 6, 2.0),
    ]
    assert sets(tmp_path, train, sizes=(20, 0, 0), valid_data=[valid]).valid is None


def test_packing_serves_every_sample_once_in_fewer_rows(tmp_path: Path) -> None:
    lines = counting((1 + n % 7, 1 + n % 23) for n in range(300))
    data = sets(tmp_path, lines, packing=True)
    padded, packed = rows_of(sets(tmp_path, lines).train), rows_of(data.train)
    assert sorted(packed.rows.order.tolist()) == list(range(300))
    assert packed.sequences.counted.sum() == padded.sequences.counted.sum() == sum(map(len, labels(packed)))
    filled = (padded.sequences.lengths - 1).sum() / (len(packed) * 64)
    assert filled > 0.95
    assert f"300 samples packed into {len(packed)} rows, which are {filled:.1%}" in data.notes[-1]


def test_what_the_template_or_tokenizer_refuses_names_the_line(tmp_path: Path, chat_folder: Path) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl:1: NullTokenizer reads ids"):
        sets(tmp_path, [{"prompt": "1", "completion": "two"}])
    refusing, first = tmp_path / "t.jinja", tmp_path / "first.jinja"
    refusing.write_text("{{ raise_exception('no system role') }}")
    first.write_text("{{ messages[0].content }}")
    for template, messages, says in (
        (refusing, CONVERSATION, r"the chat template .*t\.jinja refuses it: no system role"),
        (first, [MESSAGES[1], *MESSAGES], "it begins with an answer.*begin with a system or user"),
    ):
        with pytest.raises(UserError, match=r"a\.jsonl:1: " + says):
            sets(tmp_path, [{"messages": messages}], chat_folder, chat_template=str(template))
