"""Logical parameters as the tensors of a Hugging Face model hold them.

Key idea: the source side is one function, `read(global name, box)`, which knows nothing of layouts or of how a rank
keeps its tensors; and everything that can be wrong with names, shapes and formats is found before the first is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.architecture import Architecture
from megalite.checkpoint.huggingface.files import Tensors
from megalite.checkpoint.huggingface.parts import Part
from megalite.distributed.param_spec import Shape

_SHOWN = 8  # names listed in a message
_BLOCK = 4096  # rows compared at once
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class LogicalWeights:
    """The parameters of `shapes` (global name to logical shape) in `tensors`. `where`: the folder, for messages.

    Raises a `CheckpointError` that lists tensors that are missing, have another shape or an unknown number format.
    """

    def __init__(self, architecture: Architecture, tensors: Tensors, shapes: Mapping[str, Shape], where: str):
        self.architecture, self.tensors, self.where = architecture, tensors, where
        prefix = architecture.prefix
        self._bare = not any(name.startswith(prefix) for name in tensors.stored)
        self.parts = {name: self._stored_parts(architecture.parts(name, shape)) for name, shape in shapes.items()}
        self.shapes = dict(shapes)
        self._check()

    def _stored_parts(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        return tuple(Part(self._stored_name(one.name), one.factors, one.order, one.start) for one in parts)

    def _stored_name(self, name: str) -> str:
        """A file that holds the model without its head has names without its prefix."""
        return name.removeprefix(self.architecture.prefix) if self._bare else name

    def stored_names(self, names: Iterable[str]) -> list[str]:
        """Tensors of parameters that may be stored though the model has them not; of parameters with one tensor."""
        return [self._stored_name(part.name) for name in names for part in self.architecture.parts(name, ())]

    def _check(self) -> None:
        stored = self.tensors.stored
        wanted = [one for parts in self.parts.values() for one in parts]
        missing = [one.name for one in wanted if one.name not in stored]
        if missing:
            raise CheckpointError(f"{self.where} lacks{_listed(missing)}")
        other = [
            f"{one.name}: {stored[one.name].shape}, but {one.shape} by config.json"
            for one in wanted
            if stored[one.name].shape != one.shape
        ]
        if other:
            raise CheckpointError(f"{self.where} holds tensors of another shape:{_listed(other)}")
        formats = [one.name for one in wanted if stored[one.name].dtype is None]
        if formats:
            raise CheckpointError(
                f"{self.where} holds tensors that are neither fp64, fp32, bf16 nor fp16 (quantised weights are not "
                f"read):{_listed(formats)}"
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
        (output,) = self.architecture.parts(OUTPUT, ())
        if not tied or output.name not in self.tensors.stored:
            return None
        (table,) = self.architecture.parts(EMBEDDING, ())
        first, second = output.name, self._stored_name(table.name)
        if not self._equal(first, second):
            raise CheckpointError(
                f"{self.where}: tie_word_embeddings is true in config.json, but {first} and {second} differ"
            )
        return first

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
        raise CheckpointError(f"{where} holds tensors that config.json's network doesn't have:{_listed(names)}")


def _listed(items: Sequence[str]) -> str:
    more = [f"and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return "".join(f"\n  {item}" for item in [*items[:_SHOWN], *more])
