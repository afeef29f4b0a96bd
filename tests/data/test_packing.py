"""Rows of several sequences: the loss of a pack is the sum of its parts, and padding never counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megalite.data.document_mask import Item
from megalite.data.microbatch import Microbatch, stack_items
from megalite.data.packing import RowDataset, Rows, SequenceBuilder, TokenSequences, trim
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage, plain_tokens
from megalite.nn.tokens import Tokens
from tests.helpers import FP64, LLAMA, VOCABULARY, tiny_model

EOD = 7


def sequences(count: int = 40, longest: int = 30, seed: int = 0) -> TokenSequences:
    """Random sequences of 2 to `longest` tokens whose last tokens count and end with EOD."""
    random = np.random.default_rng(seed)
    builder = SequenceBuilder()
    for length in random.integers(2, longest + 1, count):
        answer = random.integers(1, length)
        tokens = [*random.integers(0, VOCABULARY, length - 1).tolist(), EOD]
        builder.add(tokens, [bool(n >= length - answer) for n in range(length)])
    return builder.build()


def dataset(data: TokenSequences, packed: bool, seq_length: int = 32, pad: int = EOD) -> RowDataset:
    everything = np.arange(len(data))
    rows = Rows.best_fit(everything, data.lengths - 1, seq_length) if packed else Rows.one_each(everything)
    return RowDataset(data, rows, seq_length=seq_length, pad=pad, packed=packed)


def loss_sum(model: GPTStage, arrays: Item) -> tuple[float, int]:
    """Summed loss of the counted labels of a microbatch, and their number."""
    batch = Microbatch.from_arrays(arrays)
    info = Tokens.whole(batch.position_ids, batch.document_ids)
    with torch.no_grad():
        losses = model.loss(model(batch.tokens, info), batch.labels).tokens
    return losses.where(batch.loss_mask.t(), 0.0).sum().item(), int(batch.loss_mask.sum())


def alone(model: GPTStage, data: TokenSequences, number: int) -> tuple[float, int]:
    """The loss of one sequence in a row of its own length, by the definition."""
    begin, end = data.begins[number : number + 2]
    tokens = torch.from_numpy(data.tokens[begin:end].astype(np.int64))[None]
    with torch.no_grad():
        logits = model.logits(model(tokens[:, :-1], plain_tokens(tokens[:, :-1])))[:, 0]
    losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
    counted = torch.from_numpy(data.counted[begin + 1 : end].copy())
    return losses[counted].sum().item(), int(counted.sum())


@pytest.mark.parametrize(
    "network", [{"init_method_std": 0.2}, {**LLAMA, "init_method_std": 0.2}], ids=["gpt2", "llama"]
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_the_loss_of_a_row_is_the_sum_of_its_parts_alone(network: dict[str, Any], packed: bool, backend: str) -> None:
    model = tiny_model(single_process_mesh(), FP64, attention_backend=backend, **network)
    data = sequences()
    rows = dataset(data, packed)
    assert (len(rows) < 30) == packed
    for number in range(len(rows)):
        members = rows.rows.order[rows.rows.begins[number] : rows.rows.begins[number + 1]]
        parts = [alone(model, data, int(member)) for member in members]
        loss, counted = loss_sum(model, stack_items([rows[number]], np.arange(1)))
        assert loss == pytest.approx(sum(part[0] for part in parts), rel=1e-12)
        assert counted == sum(part[1] for part in parts)


def test_the_worked_example() -> None:
    builder = SequenceBuilder()
    builder.add([1, 2, EOD], [False, True, True])
    builder.add([4, 5, 6, EOD], [False, False, True, True])
    item = dataset(builder.build(), packed=True, seq_length=8, pad=9)[0]
    expected = {
        "tokens": ("int64", [1, 2, 4, 5, 6, 9, 9, 9]),
        "labels": ("int64", [2, EOD, 5, 6, EOD, 9, 9, 9]),
        "loss_mask": ("bool", [True, True, False, True, True, False, False, False]),
        "position_ids": ("int64", [0, 1, 0, 1, 2, 0, 1, 2]),
        "document_ids": ("int32", [0, 0, 1, 1, 1, 2, 2, 2]),
        "lengths": ("int64", 5),
    }
    assert {name: (array.dtype.name, array.tolist()) for name, array in item.items()} == expected


@pytest.mark.parametrize("capacity", [1, 7, 100, 1000])
def test_best_fit_places_each_once_within_capacity_and_leaves_no_two_rows_that_could_be_one(capacity: int) -> None:
    random = np.random.default_rng(capacity)
    chosen = random.permutation(5000)[:3000]
    places = random.integers(1, capacity + 1, 3000)
    rows = Rows.best_fit(chosen, places, capacity)
    assert sorted(rows.order.tolist()) == sorted(chosen.tolist())
    need = dict(zip(chosen.tolist(), places.tolist(), strict=True))
    filled = np.array([sum(need[n] for n in row) for row in np.split(rows.order, rows.begins[1:-1])])
    assert filled.min() >= 1
    assert filled.max() <= capacity
    assert np.sort(filled)[:2].sum() > capacity  # best fit never opens a row while another has room
    places_of_rows = [chosen.tolist().index(rows.order[begin]) for begin in rows.begins[:-1]]
    assert places_of_rows == sorted(places_of_rows)


def test_trimming_changes_no_loss_and_keeps_to_the_multiple() -> None:
    model = tiny_model(single_process_mesh(), FP64, init_method_std=0.2)
    rows = dataset(sequences(longest=20), packed=False)
    for multiple in (1, 4, 32):
        for first in range(0, 40, 4):
            arrays = stack_items([rows[n] for n in range(first, first + 4)], np.arange(4))
            short = trim(arrays, multiple)
            longest = max(rows.sequences.lengths[first : first + 4]) - 1
            assert short["tokens"].shape == (4, -(-longest // multiple) * multiple)
            assert loss_sum(model, short)[0] == pytest.approx(loss_sum(model, arrays)[0], rel=1e-12)
            assert loss_sum(model, short)[1] == loss_sum(model, arrays)[1]
            assert short["sample_ids"].tolist() == [0, 1, 2, 3]
