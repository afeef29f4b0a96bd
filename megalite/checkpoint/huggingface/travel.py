"""What travels with the weights: tokenizer, chat template, generation settings.

Key idea: a model must be used with what it was trained with. So beside the weights go the run's own tokenizer, the chat
template of its conversations, and as ends of a text also the end of their turns. Only what the run didn't choose comes
from the folder that the model descends from. All this is read when a run starts, and kept beside its checkpoints in
`huggingface/`; exports and generation take it from there, whatever has become of the files that the flags name.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage import CONFIG_FILE, read_json
from megalite.config.errors import UserError
from megalite.config.schema import RunConfig, TokenizerConfig
from megalite.data.chat_template import CHATML, Chat, ChatTemplate, load_chat
from megalite.data.segments import BOS_SIGN, EOD_SIGN
from megalite.data.tokenizer_base import Tokenizer, first_line
from megalite.data.tokenizer_json import SLOW_FILES, GPT2BPETokenizer, HuggingFaceTokenizer, TokensBeside
from megalite.data.tokenizers import SentencePieceTokenizer, build_tokenizer
from megalite.files.atomic import publish_folder, remove
from megalite.files.remote import Place, Remote, place

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
_ROLE_IDS = tuple(f"{role}_token_id" for role in _ROLES)
# By kind of tokenizer, the flags that name the files of its tokens, and what Hugging Face calls those.
_FIELDS = {
    "HuggingFaceTokenizer": {"tokenizer_model": "tokenizer.json"},
    "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
}


def read_small_files(folder: Place) -> dict[str, bytes]:
    """Tokenizer, templates, generation settings and `config.json` of a folder: content by name."""
    names = [*TOKENIZER_FILES, CONFIG_FILE]
    if isinstance(folder, Remote):
        names = [path.name for path in folder.glob("*") if path.name in names]
    names += sorted(f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*.jinja"))
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def tokenizer_of(folder: Path, vocab_size: int) -> TokenizerConfig:
    """The flags for the tokenizer in a Hugging Face folder; plain ids where there is none. Building it refuses a folder
    whose ids only code of `transformers` knows."""
    if not (folder / "tokenizer.json").is_file():
        for kind, is_it in (("SentencePieceTokenizer", _is_sentencepiece), ("GPT2BPETokenizer", _is_gpt2)):
            if is_it(folder):
                files: dict[str, Any] = {field: str(folder / name) for field, name in _FIELDS[kind].items()}
                return TokenizerConfig(tokenizer_type=kind, **files)
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


def origin(config: RunConfig) -> Place | None:
    """The Hugging Face folder that a run's model descends from: that of `--load-hf`, what is kept beside the
    checkpoints that it starts from, or that where its tokenizer lies, if it holds a `config.json`; else None."""
    checkpoints = [config.checkpoint.load, config.checkpoint.pretrained_checkpoint]
    candidates = [config.finetune.load_hf, *(f"{root}/{FOLDER}" for root in checkpoints if root is not None)]
    candidates += [config.tokenizer.tokenizer_model, config.tokenizer.vocab_file]
    places = [place(path) for path in candidates if path is not None]
    folders = [each if each.is_dir() else each.parent for each in places]
    return next((one for one in folders if (one / CONFIG_FILE).is_file()), None)


def companions(config: RunConfig, *, conversations: bool) -> dict[str, bytes]:
    """The files to write beside the weights of a run, by name: tokenizer, templates, settings, `config.json`.

    What the run didn't choose is as in the folder that the model descends from, byte for byte; without such a folder
    `config.json` holds only which ids have a role. `conversations`: whether the run learns answers in them. A UserError
    where a file can't be read.
    """
    base, tokenizer, own = origin(config), find_tokenizer(config.tokenizer), _tokenizer_files(config.tokenizer)
    files = {} if base is None else read_small_files(base)
    same = base is not None and shares_ids(base, config.tokenizer) and (not own or _settings(own) == _settings(files))
    if not same:
        files = {name: content for name, content in files.items() if name in (CONFIG_FILE, GENERATION_FILE)} | own
        if tokenizer is not None and "tokenizer.json" in own and _TOKENIZER_CONFIG not in own:
            files[_TOKENIZER_CONFIG] = to_json(_special_tokens(tokenizer))
    chat = _chat(config, tokenizer)
    if chat is not None and tokenizer is not None and config.finetune.chat_template is not None:
        files = with_template(files, portable(chat.template, tokenizer).encode())
    end = None
    if conversations and chat is not None:
        with suppress(UserError):  # the template refuses even the plainest conversation
            end = chat.end_of_turn()
    return files if same and end is None else files | _with_ids(files, None if same else tokenizer, end)


def kept_files(root: Place, config: RunConfig) -> dict[str, bytes]:
    """The companions of the checkpoints in `root`: as they were kept there; of an older version's as they would be now,
    from `config`."""
    kept = read_small_files(root / FOLDER)
    return kept or companions(config, conversations=config.finetune.task == "sft")


def keep(root: Place, files: Mapping[str, bytes]) -> None:
    """Have these files beside the checkpoints in `root`, in place of any others. An OSError where that fails."""
    if files and files != read_small_files(root / FOLDER):
        if isinstance(root, Remote):
            remove(root / FOLDER)
            write_small_files(root / FOLDER, files)
            return
        written = root / f"{FOLDER}.tmp"
        remove(written)
        write_small_files(written, files)
        publish_folder(written, root / FOLDER)


def kept_here(root: Place) -> tuple[Path, object]:
    """A folder on this machine with what is kept beside the checkpoints in `root`, and an object that has to live as
    long as it's read."""
    if isinstance(root, Path):
        return root / FOLDER, None
    fetched = tempfile.TemporaryDirectory(prefix="megalite-", ignore_cleanup_errors=True)
    write_small_files(Path(fetched.name), read_small_files(root / FOLDER))
    return Path(fetched.name), fetched


def use_kept(config: RunConfig, folder: Path) -> None:
    """Have `config` name the tokenizer and the template in the folder of what was kept, if any are."""
    fields = _FIELDS.get(config.tokenizer.tokenizer_type or "", {})
    if all((folder / name).is_file() for name in fields.values()):
        for field, name in fields.items():
            setattr(config.tokenizer, field, str(folder / name))
    if config.finetune.chat_template not in (None, CHATML) and (folder / TEMPLATE_FILE).is_file():
        config.finetune.chat_template = str(folder / TEMPLATE_FILE)


def _chat(config: RunConfig, tokenizer: Tokenizer | None) -> Chat | None:
    """How a run writes conversations; None where it has no template."""
    choice = config.finetune.chat_template
    if tokenizer is None or config.finetune.task != "sft":
        return None
    try:
        return load_chat(choice, tokenizer, config.tokenizer.tokenizer_model or config.finetune.load_hf)
    except UserError:
        if choice is not None:
            raise
        return None


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
            # On lines of their own, so that the first line of the template still begins one.
            lines += f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n"
    return lines + template.source


def _with_ids(files: Mapping[str, bytes], tokenizer: Tokenizer | None, end: int | None) -> dict[str, bytes]:
    """`config.json` and the generation settings with the same ends of a text, as far as they don't have them already.
    `tokenizer`: whose ids have the roles; None: those in the files. `end`: ends a text too.

    An id that is None is written: without it an architecture's own default would hold.
    """
    config, settings = values_of(files, CONFIG_FILE), values_of(files, GENERATION_FILE)
    before = settings if GENERATION_FILE in files else token_ids(config)
    stated = [values.get("eos_token_id") for values in (before, config)]
    ids: dict[str, Any] = {"eos_token_id": next((one for one in stated if one is not None), None)}
    if tokenizer is not None:
        ids = dict(zip(_ROLE_IDS, (tokenizer.bos, tokenizer.eod, tokenizer.pad), strict=True))
    eos = ids["eos_token_id"]
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if end is not None and end not in ends:
        ids["eos_token_id"] = [*ends, end] if ends else end
    result = {} if config | ids == config else {CONFIG_FILE: to_json(config | ids)}
    if before | ids != before and (files.keys() & {CONFIG_FILE, GENERATION_FILE} or end is not None):
        result[GENERATION_FILE] = to_json(before | ids)
    return result


def token_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    """The `..._token_id` fields."""
    return {name: value for name, value in values.items() if name.endswith("_token_id")}


def values_of(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The object of one of small JSON files; empty where it isn't among them."""
    try:
        values = json.loads(files.get(name, b"{}").decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{name} in the folder of the tokenizer or model is broken JSON: {first_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"{name} in the folder of the tokenizer or model must hold a JSON object")
    return values


def with_template(files: Mapping[str, bytes], template: bytes) -> dict[str, bytes]:
    """Small files with this chat template in place of any other."""
    others = [name for name in files if name in _TEMPLATE_FILES or name.startswith(f"{TEMPLATES}/")]
    result = {name: content for name, content in files.items() if name not in others}
    values = values_of(result, _TOKENIZER_CONFIG)
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


def shares_ids(folder: Place, tokenizer: TokenizerConfig) -> bool:
    """Whether the tokenizer of a Hugging Face folder has this one's ids, by the content of the files of tokens."""
    own, there = _tokenizer_files(tokenizer), read_small_files(folder)
    if not own:
        return tokenizer.tokenizer_type == "NullTokenizer" and there.keys().isdisjoint(_VOCABULARIES)
    return all(there.get(name) == content for name, content in own.items() if name in _VOCABULARIES)


def _tokenizer_files(tokenizer: TokenizerConfig) -> dict[str, bytes]:
    """A tokenizer's own files, with what lies beside them, under Hugging Face's file names; empty where it
    has no such form, or they are gone."""
    files = {}
    for field, name in _FIELDS.get(tokenizer.tokenizer_type or "", {}).items():
        path = Path(getattr(tokenizer, field) or name)
        files[name] = path / name if path.is_dir() else path
    if not files or not all(path.is_file() for path in files.values()):
        return {}
    beside = _settings(read_small_files(next(iter(files.values())).parent))
    return beside | {name: path.read_bytes() for name, path in files.items()}


def _settings(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Of small files those that say how a tokenizer is used."""
    return {name: files[name] for name in files if name not in (*_VOCABULARIES, GENERATION_FILE, CONFIG_FILE)}


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


def write_small_files(folder: Place, files: Mapping[str, bytes]) -> None:
    """Into a folder, which is made where it isn't there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
