"""What travels with the weights: tokenizer, chat template, generation settings.

Key idea: a checkpoint that came from a Hugging Face folder keeps that folder's small files beside its own, in
`huggingface/`, so an export after training finds them again; a tokenizer of another kind travels under the name that
Hugging Face gives such a file.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megalite.checkpoint.storage import CONFIG_FILE, read_json
from megalite.config.errors import UserError
from megalite.config.schema import TokenizerConfig
from megalite.data.tokenizer_base import Tokenizer
from megalite.data.tokenizer_json import SLOW_FILES, GPT2BPETokenizer, TokensBeside
from megalite.data.tokenizers import build_tokenizer

FOLDER = "huggingface"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
TEMPLATES = "additional_chat_templates"


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


def origin(root: Path, tokenizer: TokenizerConfig) -> Path | None:
    """The Hugging Face folder that the checkpoints in `root` descend from: what was kept of it beside them, or the
    folder where their tokenizer still lies, if it holds a `config.json`. None where there is no such folder."""
    candidates = [root / FOLDER]
    for path in (tokenizer.tokenizer_model, tokenizer.vocab_file):
        if path is not None:
            candidates.append(Path(path) if Path(path).is_dir() else Path(path).parent)
    return next((one for one in candidates if (one / CONFIG_FILE).is_file()), None)


def copy_tokenizer(tokenizer: TokenizerConfig, target: Path) -> list[str]:
    """Copy a tokenizer's own files into a Hugging Face folder; their names there. Empty where there is no such form."""
    kind, model = tokenizer.tokenizer_type, tokenizer.tokenizer_model
    if kind == "HuggingFaceTokenizer" and model is not None and Path(model).is_dir():
        return copy_small_files(Path(model), target)
    files: dict[str, str | None] = {}
    if kind == "HuggingFaceTokenizer":
        files = {"tokenizer.json": model}
    elif kind == "SentencePieceTokenizer":
        files = {"tokenizer.model": model}
    elif kind == "GPT2BPETokenizer":
        files = {"vocab.json": tokenizer.vocab_file, "merges.txt": tokenizer.merge_file}
    found = {name: path for name, path in files.items() if path is not None and Path(path).is_file()}
    for name, path in found.items():
        shutil.copyfile(path, target / name)
    return list(found)
