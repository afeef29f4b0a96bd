"""LoRA of a run's checkpoint added into the weights of a Hugging Face folder, routed experts' too.

Key idea: an adapter's product is a change of one logical weight, and the architecture's table cuts it like that weight.
So no format of adapters is needed between, which for routed experts there isn't.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.checkpoint import read_checkpoint_config
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.architecture import HEAD, Architecture
from megalite.checkpoint.huggingface.config import network_settings, read_huggingface_config
from megalite.checkpoint.huggingface.files import Stored, TensorFiles, check_absent, new_model_folder, write_weights
from megalite.checkpoint.huggingface.parts import Part
from megalite.checkpoint.huggingface.travel import FOLDER, laid_over, read_small_files, write_small_files
from megalite.checkpoint.huggingface.weights import FLOATING
from megalite.checkpoint.index import check_files, read_index
from megalite.checkpoint.rewrite import read_logical
from megalite.checkpoint.storage import CheckpointDirectory
from megalite.checkpoint.tensor_file import Entry
from megalite.config.schema import RunConfig
from megalite.distributed.param_spec import Shape
from megalite.peft.merge import Rounding, rounded_sum
from megalite.peft.modules import EXPERT_LINEAR_OF, linear_shapes, slots_of

_KEY = re.compile(r"model\.(decoder\.layers\.\d+)\.(.+)\.lora\.([^.]+)\.a")


class _Changes:
    """What the adapters of a checkpoint add to logical weights: `linears` by the weight's name, and which targets of
    it have one."""

    def __init__(self, source: CheckpointDirectory, config: RunConfig):
        self.source, self.model, self.peft, self.index = source, config.model, config.peft, read_index(source)
        check_files(source, self.index.files)
        self.wide = torch.float64 if config.precision.fp64 else torch.float32
        self.linears: dict[str, tuple[str, list[str]]] = {}
        for key in self.index.tensors:
            if found := _KEY.fullmatch(key):
                self.linears.setdefault(f"{found[1]}.{found[2]}.weight", (found[2], []))[1].append(found[3])

    def shape(self, name: str) -> Shape:
        """Of a weight: [out, in], of routed experts [experts, out, in], where out may be several dimensions."""
        linear, _ = self.linears[name]
        experts = (self.model.num_experts or 0,) if linear in EXPERT_LINEAR_OF.values() else ()
        return *experts, *linear_shapes(self.model)[linear]

    def added(self, name: str) -> Tensor:
        """scale · B A in at least fp32, zeros where no target is."""
        linear, parts = self.linears[name]
        result = torch.zeros(self.shape(name), dtype=self.wide)
        for part in parts:
            a, b = (self._matrix(f"{name.removesuffix('weight')}lora.{part}.{each}") for each in "ab")
            rank = b.shape[-1]
            factor = self.peft.lora_alpha / (math.sqrt(rank) if self.peft.use_rslora else rank)
            of_experts = linear in EXPERT_LINEAR_OF.values()
            product = torch.einsum("e...r,eri->e...i" if of_experts else "...r,ri->...i", b, a) * factor
            dim, (low, high) = slots_of(part, self.model) or (0, (0, result.shape[0]))
            result.narrow(dim, low, high - low).copy_(product)
        return result

    def _matrix(self, name: str) -> Tensor:
        """What the optimizer holds of it, if that is there, as in an adapter's folder."""
        keys = f"optimizer.main.{name}", f"model.{name}"
        key = next(key for key in keys if key in self.index.tensors)
        return read_logical(self.source.path, self.index, key).to(self.wide)


def merge_checkpoint(
    source: CheckpointDirectory, base: Path, target: Path, ignored: Collection[str] | None = ()
) -> list[str]:
    """Write the Hugging Face folder `target`, which must not exist or be empty: the model of the folder `base` with the
    LoRA of a checkpoint added; lines for the user, the first with the error of rounding.

    Tokenizer, template and ends of a text are those that the run kept beside its checkpoints. `ignored`: see
    `read_huggingface_config`. Raises a `CheckpointError`, and nothing of the attempt stays, where the checkpoint holds
    no LoRA, or that of another network.
    """
    check_absent(target)
    config, found = read_checkpoint_config(source), read_huggingface_config(base, ignored)
    _refuse(source, config)
    if network_settings(config.model) != network_settings(found.model):
        raise CheckpointError(f"{source.path} holds an adapter of another network than that of {base}")
    changes, rounding = _Changes(source, config), Rounding()
    if f"model.{HEAD}" in changes.index.tensors:
        raise CheckpointError(f"{source.path} is of a classifier, whose head can't be merged from a checkpoint")
    added = lru_cache(maxsize=2)(changes.added)  # the matrices of an expert are two weights
    with TensorFiles(base) as files, new_model_folder(target) as temporary:
        changed = _places(changes, found.architecture, files.stored, base)

        def value(name: str) -> Tensor:
            tensor = files.read(name, tuple(slice(0, size) for size in files.stored[name].shape))
            if name not in changed:
                return tensor
            weight, part = changed[name]
            return rounded_sum(tensor, part.extract(added(weight)).contiguous(), rounding)

        by_file: dict[str, list[Entry]] = {}
        for name, file in files.file_of.items():
            shape, dtype = files.stored[name].shape, files.stored[name].dtype
            if dtype is None:
                raise CheckpointError(f"{base}: the number format of {name} is not supported")
            by_file.setdefault(file, []).append(Entry(name, shape, dtype, partial(value, name)))
        write_weights(temporary, by_file)
        kept = read_small_files(source.path.parent / FOLDER)
        write_small_files(temporary, laid_over(read_small_files(base), kept))
    return [str(rounding), *found.notes]


def model_of(source: CheckpointDirectory) -> str:
    """The Hugging Face folder beside which a checkpoint's adapter was trained. A `CheckpointError` where it had
    none."""
    folder = read_checkpoint_config(source).finetune.load_hf
    if folder is None:
        raise CheckpointError(
            f"{source.path} doesn't say which folder its model is: give it with --load-hf (tools/convert_checkpoint.py "
            "megalite-to-hf makes one of a checkpoint)"
        )
    return folder


def _refuse(source: CheckpointDirectory, config: RunConfig) -> None:
    kind, folder = config.peft.peft, config.peft.load_adapter
    if kind != "lora":
        holds = "a model" if kind == "none" else f"what --peft {kind} trained"
        raise CheckpointError(f"{source.path} holds {holds}, and only LoRA can be merged into weights")
    if folder is not None:  # whose layers may have ranks and scales of their own
        raise CheckpointError(
            f"{source.path} goes on with the adapter of --load-adapter {folder}: merge what --save-adapter wrote, with "
            "--adapter"
        )


def _places(
    changes: _Changes, architecture: Architecture, stored: Mapping[str, Stored], base: Path
) -> dict[str, tuple[str, Part]]:
    """By the name of each stored tensor that changes: the logical weight, and which part of it the tensor is."""
    result = {}
    for weight in changes.linears:
        shape = changes.shape(weight)
        parts = architecture.parts(weight, shape)
        if not any(_stored_name(part, architecture, stored) for part in parts):
            parts = architecture.other_parts(weight, shape) or parts
        for part in parts:
            name = _stored_name(part, architecture, stored)
            if name is None or stored[name].shape != part.shape or stored[name].dtype not in FLOATING:
                raise CheckpointError(f"{base} has no floating-point weight {part.name} of shape {list(part.shape)}")
            result[name] = weight, part
    return result


def _stored_name(part: Part, architecture: Architecture, stored: Mapping[str, Stored]) -> str | None:
    """With or without the prefix of a model with an output."""
    names = part.name, part.name.removeprefix(architecture.prefix)
    return next((name for name in names if name in stored), None)
