"""What a proof takes in place of files that a run needs and a proof doesn't.

Key idea: a layout is right or wrong for any data, so a launch script can be pasted before its files are there.
"""

from __future__ import annotations

import re
from pathlib import Path

from megalite.config.fields import all_fields, get, given
from megalite.config.schema import RunConfig, TokenizerConfig

_SOURCES = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path")
_TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")
# What a proof doesn't use, besides what a run writes.
_UNUSED = (
    *("checkpoint.load", "checkpoint.pretrained_checkpoint", "logging.wandb_project", "logging.profile"),
    *("finetune.eval_prompt", "finetune.train_epochs"),
)
_VOCABULARY = 32000  # ids, where nothing says how many


def use_made_data(config: RunConfig, vocab_size: int) -> None:
    """Documents and ids from a rule in place of the corpus and its tokenizer."""
    for name in _SOURCES:
        setattr(config.data, name, None)
    config.data.mock_data = True
    config.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size)


def replace_absent_files(config: RunConfig) -> list[str]:
    """Made data where files of the corpus or the tokenizer aren't there. Returns a note, where so.

    The data of fine-tuning and the tokenizer of `--load-hf` are never replaced.
    """
    if config.finetune.sft_data is not None or config.finetune.load_hf is not None:
        return []
    paths = [*(f"data.{name}" for name in _SOURCES), *(f"tokenizer.{name}" for name in _TOKENIZER_FILES)]
    absent = [path for path in paths if get(config, path) is not None and not _all_there(config, path)]
    if not absent:
        return []
    note = f"{', '.join(given(config, *absent))}: no such file, so generated data and tokens replace data and tokenizer"
    rows = config.model.model_vocab_size
    use_made_data(config, config.tokenizer.vocab_size or (rows - 1 if rows else _VOCABULARY))
    return [note]


def _all_there(config: RunConfig, path: str) -> bool:
    value = get(config, path)
    if isinstance(value, list):  # prefixes, and weights between them
        prefixes = [word for word in value if not re.fullmatch(r"[\d.eE+-]+", word)]
        return all(Path(prefix + suffix).exists() for prefix in prefixes for suffix in (".bin", ".idx"))
    return Path(value).exists()


def replaced_note(config: RunConfig) -> list[str]:
    """What a shrunk proof doesn't read."""
    paths = [*(f"data.{name}" for name in _SOURCES), *(f"tokenizer.{name}" for name in _TOKENIZER_FILES)]
    paths += ["finetune.sft_data", "finetune.sft_valid_data"]
    shown = ", ".join(given(config, *paths))
    return [f"{shown}: not read, since --shrink uses generated data and tokens"] if shown else []


def unused_note(config: RunConfig, proof: RunConfig) -> list[str]:
    """What was given to a run, `config`, and its `proof` neither reads nor writes."""
    paths = [each.path for each in all_fields().values() if each.writes or each.path in _UNUSED]
    shown = ", ".join(given(config, *(path for path in paths if not get(proof, path))))
    why = "a proof doesn't save, resume or report, and takes only a few steps"
    return [f"{shown}: not used, since {why}"] if shown else []
