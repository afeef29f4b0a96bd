"""LoRA added into the weights of a Hugging Face folder.

Key idea: sum and product are taken in fp32 and cast once to the weight's own format; so the only error is that one
rounding, and it is measured. Memory holds one file of the folder.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.checkpoint.huggingface.files import INDEX_FILE, SINGLE_FILE, TensorFiles, new_folder
from megalite.checkpoint.huggingface.travel import copy_small_files
from megalite.checkpoint.storage import read_json
from megalite.peft.convert import from_peft
from megalite.peft.files import SCORE, read_adapter
from megalite.peft.modules import hf_linears


class _Change(NamedTuple):
    """What is added to a stored weight: factor · B A, transposed where the weight is [in, out]."""

    a: Tensor
    b: Tensor
    factor: float
    transposed: bool


@dataclass
class Rounding:
    """Errors of the cast. `largest`: of any weight. `share`: root mean square of the errors over that of the change."""

    layers: int = 0
    largest: float = 0.0
    _errors: float = 0.0
    _change: float = 0.0

    @property
    def share(self) -> float:
        return math.sqrt(self._errors / self._change) if self._change else 0.0

    def add(self, change: Tensor, error: Tensor) -> None:
        """One weight's."""
        self.layers += 1
        self.largest = max(self.largest, error.abs().max().item())
        self._errors += error.double().square().sum().item()
        self._change += change.double().square().sum().item()

    def __str__(self) -> str:
        return (
            f"{self.layers} weights changed; rounding error: largest {self.largest:.3g}, root mean square "
            f"{self.share:.3g} of the change's"
        )


def merge_adapter(source: Path, adapter: Path, target: Path) -> Rounding:
    """Write the Hugging Face folder `target`, which must not exist or be empty: `source` with the LoRA adapter added.

    All else is copied as it is. Raises a `CheckpointError`, and nothing of the attempt stays, where a folder is
    damaged, the adapter isn't LoRA or is of another model.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"--hf {target} exists and is no empty folder: choose a new one")
    rounding = Rounding()
    with TensorFiles(source) as files:
        changes = _changes(source, adapter, files)
        with new_folder(target) as temporary:
            for file, names in _names_by_file(source, files).items():
                content = {}
                for name in names:
                    tensor = files.read(name, tuple(slice(0, size) for size in files.stored[name].shape))
                    content[name] = _merged(tensor, changes[name], rounding) if name in changes else tensor
                save_file(content, temporary / file, metadata={"format": "pt"})
            copy_small_files(source, temporary, config=True)
            if not (source / SINGLE_FILE).exists():
                shutil.copyfile(source / INDEX_FILE, temporary / INDEX_FILE)
    return rounding


def _changes(source: Path, folder: Path, files: TensorFiles) -> dict[str, _Change]:
    """By the name of the stored weight."""
    adapter, found = read_adapter(folder), read_huggingface_config(source)
    if adapter.kind != "lora":
        raise CheckpointError(f"{folder} is a {adapter.kind}: it has vectors of its own, which no weight can take up")
    if SCORE in adapter.tensors:
        raise CheckpointError(
            f"{folder} is of a classifier: it comes with a head, which isn't merged; PEFT loads it beside {source}"
        )
    from_peft(adapter, found.model, found.vocab_size)  # refuses one of another model
    prefix = found.architecture.prefix
    bare = not any(name.startswith(prefix) for name in files.stored)
    transposed = any(layer.transposed for layer in hf_linears(found.architecture, found.model))
    changes = {}
    for module, (a, b) in adapter.pairs().items():
        name = f"{module.removeprefix(prefix) if bare else module}.weight"
        stored = files.stored.get(name)
        shape = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
        if stored is None or stored.dtype is None or stored.shape != shape:
            raise CheckpointError(f"{source} has no weight {name} of {list(shape)} in a plain number format")
        changes[name] = _Change(a, b, adapter.factor(module, a.shape[0]), transposed)
    return changes


def _names_by_file(source: Path, files: TensorFiles) -> Mapping[str, list[str]]:
    if (source / SINGLE_FILE).exists():
        return {SINGLE_FILE: list(files.stored)}
    result: dict[str, list[str]] = {}
    for name, file in read_json(source / INDEX_FILE)["weight_map"].items():
        result.setdefault(file, []).append(name)
    return result


def _merged(weight: Tensor, change: _Change, rounding: Rounding) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    added = (change.b.to(wide) @ change.a.to(wide)) * change.factor
    exact = weight.to(wide) + (added.t() if change.transposed else added)
    result = exact.to(weight.dtype)
    rounding.add(added, result.to(wide) - exact)
    return result
