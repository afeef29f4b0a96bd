"""Reading any box of a logical parameter equals slicing the whole, put together by plain reshapes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.huggingface import parts
from megalite.checkpoint.huggingface.architecture import Architecture
from megalite.checkpoint.huggingface.files import Stored
from megalite.checkpoint.huggingface.parts import Rule
from megalite.checkpoint.huggingface.weights import LogicalWeights

GROUPS, QUERIES, WIDTH, HIDDEN, INNER = 3, 2, 4, 5, 6
Q, K, V = (torch.randn(GROUPS * n * WIDTH, HIDDEN) for n in (QUERIES, 1, 1))
GATE, UP, OUT = torch.randn(INNER, HIDDEN), torch.randn(INNER, HIDDEN), torch.randn(HIDDEN, INNER)
C_ATTN, C_BIAS = torch.randn(HIDDEN, 3 * GROUPS * WIDTH), torch.randn(3 * GROUPS * WIDTH)


def by_group(*parts: Tensor) -> Tensor:
    return torch.stack(
        [
            torch.cat([part.chunk(GROUPS)[g].reshape(-1, WIDTH, *part.shape[1:]) for part in parts])
            for g in range(GROUPS)
        ]
    )


CASES: dict[str, tuple[Rule, dict[str, Tensor], Tensor]] = {
    "same": (parts.same("a"), {"a": OUT}, OUT),
    "transposed": (parts.transposed("a"), {"a": OUT}, OUT.t()),
    "q, k, v apart": (parts.split_qkv("{x}"), {"q": Q, "k": K, "v": V}, by_group(Q, K, V)),
    "their biases": (
        parts.split_qkv("{x}"),
        {"q": Q[:, 0], "k": K[:, 0], "v": V[:, 0]},
        by_group(Q[:, 0], K[:, 0], V[:, 0]),
    ),
    "fused and transposed": (
        parts.stacked_qkv_transposed("a"),
        {"a": C_ATTN},
        by_group(*C_ATTN.t().chunk(3)),
    ),
    "its bias": (parts.stacked_qkv_transposed("a"), {"a": C_BIAS}, by_group(*C_BIAS.chunk(3))),
    "gate and up apart": (parts.gate_and_up("g", "u"), {"g": GATE, "u": UP}, torch.stack((GATE, UP))),
    "gate and up fused": (parts.stacked("a"), {"a": torch.cat((GATE, UP))}, torch.stack((GATE, UP))),
}


class Watched:
    """Tensors in memory that count the elements that are read."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors, self.count = tensors, 0

    @property
    def stored(self) -> dict[str, Stored]:
        return {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        part = self.tensors[name][slices]
        self.count += part.numel()
        return part


def weights(case: str) -> tuple[LogicalWeights, Watched, Tensor]:
    rule, tensors, whole = CASES[case]
    watched = Watched(tensors)
    architecture = Architecture("test", "Test", "model.", {"p": rule}, lambda _: {}, lambda _: {})
    return LogicalWeights(architecture, watched, {"p": tuple(whole.shape)}, "here"), watched, whole


@pytest.mark.parametrize("case", CASES)
def test_any_box_is_read_and_no_more_than_it(case: str) -> None:
    logical, watched, whole = weights(case)
    assert torch.equal(logical.read_whole("p"), whole)
    choose = random.Random(3)
    for _ in range(60):
        edges = [sorted(choose.sample(range(size + 1), 2)) for size in whole.shape]
        box = [slice(low, high) for low, high in edges]
        watched.count = 0
        part = logical.read("p", box)
        assert torch.equal(part, whole[tuple(box)])
        assert watched.count == part.numel()


@pytest.mark.parametrize("case", CASES)
def test_the_stored_tensors_come_back_out_of_the_logical_one(case: str) -> None:
    logical, watched, whole = weights(case)
    for part in logical.parts["p"]:
        assert torch.equal(part.extract(whole), watched.tensors[part.name])
        assert part.extract(whole).is_contiguous()
