"""Data-parallel runs as whole programs compute what one process computes, to 1e-10 in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.config.entry import read_config
from megalite.data.gpt_dataset import build_datasets
from tests.data.token_files import EOD, VOCABULARY, random_documents, write_tokens
from tests.e2e.runs import (
    DOCUMENTS,
    MOCK,
    T0,
    assert_equal,
    gradient_difference,
    gradients,
    largest_difference,
    outputs,
    program,
    run,
)

STEPS = 4
FLAGS = f"{T0} --train-iters {STEPS} --num-layers 2 --num-workers 0 "


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process in float64."""
    folder = tmp_path_factory.mktemp("reference")
    run(f"{FLAGS} --fp64 {outputs(folder)}")
    return folder


@pytest.mark.slow
def test_torchrun_computes_what_one_process_computes(reference: Path, tmp_path: Path) -> None:
    program(f"{FLAGS} --fp64 {outputs(tmp_path)}", 2)
    assert_equal(tmp_path, reference)


def test_the_micro_batch_size_does_not_matter(reference: Path, tmp_path: Path) -> None:
    for size in (1, 8):
        folder = tmp_path / str(size)
        run(f"{FLAGS} --fp64 {outputs(folder)} --micro-batch-size {size}")
        assert_equal(folder, reference)


def test_a_wrong_batch_size_or_seed_would_be_noticed(reference: Path, tmp_path: Path) -> None:
    """The comparison is not blind: the loss of the steps depends on every sample."""
    run(f"{FLAGS} --fp64 {outputs(tmp_path)} --seed 1235")
    assert largest_difference(tmp_path / "metrics.jsonl", reference / "metrics.jsonl") > 1e-3
    assert gradient_difference(gradients(tmp_path), gradients(reference)) > 1e-3


def test_ranks_with_unequal_token_counts_compute_what_one_process_computes(tmp_path: Path) -> None:
    """The loss is the mean over the tokens of the global batch, not the mean of the ranks' means."""
    prefix = write_tokens(tmp_path / "short", random_documents(300, low=0, high=40))
    flags = FLAGS.replace(MOCK, f"--data-path {prefix} --split 100,0,0 ") + DOCUMENTS
    for size in (1, 2):
        run(f"{flags} --fp64 {outputs(tmp_path / str(size))}", size)
    assert _most_steps_have_unequal_token_counts(flags, 2)
    assert_equal(tmp_path / "2", tmp_path / "1")


def _most_steps_have_unequal_token_counts(flags: str, ranks: int) -> bool:
    config, _ = read_config(flags.split(), "test", "test", ranks)
    train = build_datasets(config, EOD, VOCABULARY, (8 * STEPS, 0, 0)).train
    assert train is not None
    counts = np.array([train[index]["loss_mask"].sum() for index in range(8 * STEPS)])
    shares = counts.reshape(STEPS, -1, ranks, 2).sum(axis=(1, 3))  # step, microbatch, rank, sample
    return bool((shares.max(axis=1) > shares.min(axis=1)).mean() > 0.5)


def test_float32_agrees_to_its_own_precision(tmp_path: Path) -> None:
    for size in (1, 2):
        run(f"{FLAGS} {outputs(tmp_path / str(size))}", size)
    assert_equal(tmp_path / "2", tmp_path / "1", 2e-5)
