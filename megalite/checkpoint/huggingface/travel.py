"""What travels with the weights: tokenizer, chat template, generation settings.

Key idea: a model must be used with what it was trained with. So beside the weights go the run's own tokenizer, the chat
template of its conversations, and as ends of a text also the end of their turns. Only what the run didn't choose comes
from the folder that the model descends from. A checkpoint made of a Hugging Face folder keeps that folder's small files
in `huggingface/`, beside its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage import CONFIG_FILE, read_json
from megalite.config.errors import UserError
from megalite.config.schema import RunConfig, TokenizerConfig
from megalite.data.chat_template import CHATML, ChatTemplate, load_chat
from megalite.data.segments import BOS_SIGN, EOD_SIGN
from megalite.data.tokenizer_base import Tokenizer
from megalite.data.tokenizer_json import SLOW_FILES, GPT2BPETokenizer, HuggingFaceTokenizer, TokensBeside
from megalite.data.tokenizers import SentencePieceTokenizer, build_tokenizer

FOLDER = "huggingface"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE_FILES = (TEMPLATE_FILE, "chat_template.json")
TOKENIZER_FILES = (
    *_VOCABULARIES,
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    *_TEMPLATE_FILES,
    GENERATION_FILE,
)
_ROLES = ("bos", "eos", "pad")


def copy_small_files(source: Path, target: Path, *, config: bool = False) -> list[str]:
    """Copy tokenizer, templates and generation settings, and with `config` the `config.json` too; their names."""
    target.mkdir(parents=True, exist_ok=True)
    names = [name for name in (*TOKENIZER_FILES, *([CONFIG_FILE] if config else [])) if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES)
        names.append(TEMPLATES)
    return names


def read_small_files(folder: Path) -> dict[str, bytes]:
    """Tokenizer, templates and generation settings of a folder: content by name."""
    paths = [*(folder / name for name in TOKENIZER_FILES), *sorted((folder / TEMPLATES).glob("*.jinja"))]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}


def tokenizer_of(folder: Path, vocab_size: int) -> TokenizerConfig:
    """The flags for the tokenizer in a Hugging Face folder; plain ids where there is none. Building it refuses a folder
    whose ids only code of `transformers` knows."""
    if not (folder / "tokenizer.json").is_file():
        if _is_sentencepiece(folder):
            model = str(folder / "tokenizer.model")
            return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
        if _is_gpt2(folder):
            vocabulary, merges = str(folder / "vocab.json"), str(folder / "merges.txt")
            return TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges)
        if not any((folder / name).is_file() for name in SLOW_FILES):
            return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size - 1)
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))


def _is_sentencepiece(folder: Path) -> bool:
    """Whether a tokenizer.model is all there is: no file names a class of `transformers` or more tokens."""
    if not (folder / "tokenizer.model").is_file():
        return False
    beside = TokensBeside(folder)
    return "tokenizer_class" not in beside.settings and not beside.declared


def _is_gpt2(folder: Path) -> bool:
    """Whether vocab.json and merges.txt are GPT-2's, with no more tokens, not of a model that cuts words otherwise."""
    if not ((folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()):
        return False
    beside = TokensBeside(folder)
    kind = beside.settings.get("tokenizer_class")
    if kind is None and (folder / CONFIG_FILE).is_file():
        kind = read_json(folder / CONFIG_FILE).get("model_type")
    return (
        kind in (None, "gpt2", "GPT2Tokenizer", "GPT2TokenizerFast")
        and not any(beside.settings.get(name) for name in ("add_prefix_space", "add_bos_token"))
        and beside.names() <= {GPT2BPETokenizer.END}
    )


def find_tokenizer(tokenizer: TokenizerConfig) -> Tokenizer | None:
    """A tokenizer; None where its files aren't there or can't be used."""
    try:
        return build_tokenizer(tokenizer)
    except UserError:
        return None


def origin(root: Path | None, config: RunConfig) -> Path | None:
    """The Hugging Face folder that the checkpoints in `root` descend from: what was kept of it beside them, the folder
    of `--load-hf`, or that where their tokenizer lies, if it holds a `config.json`. None where there is none."""
    candidates = [] if root is None else [root / FOLDER]
    given = [config.finetune.load_hf, config.tokenizer.tokenizer_model, config.tokenizer.vocab_file]
    candidates += [Path(path) if Path(path).is_dir() else Path(path).parent for path in given if path is not None]
    return next((one for one in candidates if (one / CONFIG_FILE).is_file()), None)


@dataclass(frozen=True)
class Spoken:
    """What a run was trained with. `tokenizer`: None where its files are gone. `template`: the text of
    `--chat-template` as transformers takes it; None: the tokenizer's own, if there is one. `end`: the id that ends an
    answer in conversations; None where none were trained."""

    config: TokenizerConfig
    tokenizer: Tokenizer | None
    template: str | None = None
    end: int | None = None


def spoken_by(config: RunConfig) -> Spoken:
    """Of the run of a configuration. A UserError where the file of its `--chat-template` can't be read any more."""
    tokenizer, choice = find_tokenizer(config.tokenizer), config.finetune.chat_template
    if tokenizer is None or config.finetune.task != "sft":
        return Spoken(config.tokenizer, tokenizer)
    try:
        template = load_chat(choice, tokenizer, config.tokenizer.tokenizer_model or config.finetune.load_hf)
    except UserError:
        if choice is not None:
            raise
        return Spoken(config.tokenizer, tokenizer)
    text = None if choice is None else portable(template.template, tokenizer)
    try:
        end = template.end_of_turn()
    except UserError:  # it refuses even the plainest conversation
        end = None
    return Spoken(config.tokenizer, tokenizer, text, end)


def portable(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    """The text of a template for transformers, where it writes what training saw.

    In place of signs for ids it sets those ids' text, and of the built-in template all that transformers doesn't know.
    """
    texts = {EOD_SIGN: tokenizer.eod, BOS_SIGN: tokenizer.bos}
    lines = ""
    for name, value in template.variables.items():
        token = texts.get(value)
        if token is not None:
            value = _text_of(tokenizer, token)
        if token is not None or template.name == CHATML:
            lines += f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}"
    return lines + template.source


def companions(spoken: Spoken, base: Path | None) -> dict[str, bytes]:
    """The files to write beside weights, by name. `base`: the Hugging Face folder that the model descends from."""
    known = {} if base is None else read_small_files(base)
    if base is None or not holds_tokenizer(base, spoken.config):
        known = {name: content for name, content in known.items() if name == GENERATION_FILE}
        known |= _tokenizer_files(spoken)
    if spoken.template is not None:
        known = with_template(known, spoken.template.encode())
    return known | _generation_settings(spoken, base)


def _generation_settings(spoken: Spoken, base: Path | None) -> dict[str, bytes]:
    """`generation_config.json`, where the run's ends of a text aren't those of the base."""
    there = base is not None and (base / GENERATION_FILE).is_file()
    kept = base is not None and holds_tokenizer(base, spoken.config)
    if spoken.end is None and (kept or not there):
        return {}
    values = read_json(base / GENERATION_FILE) if base is not None and there else token_ids(spoken, base)
    return {GENERATION_FILE: to_json(values | token_ids(spoken, base, values))}


def token_ids(spoken: Spoken, base: Path | None, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The `..._token_id` fields: as in `values` (default: the base's `config.json`) where the run has the base's
    tokenizer, else of its own one; and with the end of turn.

    None is written too: without it an architecture's own default would hold.
    """
    if base is not None and holds_tokenizer(base, spoken.config):
        values = read_json(base / CONFIG_FILE) if values is None else values
        ids = {name: value for name, value in values.items() if name.endswith("_token_id")}
    else:
        own = spoken.tokenizer
        found = (None, None, None) if own is None else (own.bos, own.eod, own.pad)
        ids = dict(zip((f"{role}_token_id" for role in _ROLES), found, strict=True))
    if spoken.end is None:
        return ids
    eos = ids.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if spoken.end not in ends:
        ids["eos_token_id"] = [*ends, spoken.end] if ends else spoken.end
    return ids


def with_template(files: Mapping[str, bytes], template: bytes) -> dict[str, bytes]:
    """Small files with this chat template in place of any other."""
    result = {name: content for name, content in files.items() if name not in _TEMPLATE_FILES}
    result = {name: content for name, content in result.items() if not name.startswith(f"{TEMPLATES}/")}
    if _TOKENIZER_CONFIG in result:
        values = json.loads(result[_TOKENIZER_CONFIG].decode("utf-8-sig"))
        if values.pop("chat_template", None) is not None:
            result[_TOKENIZER_CONFIG] = to_json(values)
    return {**result, TEMPLATE_FILE: template}


def laid_over(files: Mapping[str, bytes], other: Mapping[str, bytes]) -> dict[str, bytes]:
    """Small files of a folder with `other` ones in their place: a tokenizer and a template replace the whole."""
    result = dict(files)
    if any(name in other for name in _VOCABULARIES):
        result = {name: content for name, content in result.items() if name == GENERATION_FILE}
    elif TEMPLATE_FILE in other:
        result = with_template(result, other[TEMPLATE_FILE])
    return {**result, **other}


def holds_tokenizer(folder: Path, tokenizer: TokenizerConfig) -> bool:
    """Whether the tokenizer of a Hugging Face folder is this very one, by the content of its files."""
    files = _vocabularies(tokenizer)
    if not files:
        none_there = not any((folder / name).is_file() for name in _VOCABULARIES)
        return tokenizer.tokenizer_type == "NullTokenizer" and none_there
    return all(_is_same(path, folder / name) for name, path in files.items())


def _is_same(file: Path, here: Path) -> bool:
    """Whether a tokenizer's file is the one `here`; one that was kept beside a run may have moved with the run."""
    if not file.is_file() or not here.is_file():
        return here.is_file() and file.parent.name == FOLDER
    return file.samefile(here) or file.read_bytes() == here.read_bytes()


def _vocabularies(tokenizer: TokenizerConfig) -> dict[str, Path]:
    """The files that hold a tokenizer's tokens, by the names that Hugging Face gives them."""
    kind, model = tokenizer.tokenizer_type, tokenizer.tokenizer_model
    files: dict[str, str | None] = {}
    if kind == "HuggingFaceTokenizer":
        bare = model is None or Path(model).is_file() or Path(model).suffix == ".json"
        files = {"tokenizer.json": model if bare else f"{model}/tokenizer.json"}
    elif kind == "SentencePieceTokenizer":
        files = {"tokenizer.model": model}
    elif kind == "GPT2BPETokenizer":
        files = {"vocab.json": tokenizer.vocab_file, "merges.txt": tokenizer.merge_file}
    return {name: Path(path) for name, path in files.items() if path is not None}


def _tokenizer_files(spoken: Spoken) -> dict[str, bytes]:
    """A tokenizer's own files, with what lies beside them; empty where Hugging Face has no such form, or they are
    gone."""
    files = {name: path for name, path in _vocabularies(spoken.config).items() if path.is_file()}
    if not files:
        return {}
    beside = read_small_files(next(iter(files.values())).parent)
    result = {name: content for name, content in beside.items() if name not in (*_VOCABULARIES, GENERATION_FILE)}
    result |= {name: path.read_bytes() for name, path in files.items()}
    if _TOKENIZER_CONFIG not in result and "tokenizer.json" in result and spoken.tokenizer is not None:
        result[_TOKENIZER_CONFIG] = to_json(_special_tokens(spoken.tokenizer))
    return result


def _special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """`tokenizer_config.json` for a `tokenizer.json` that had none: which of its tokens have a role."""
    ids = zip(_ROLES, (tokenizer.bos, tokenizer.eod, tokenizer.pad), strict=True)
    named = {f"{role}_token": _text_of(tokenizer, token) for role, token in ids if token is not None}
    return {**named, "tokenizer_class": "PreTrainedTokenizerFast"}


def _text_of(tokenizer: Tokenizer, token: int) -> str:
    """How a tokenizer's files write one of its tokens; empty for a kind that Hugging Face doesn't have."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        return str(tokenizer.processor.id_to_piece(token))
    if isinstance(tokenizer, (HuggingFaceTokenizer, GPT2BPETokenizer)):
        return str(tokenizer.backend.id_to_token(token))
    return ""


def to_json(values: Mapping[str, Any]) -> bytes:
    """A JSON file's content."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def write_small_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Into a folder that is being made."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
