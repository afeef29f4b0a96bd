"""What doesn't go together with a run's adapter: the network, the kernel, its folders, the checkpoint that it goes on
from. All of it is found before anything is built."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.checkpoint import read_checkpoint_config
from megalite.checkpoint.errors import CheckpointError, attempt
from megalite.checkpoint.storage import CheckpointDirectory
from megalite.config.check_peft import lora_parts, target_names
from megalite.config.fields import adapter_folders, all_fields
from megalite.config.schema import RunConfig
from megalite.files.remote import place
from megalite.nn.attention_backend import AttentionBackend
from megalite.peft.convert import architecture_of, from_peft
from megalite.peft.files import read_adapter
from megalite.peft.virtual import backend_problem

_SHAPES = {
    "lora": ("lora_rank", "lora_target_modules"),
    "prefix": ("num_virtual_tokens", "prefix_projection", "prefix_hidden_size"),
    "prompt": ("num_virtual_tokens",),
}
"""Of each kind of adapter, what its weights' shapes follow from."""


def adapter_problems(config: RunConfig, vocab_size: int, backend: AttentionBackend, device_type: str) -> list[str]:
    """Problems of a resolved configuration whose section `peft` is complete: virtual tokens need a mask, a saved
    adapter a Hugging Face architecture that has this network, `--load-adapter` a folder that fits it."""
    peft = config.peft
    problems = list(filter(None, [backend_problem(backend, peft.peft, device_type)]))
    for flag, folder in adapter_folders(config).items():
        if peft.peft == "lora" and (error := attempt(lambda: architecture_of(config.model, vocab_size))):
            problems.append(f"{flag} {folder}: {error}")
        if (place(folder) / "config.json").exists():
            problems.append(
                f"{flag} {folder} is a model's folder, and transformers would then always load the model with the "
                "adapter: give another folder"
            )
    if (directory := peft.load_adapter) is not None:
        classes = len(config.finetune.class_names or ()) if config.finetune.task == "classification" else None
        if error := attempt(lambda: from_peft(read_adapter(directory), config.model, vocab_size, classes)):
            problems.append(f"--load-adapter: {error}")
    return problems


def check_resumed_adapter(directory: CheckpointDirectory, config: RunConfig, *, weights_only: bool) -> list[str]:
    """What differs from the run that saved an adapter, one line each; nothing where neither run has one.

    A CheckpointError where the kinds differ, or where the adapter's model isn't named: the checkpoint doesn't hold it.
    """
    if weights_only or config.peft.peft == "none":
        refuse_adapter(directory)
        return []
    saved = read_checkpoint_config(directory)
    theirs, ours = (_base(each) for each in (saved, config))
    if saved.peft.peft != config.peft.peft:
        raise CheckpointError(
            f"{directory.path} is of a run with --peft {saved.peft.peft}, and this one has --peft {config.peft.peft}; "
            "a checkpoint of the model itself is given as --pretrained-checkpoint"
        )
    if theirs and not ours:
        raise CheckpointError(f"{directory.path} holds an adapter alone, trained with {theirs}: give that too")
    lines = []
    if theirs and theirs != ours:
        lines.append(
            f"warning: {ours} replaces the checkpoint's {theirs}: unless both hold the same weights, the adapter was "
            "trained for another model, and answers will be wrong"
        )
    shapes = _SHAPES[saved.peft.peft] if saved.peft.load_adapter is config.peft.load_adapter is None else ()
    for name in (*shapes, *(("lora_alpha", "use_rslora") if saved.peft.peft == "lora" else ())):
        show = all_fields()[f"peft.{name}"].show
        before, now = _meaning(saved, name), _meaning(config, name)
        if before != now and name in shapes:
            raise CheckpointError(f"{directory.path} was trained with {show(before)}, and this run has {show(now)}")
        if before != now:
            lines.append(f"{show(now)} replaces the checkpoint's {show(before)}")
    return lines


def refuse_adapter(directory: CheckpointDirectory) -> None:
    """Raise a CheckpointError for a checkpoint that holds no model."""
    kind = read_checkpoint_config(directory).peft.peft
    if kind != "none":
        raise CheckpointError(
            f"{directory.path} holds only what a run with --peft {kind} trained beside a model: --load it "
            "with that run's flags, or start from what --save-adapter wrote with --load-adapter"
            + (", or from the folder that tools/merge_adapter.py --load makes" if kind == "lora" else "")
        )


def _meaning(config: RunConfig, name: str) -> Any:
    """The value of a field of `peft`; of targets the parts that they name."""
    value = getattr(config.peft, name)
    return lora_parts(config.model, target_names(config.peft, config.model)) if name == "lora_target_modules" else value


def _base(config: RunConfig) -> str | None:
    """The flag that names an adapter's model."""
    if config.finetune.load_hf is not None:
        return f"--load-hf {config.finetune.load_hf}"
    folder = config.checkpoint.pretrained_checkpoint
    return None if folder is None else f"--pretrained-checkpoint {folder}"
