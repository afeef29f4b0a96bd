"""The folders that a run writes a model to: one list for all that check or own them."""

from __future__ import annotations

from megalite.config.schema import RunConfig
from megalite.config.schema_peft import PeftConfig


def adapter_folders(peft: PeftConfig) -> dict[str, str]:
    """The folders of adapters, by flag."""
    given = {"--save-adapter": peft.save_adapter, "--save-best-adapter": peft.save_best_adapter}
    return {flag: folder for flag, folder in given.items() if folder is not None}


def output_folders(config: RunConfig) -> dict[str, str]:
    """The folders of checkpoints and adapters that this run writes, by flag. Checkpoints come of training alone."""
    save = config.checkpoint.save
    checkpoints = {} if save is None or config.validation.skip_train else {"--save": save}
    return checkpoints | adapter_folders(config.peft)
