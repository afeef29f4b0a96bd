"""Files of `torch.save` that Megatron-LM wrote, read without running anything that they name.

Key idea: a pickle names what shall be called, and torch's restricted unpickler calls only what builds tensors. The
other names in Megatron-LM's files (its enums, numpy's random states) are of things that no conversion needs. They stand
for an object that takes anything and does nothing; a name that such files never have is refused.
"""

from __future__ import annotations

import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from megalite.checkpoint.errors import CheckpointError, naming

_KNOWN = (
    *("megatron.", "transformer_engine.", "apex.", "numpy.", "signal.", "pathlib.", "datetime."),
    *("_io.BytesIO", "argparse.Namespace", "types.SimpleNamespace"),
)
"""How the names begin."""
_OF_OLD_FILES = ("megatron.fp16.loss_scaler.DynamicLossScaler", "megatron.fp16.loss_scaler.LossScaler")
"""Before torch 1.6 a file had another form, whose names can't be listed."""


class Inert:
    """What a pickle builds in place of an object that isn't needed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary that a file holds, its tensors on the CPU and read from the disk when they are used.

    Raises a `CheckpointError` for a file that is missing or damaged, or names what Megatron-LM's files don't.
    """
    with naming(path):
        path.open("rb").close()
    archive = zipfile.is_zipfile(path)
    try:
        names = get_unsafe_globals_in_checkpoint(path) if archive else _OF_OLD_FILES
    except Exception as error:  # damaged bytes can make a reader raise anything
        raise _damaged(path) from error
    strange = sorted(name for name in names if not name.startswith(_KNOWN))
    if strange:
        raise CheckpointError(f"{path} is not read: it would run {', '.join(strange)}, which no checkpoint needs")
    allowed: list[Any] = [(Inert, name) for name in names if name != "argparse.Namespace"]
    if Namespace not in get_safe_globals():  # the block below takes away what it allowed
        allowed.append(Namespace)
    try:
        with safe_globals(allowed):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except Exception as error:
        raise _damaged(path) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not the dictionary of a checkpoint")
    return content


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged, or was not written by Megatron-LM")


def read_arguments(content: dict[str, Any], path: Path) -> Namespace:
    """The arguments of the run that wrote a file. A `CheckpointError` where it holds none."""
    arguments = content.get("args")
    if not isinstance(arguments, Namespace):
        raise CheckpointError(f"{path} holds no args: only checkpoints that say how they were trained can be converted")
    return arguments
