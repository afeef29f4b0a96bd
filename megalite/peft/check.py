"""Checks of adapters that need more than the configuration, before any process group exists."""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint.errors import CheckpointError
from megalite.config.fields import adapter_folders
from megalite.config.schema import RunConfig
from megalite.nn.attention_backend import AttentionBackend
from megalite.peft.convert import architecture_of, from_peft
from megalite.peft.files import read_adapter
from megalite.peft.virtual import backend_problem


def check(config: RunConfig, vocab_size: int, backend: AttentionBackend, device_type: str) -> list[str]:
    """Problems of a resolved configuration whose section `peft` is complete: virtual tokens need a mask,
    a saved adapter a Hugging Face architecture that has this network, `--load-adapter` a folder that fits it."""
    peft = config.peft
    problems = list(filter(None, [backend_problem(backend, peft.peft, device_type)]))
    for flag, folder in adapter_folders(config).items():
        if peft.peft == "lora":
            try:
                architecture_of(config.model, vocab_size)
            except CheckpointError as error:
                problems.append(f"{flag} {folder}: {error}")
        if (Path(folder) / "config.json").exists():
            problems.append(
                f"{flag} {folder} is a model's folder, and transformers would then always load the model with the "
                "adapter: give another folder"
            )
    if peft.load_adapter is not None:
        classes = len(config.finetune.class_names or ()) if config.finetune.task == "classification" else None
        try:
            from_peft(read_adapter(peft.load_adapter), config.model, vocab_size, classes)
        except CheckpointError as error:
            problems.append(f"--load-adapter: {error}")
    return problems
