"""Logical parameters as the tensors of a Hugging Face model hold them.

Key idea: the source side is one function, `read(global name, box)`, which knows nothing of layouts or of how a rank
keeps its tensors; and everything that can be wrong with names, shapes and formats is found before the first is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.architecture import Architecture
from megalite.checkpoint.huggingface.files import Tensors
from megalite.checkpoint.huggingface.parts import Part
from megalite.config.errors import listed
from megalite.distributed.param_spec import Shape

_BLOCK = 4096  # rows compared at once
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
MULTI_TOKEN = "mtp."  # how the names of the layers of multi-token prediction begin


class LogicalWeights:
    """The parameters of `shapes` (global name to logical shape) in `tensors`. `where`: the folder, for messages.

    Raises a `CheckpointError` that lists tensors that are missing, have another shape or an unknown number format.
    """

    def __init__(self, architecture: Architecture, tensors: Tensors, shapes: Mapping[str, Shape], where: str):
        self.architecture, self.tensors, self.where = architecture, tensors, where
        prefix = architecture.prefix
        self._bare = not any(name.startswith(prefix) for name in tensors.stored)
        self.parts = {name: self._stored_parts(name, shape) for name, shape in shapes.items()}
        self.shapes = dict(shapes)
        self._check()

    def _stored_parts(self, name: str, shape: Shape) -> list[Part]:
        """A file that holds the model without its head has names without its prefix."""
        prefix = self.architecture.prefix if self._bare else ""
        ways = self.architecture.other_parts(name, shape), self.architecture.parts(name, shape)
        for parts in filter(None, ways):
            renamed = [replace(part, name=part.name.removeprefix(prefix)) for part in parts]
            if all(part.name in self.tensors.stored for part in renamed):
                break
        return renamed

    def stored_name(self, name: str) -> str:
        """The tensor that a parameter with one tensor has, or would have if the model had it."""
        (part,) = self._stored_parts(name, ())
        return part.name

    def _check(self) -> None:
        stored = self.tensors.stored
        wanted = [one for parts in self.parts.values() for one in parts]
        missing = [one.name for one in wanted if one.name not in stored]
        if missing:
            raise CheckpointError(f"{self.where} lacks{listed(missing)}")
        other = [
            f"{one.name}: {stored[one.name].shape}, but {one.shape} by config.json"
            for one in wanted
            if stored[one.name].shape != one.shape
        ]
        if other:
            raise CheckpointError(f"{self.where} holds tensors of another shape:{listed(other)}")
        formats = [one.name for one in wanted if stored[one.name].dtype not in FLOATING]
        if formats:
            raise CheckpointError(
                f"{self.where} holds tensors that are neither fp64, fp32, bf16 nor fp16 (quantised weights are not "
                f"read):{listed(formats)}"
            )

    def dtype(self, name: str) -> torch.dtype:
        """The number format that all tensors of one parameter are stored in. A `CheckpointError` where they differ."""
        parts = self.parts[name]
        found = {self.tensors.stored[one.name].dtype for one in parts}
        first = next(iter(found))
        if len(found) > 1 or first is None:
            names = ", ".join(one.name for one in parts)
            raise CheckpointError(f"{self.where}: {names} must have the same format, since they are one parameter")
        return first

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        """The `box` of the logical parameter `name`, on the CPU, in the stored number format."""
        pieces = []
        for part in self.parts[name]:
            overlap = part.overlap(box)
            if overlap is not None:
                pieces.append((overlap, part.read(overlap, partial(self.tensors.read, part.name))))
        if len(pieces) == 1:
            return pieces[0][1]
        result = torch.empty([a.stop - a.start for a in box], dtype=pieces[0][1].dtype)
        for overlap, piece in pieces:
            here = (slice(low - a.start, high - a.start) for (low, high), a in zip(overlap, box, strict=True))
            result[tuple(here)] = piece
        return result

    def read_whole(self, name: str) -> Tensor:
        """The whole logical parameter."""
        return self.read(name, [slice(0, size) for size in self.shapes[name]])

    def unused(self) -> list[str]:
        """Stored tensors that no parameter of `shapes` takes, without those that are known to hold none."""
        used = {one.name for parts in self.parts.values() for one in parts}
        return sorted(name for name in self.tensors.stored.keys() - used if not self.architecture.is_buffer(name))

    def check_tied_output(self, tied: bool) -> str | None:
        """The name of a stored output table that only repeats the embedding, where the two are tied; None where there
        is none. A `CheckpointError` where it doesn't repeat it."""
        (output,) = self.architecture.parts(OUTPUT, ())  # beside a head, which has no prefix
        if not tied or output.name not in self.tensors.stored:
            return None
        table = self.stored_name(EMBEDDING)
        if not self._equal(output.name, table):
            raise CheckpointError(
                f"{self.where}: tie_word_embeddings is true in config.json, but {output.name} and {table} differ"
            )
        return output.name

    def _equal(self, first: str, second: str) -> bool:
        stored = self.tensors.stored
        if second not in stored or stored[first] != stored[second]:
            return False
        for start in range(0, stored[first].shape[0], _BLOCK):
            rows = (slice(start, min(start + _BLOCK, stored[first].shape[0])), slice(0, stored[first].shape[1]))
            if not torch.equal(self.tensors.read(first, rows), self.tensors.read(second, rows)):
                return False
        return True


def refuse_unused(where: str, names: Sequence[str]) -> None:
    """Raise a `CheckpointError` that lists tensors which the network has no place for."""
    if names:
        raise CheckpointError(f"{where} holds tensors that config.json's network doesn't have:{listed(names)}")
