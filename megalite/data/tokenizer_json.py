"""Tokenizers of Hugging Face's `tokenizers` library: `tokenizer.json`, and GPT-2's two files.

The key idea: a second copy of such a tokenizer, made when first needed, calls each special token by a name that no text
holds. It reads `<|im_end|>` as the plain text that it is in a user's message, and the token where the name is written.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.config.errors import UserError
from megalite.data.tokenizer_base import Tokenizer, first_line, load_library, read_file

CONFIG = "tokenizer_config.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")


class TokenizersLibrary(Tokenizer):
    """What the kinds built on the `tokenizers` library share."""

    def _set_backend(self, backend: Any) -> None:
        backend.no_truncation()  # a tokenizer.json may ask for both; neither belongs in a corpus
        backend.no_padding()
        self.backend = backend
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)  # ids may have holes
        self.special = {**self.special, **_special(backend)}
        self.added = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
        known = backend.get_vocab(with_added_tokens=False)
        self._characters = {token for token in self.added if len(token) == 1 and token in known}

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return _encode(self.backend, texts, template=True)

    def tokenize_alone(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        return _encode(self.backend if special or not self.special else self._plain, texts, template=False)

    def marked(self, token: str) -> str:
        # A single character that the model knows (CLIP pads with "!") is text as well, of the same id.
        return token if token in self._characters else super().marked(token)

    def with_special(self, tokens: Collection[str]) -> Tokenizer:
        result = copy.copy(self)
        result.special = {**self.special, **{token: self.added[token] for token in tokens}}
        vars(result).pop("_plain", None)  # is made of them
        return result

    def _content(self) -> bytes:
        return str(self.backend.to_str()).encode()

    @functools.cached_property
    def _plain(self) -> Any:
        """The copy that reads special tokens only by their other names."""
        names = {token: self.marked(token) for token in self.special}
        content = _renamed(json.loads(self.backend.to_str()), names)
        return load_library("tokenizers").Tokenizer.from_str(json.dumps(content))

    def is_control(self, token: int) -> bool:
        return super().is_control(token) or token in self._added

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        """The ids of all added tokens: some models don't call theirs special."""
        return frozenset(self.backend.get_added_tokens_decoder())

    def is_open(self, token: int) -> bool:
        return token in self._bytes

    @functools.cached_property
    def _bytes(self) -> frozenset[int]:
        """The ids of single bytes of a decoder that takes a run of them as a whole: all characters, or none."""
        if "ByteFallback" not in str(self.backend.decoder):
            return frozenset()
        found = (self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(one for one in found if one is not None)

    def _decode(self, ids: list[int]) -> str:
        return str(self.backend.decode(ids, skip_special_tokens=False))


def _special(backend: Any) -> dict[str, int]:
    return {token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special}


def _encode(backend: Any, texts: Sequence[str], *, template: bool) -> list[list[int]]:
    if len(texts) == 1:  # one text needs none of the library's threads
        return [backend.encode(texts[0], add_special_tokens=template).ids]
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=template)]


def _renamed(content: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A `tokenizer.json` whose special tokens have other names, in the vocabulary too, from which some models would
    take them for a text."""
    content["added_tokens"] = [one for one in content["added_tokens"] if names.get(one["content"]) != one["content"]]
    for token in content["added_tokens"]:
        if token["content"] in names:
            token.update(content=names[token["content"]], normalized=False)
    names = {token: name for token, name in names.items() if token != name}
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = (merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b))]
    return content


# Names of special tokens, for files that say nothing of their roles.
_USUAL = {
    "eos_token": (
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eos|>",
        "<eos>",
        "[EOS]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]"),
    "pad_token": ("<pad>", "[PAD]"),
}


class HuggingFaceTokenizer(TokenizersLibrary):
    """A Hugging Face `tokenizer.json`, or a folder that holds one. The files beside it may name more tokens, which get
    the ids that `transformers` gives them."""

    def __init__(self, path: str) -> None:
        library = load_library("tokenizers")
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        _refuse_slow(file)
        content = read_file("--tokenizer-model", str(file))
        try:
            backend = library.Tokenizer.from_buffer(content)
        except Exception as error:
            raise UserError(f"--tokenizer-model {file}: not a tokenizer.json ({first_line(error)})") from None
        beside = TokensBeside(file.parent)
        self.special = _special(backend)
        backend.add_tokens(list(beside.missing(backend, library.AddedToken)))
        self._set_backend(backend)
        self.eod, self.bos, self.pad = (self._role(beside.role(role, usual)) for role, usual in _USUAL.items())

    def _role(self, names: Sequence[str]) -> int | None:
        # A vocabulary may hold such a name as a piece of text, as Qwen's holds "<s>".
        known = self.added or self.backend.get_vocab()
        return next((known[name] for name in names if name in known), None)


def _refuse_slow(file: Path) -> None:
    """A UserError for a folder whose ids only code of `transformers` knows."""
    there = [name for name in SLOW_FILES if (file.parent / name).is_file()]
    if file.name == "tokenizer.json" and not file.exists() and there:
        folder = repr(str(file.parent))
        raise UserError(
            f"--tokenizer-model {file.parent}: it has {there[0]} but no tokenizer.json, the only file that defines all "
            'ids. Write one with transformers: python -c "from transformers import AutoTokenizer; '
            f'AutoTokenizer.from_pretrained({folder}).save_pretrained({folder})"'
        )


class TokensBeside:
    """What the files beside a tokenizer.json say of tokens, in transformers' reading of them: the older files count
    only where tokenizer_config.json has no `added_tokens_decoder`. A UserError for a file in a wrong form.

    `settings`: what tokenizer_config.json holds. `declared`: forms of tokens with an id, by it. `named`: forms of
    special tokens that have a role or are listed.
    """

    def __init__(self, folder: Path):
        self.settings = json_object(folder / CONFIG)
        old = "added_tokens_decoder" not in self.settings
        self.settings |= json_object(folder / "special_tokens_map.json") if old else {}
        try:
            self.named = list(map(_form, _named(self.settings)))
            self.declared = self._older(folder) if old else self._declared()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{folder}: {CONFIG} or a file beside it has a wrong token ({error})") from None

    def _declared(self) -> dict[int, dict[str, Any]]:
        return {int(number): _form(value) for number, value in self.settings["added_tokens_decoder"].items()}

    def _older(self, folder: Path) -> dict[int, dict[str, Any]]:
        named = {token["content"] for token in self.named}
        result = {
            int(number): {"content": token, "special": token in named, "normalized": token not in named}
            for token, number in json_object(folder / "added_tokens.json").items()
        }
        for token in json_object(folder / "tokenizer.json").get("added_tokens", []):
            result[token["id"]] = {key: value for key, value in token.items() if key != "id"}
        return result

    def role(self, role: str, usual: Sequence[str]) -> Sequence[str]:
        """The token of a role, such as `eos_token`: none where it is null, any of the `usual` ones where nothing is
        said."""
        if role not in self.settings:
            return usual
        value = self.settings[role]
        return () if value is None else (str(_form(value)["content"]),)

    def names(self) -> set[str]:
        """The texts of all tokens."""
        return {token["content"] for token in (*self.declared.values(), *self.named)}

    def missing(self, backend: Any, make: Any) -> Iterator[Any]:
        """Tokens that tokenizer.json lacks, or has in another form, in the order in which `transformers` adds them:
        their ids follow from it. `make`: the library's AddedToken."""
        known = backend.get_added_tokens_decoder().values()
        forms, names = {repr(token) for token in known}, {token.content for token in known}
        special = {token["content"] for token in self.named}
        for _, form in sorted(self.declared.items()):
            token = make(**form)
            if repr(token) not in forms:
                names.add(token.content)
                yield make(**form | {"special": token.special or token.content in special})
        for form in self.named:
            if form["content"] not in names:
                names.add(form["content"])
                yield make(**form | {"special": True})


def _named(settings: Mapping[str, Any]) -> Iterator[Any]:
    others = [key for key in settings if key.endswith("_token") and key not in ROLES]
    for key in (*ROLES, *others):
        if isinstance(settings.get(key), str | dict):
            yield settings[key]
    listed = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    yield from listed.values() if isinstance(listed, dict) else listed


def _form(value: Any) -> dict[str, Any]:
    """A token as an object of the library's fields."""
    form = {"content": value} if isinstance(value, str) else {key: value[key] for key in value if key in FIELDS}
    if not isinstance(form["content"], str):
        raise TypeError(f"{form['content']!r} is not a text")
    return form


def json_object(file: Path) -> dict[str, Any]:
    """An object of a JSON file; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{file}: broken JSON ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: not a JSON object")
    return value


class GPT2BPETokenizer(TokenizersLibrary):
    """GPT-2's byte-level BPE (Radford et al. 2019) from vocab.json and merges.txt; `<|endoftext|>` is `eod`."""

    END = "<|endoftext|>"

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        library = load_library("tokenizers")
        for name, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            read_file(name, path)
        try:
            backend = library.Tokenizer(library.models.BPE.from_file(vocab_file, merge_file))
        except Exception as error:
            raise UserError(
                f"--vocab-file {vocab_file}, --merge-file {merge_file}: not GPT-2's vocabulary and merges "
                f"({first_line(error)})"
            ) from None
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = library.decoders.ByteLevel()
        backend.add_special_tokens([self.END])
        self._set_backend(backend)
        self.eod = backend.token_to_id(self.END)
