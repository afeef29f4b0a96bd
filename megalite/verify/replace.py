"""What a proof takes in place of files that a run needs and a proof doesn't.

Key idea: a layout is right or wrong for any data, so a launch script can be pasted before its files are there.
"""

from __future__ import annotations

import re
from pathlib import Path

from megalite.config.fields import all_fields, get
from megalite.config.schema import RunConfig, TokenizerConfig

_SOURCES = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path")
_TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")
_PLACES = (
    *(f"checkpoint.{name}" for name in ("save", "load", "pretrained_checkpoint")),
    *(f"logging.{name}" for name in ("tensorboard_dir", "wandb_project", "metrics_file", "timeline", "profile")),
    *("peft.save_adapter", "peft.save_best_adapter", "finetune.eval_prompt", "finetune.train_epochs"),
    "training.dump_grads",
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
    note = f"{_shown(config, absent)}: no such file, so generated data and tokens replace data and tokenizer"
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
    given = [path for path in paths if get(config, path) is not None]
    return [f"{_shown(config, given)}: not read, since --shrink uses generated data and tokens"] if given else []


def unused_note(config: RunConfig, proof: RunConfig) -> list[str]:
    """What was given to a run, `config`, and its `proof` neither reads nor writes."""
    given = [path for path in _PLACES if get(config, path) and not get(proof, path)]
    why = "a proof doesn't save, resume or report, and takes only a few steps"
    return [f"{_shown(config, given)}: not used, since {why}"] if given else []


def _shown(config: RunConfig, paths: list[str]) -> str:
    fields = all_fields()
    return ", ".join(fields[path].show(get(config, path)) for path in paths)
