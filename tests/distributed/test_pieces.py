"""Ranges of a parameter as rectangles and runs."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch

from megalite.distributed.layout import Layout
from megalite.distributed.param_spec import Box, ParamSpec, Place, cut, grouped_qkv, replicated, vocabulary_rows
from megalite.distributed.pieces import Piece, rectangles

SHAPES = [(7,), (3, 5), (2, 3, 4), (2, 1, 3, 2), (1, 4, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangles_are_contiguous_in_order_and_cover_the_range_once(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(prod(shape)).view(shape)
    for start, stop in itertools.combinations(range(prod(shape) + 1), 2):
        parts = list(rectangles(shape, start, stop))
        slices = [tuple(slice(a, a + n) for a, n in zip(at, size, strict=True)) for at, size in parts]
        assert torch.equal(torch.cat([numbers[s].reshape(-1) for s in slices]), torch.arange(start, stop))
        assert len(parts) <= 2 * len(shape) - 1


PLACE = Place(Layout(tp=4), 2)
SPECS = {
    "whole": ParamSpec((3, 5), (3, 5), replicated((3, 5), PLACE)),
    "rows": ParamSpec((8, 3), (2, 3), cut((8, 3), 0, PLACE)),
    "columns": ParamSpec((3, 8), (3, 2), cut((3, 8), 1, PLACE)),
    "vocabulary": ParamSpec((10, 3), (4, 3), vocabulary_rows((10, 3), 16, PLACE)),
    "key/value heads on two ranks each": ParamSpec((2, 4, 2, 3), (1, 3, 2, 3), grouped_qkv(2, 2, (2, 3), PLACE)),
    "a box inside": ParamSpec((9, 9), (4, 5), (Box((3, 2), (1, 1), (2, 3), (2,), 2),)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pieces_hold_each_element_of_a_box_once_at_its_global_place(spec: ParamSpec) -> None:
    numbers = torch.arange(1, prod(spec.local_shape) + 1)
    whole = torch.zeros(spec.shape, dtype=torch.int64)
    for box in spec.boxes:
        whole[box.global_slices] = numbers.view(spec.local_shape)[box.local_slices]
    for cuts in ([], [1], [4, 5], list(range(1, prod(spec.local_shape)))):
        borders = [0, *(c for c in cuts if c < len(numbers)), len(numbers)]
        pieces = [Piece("p", numbers[a:b], a, spec) for a, b in itertools.pairwise(borders)]
        found = torch.zeros(spec.shape, dtype=torch.int64)
        for piece in pieces:
            for _, start, view in piece.held():
                found[tuple(slice(a, a + n) for a, n in zip(start, view.shape, strict=True))] += view
        assert torch.equal(found, whole)
        runs = [run for piece in pieces for _, run, _ in piece.runs()]
        assert sorted(torch.cat(runs).tolist()) == sorted(whole[whole > 0].tolist())
        for piece in pieces:
            for _, run, place in piece.runs():
                assert run[0] == place + 1
