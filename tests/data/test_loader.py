"""Microbatches from worker processes: the same as without, no random state touched, failures reported as they were."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.errors import UserError
from megalite.data.document_mask import Item, SampleFormat, SampleSource
from megalite.data.loader import MicrobatchIterator, telling_killed_workers
from megalite.data.mock import MockDataset
from megalite.data.packing import RowDataset, Rows, SequenceBuilder


def mock(num_samples: int = 1000, **flags: bool) -> MockDataset:
    return MockDataset(
        seed=1,
        split=0,
        vocab_size=131,
        seq_length=16,
        num_samples=num_samples,
        sample_format=SampleFormat(130, **flags),
    )


def loader(dataset: SampleSource, **changes: Any) -> MicrobatchIterator:
    settings: dict[str, Any] = {
        "start_sample": 0,
        "micro_batch_size": 2,
        "dp_rank": 0,
        "dp_size": 1,
        "num_workers": 0,
        "seed": 5,
        **changes,
    }
    return MicrobatchIterator(dataset, **settings)


def test_a_microbatch_holds_the_samples_and_their_numbers() -> None:
    dataset = mock(10, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
    with loader(dataset, start_sample=8, dp_rank=1, dp_size=2, ahead=3) as batches:
        batch = next(batches)
    assert batch.sample_ids.tolist() == [10, 11]
    assert batch.document_ids is not None
    for row, place in enumerate((0, 1)):  # past the end the dataset begins again
        for name, array in dataset[place].items():
            np.testing.assert_array_equal(getattr(batch, name)[row].numpy(), array)
    assert {name: value.dtype for name, value in vars(batch).items() if value is not None} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.bool,
        "position_ids": torch.int64,
        "sample_ids": torch.int64,
        "document_ids": torch.int32,
        "ahead_tokens": torch.int64,
        "ahead_labels": torch.int64,
        "ahead_mask": torch.bool,
    }
    assert batch.ahead_mask is not None and batch.ahead_mask.shape == (2, 3, 16)
    assert torch.equal(batch.map(torch.logical_not).tokens, batch.tokens == 0)


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic", None])
def test_workers_change_nothing(dataloader_type: str | None) -> None:
    runs = []
    for num_workers in (0, 2):
        with loader(mock(11), num_workers=num_workers, dataloader_type=dataloader_type) as batches:
            runs.append([(batch.sample_ids.tolist(), batch.tokens.tolist()) for batch in islice(batches, 20)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_random_state_is_touched(num_workers: int) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index, union-attr]
    with loader(mock(), num_workers=num_workers, dataloader_type="cyclic") as batches:
        list(islice(batches, 5))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # type: ignore[index]
    assert before[2] == random.getstate()


@pytest.mark.parametrize("multiple", [1, 4])
def test_batches_are_cut_after_the_last_place_that_counts(multiple: int) -> None:
    sequences = SequenceBuilder()
    for length in (3, 7, 12, 4, 2, 5):
        sequences.add(range(length), [False, *[True] * (length - 1)])
    rows = RowDataset(sequences.build(), Rows.one_each(np.arange(6)), seq_length=16, pad=0, packed=False)
    with loader(rows, micro_batch_size=2, total=5, trim_multiple=multiple) as cut:
        short = list(cut)
    with loader(rows, micro_batch_size=2, total=5) as whole:
        long = list(whole)
    assert [batch.tokens.shape[1] for batch in short] == {1: [6, 11, 1], 4: [8, 12, 4]}[multiple]
    for a, b in zip(short, long, strict=True):
        kept = a.tokens.shape[1]
        assert torch.equal(a.tokens, b.tokens[:, :kept])
        assert torch.equal(a.loss_mask, b.loss_mask[:, :kept])
        assert not b.loss_mask[:, kept:].any()


class Failing:
    """Fails at sample 5 with the given exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Item:
        if index == 5:
            raise self.error
        return mock()[index]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("error", [UserError("a.bin holds token id 7"), FileNotFoundError("a.bin is gone")])
def test_a_mistake_in_the_data_keeps_its_message(num_workers: int, error: Exception) -> None:
    with loader(Failing(error), num_workers=num_workers) as batches:
        next(batches), next(batches)
        with pytest.raises(UserError) as caught:
            next(batches)
        assert str(caught.value) == str(error)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_any_other_failure_brings_the_workers_traceback(num_workers: int) -> None:
    with loader(Failing(KeyError("oops")), num_workers=num_workers) as batches:
        next(batches), next(batches)
        with pytest.raises(RuntimeError, match=r"oops(.|\n)*in __getitem__"):
            next(batches)


def test_workers_start_with_the_first_microbatch_outlive_stop_signals_and_end_with_close() -> None:
    before = set(multiprocessing.active_children())
    loader(mock(), num_workers=2).close()
    batches = loader(mock(), num_workers=2)
    assert set(multiprocessing.active_children()) == before
    assert [next(batches).sample_ids[0].item() for _ in range(2)] == [0, 2]  # one from each worker: both have started
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, number)
        assert os.getpgid(worker.pid) != os.getpgid(0)
    assert [batch.sample_ids[0].item() for batch in islice(batches, 10)] == list(range(4, 24, 2))
    batches.close()
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(ValueError, match="closed"):
        next(batches)


@pytest.mark.parametrize("reading", [True, False])
def test_a_killed_worker_is_reported_whatever_the_process_is_at(reading: bool) -> None:
    before = set(multiprocessing.active_children())
    with loader(mock(), num_workers=1) as batches:
        next(batches)
        (worker,) = set(multiprocessing.active_children()) - before

        @telling_killed_workers()
        def go_on() -> None:
            worker.kill()
            if reading:
                list(islice(batches, 100))
            for _ in range(1000):
                time.sleep(0.01)  # torch's handler of SIGCHLD raises here

        with pytest.raises(UserError, match="num-workers"):
            go_on()


@pytest.mark.parametrize(("length", "micro", "size"), [(11, 3, 2), (10, 2, 2), (1, 4, 3), (12, 2, 2), (7, 1, 4)])
def test_full_validation_counts_each_sample_once_on_ranks_in_step(length: int, micro: int, size: int) -> None:
    dataset = mock(length)
    ranks = [
        list(loader(dataset, dp_rank=rank, dp_size=size, micro_batch_size=micro, total=length)) for rank in range(size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    counted = torch.cat([batch.loss_mask for batches in ranks for batch in batches])
    assert torch.equal(counted.any(1), counted.all(1))
    numbers = torch.cat([batch.sample_ids for batches in ranks for batch in batches])[counted.all(1)]
    assert sorted(numbers.tolist()) == list(range(length))


def test_a_dataset_without_samples_is_refused() -> None:
    with pytest.raises(UserError, match="no samples"):
        loader(mock(0))
