"""Evaluation: when it runs, over which samples, and that it doesn't depend on the number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.token_files import EOD, random_documents, write_tokens
from tests.e2e.runs import MICRO, MOCK, checkpoint, evaluations, run, training_state, written

SEQ = 32


def data(folder: Path, **samples: int) -> str:
    """`--train-data-path` and so on, each of so many samples of one epoch."""
    flags = []
    for seed, (split, count) in enumerate(samples.items()):
        stream = np.concatenate(random_documents(count * SEQ, low=1, high=30, seed=seed))[: count * SEQ + 1 + SEQ // 2]
        documents = np.split(stream, np.flatnonzero(stream == EOD) + 1)
        prefix = write_tokens(folder / split, [document for document in documents if len(document)])
        flags.append(f"--{split}-data-path {prefix}")
    return " ".join(flags) + " "


NETWORK = MICRO.replace(MOCK, "").replace("--vocab-size 46", "--vocab-size 130") + "--global-batch-size 8 "


def found(path: Path) -> list[tuple[int, str]]:
    return [(record["iteration"], record["split"]) for record in evaluations(path)]


def test_evaluations_of_a_tiny_set_go_on_after_a_resume(tmp_path: Path) -> None:
    """4 samples, a global batch of 8: every evaluation goes through the set twice."""
    flags = (
        f"{NETWORK} {data(tmp_path, train=100, valid=4, test=3)} --train-iters 6 --eval-interval 2 --eval-iters 1 "
        "--hidden-dropout 0.1 "
    )
    run(f"{flags} --save-interval 100 --save {tmp_path}/a --metrics-file {tmp_path}/a.jsonl")
    assert found(tmp_path / "a.jsonl") == [(k, "valid") for k in (2, 4, 6)] + [(6, "test")]
    resumed = f"{flags} --load {tmp_path}/b --metrics-file {tmp_path}/b.jsonl "
    for end in (3, 6):
        run(f"{resumed} --save-interval 100 --save {tmp_path}/b --exit-interval {end}")
    run(resumed)  # the one before stopped at the last step, before the test
    assert evaluations(tmp_path / "b.jsonl", exact=True) == evaluations(tmp_path / "a.jsonl", exact=True)
    assert written(tmp_path / "b.jsonl") == written(tmp_path / "a.jsonl")
    assert training_state(checkpoint(tmp_path / "a", 6))["training"]["consumed_valid_samples"] == 3 * 8


def test_a_finished_run_that_is_started_again_evaluates_nothing_twice(tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    flags = f"{MICRO} --train-iters 3 --eval-iters 1 --eval-interval 100 --save {tmp_path} --metrics-file {metrics}"
    run(f"{flags} --load {tmp_path}")
    before = metrics.read_text()
    assert found(metrics) == [(3, "valid"), (3, "test")]
    outcome = run(f"{flags} --load {tmp_path}", 2)
    assert metrics.read_text() == before
    assert "nothing left to train" in outcome.out and "valid isn't evaluated again" in outcome.out
    assert "loss at iteration" not in outcome.out


def test_data_without_a_counted_token_are_refused(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "d", [np.array([EOD], dtype=np.int64)] * 600)
    outcome = run(f"{NETWORK} --data-path {prefix} --split 100,0,0 --eod-mask-loss --train-iters 2", check=False)
    assert outcome.code == 1
    assert outcome.err.startswith("error: train: no token of its") and "Traceback" not in outcome.err


def test_an_evaluation_follows_every_interval_and_one_the_end(tmp_path: Path) -> None:
    for interval, valid in ((2, [2, 4, 5]), (5, [5])):
        metrics = tmp_path / f"{interval}.jsonl"
        outcome = run(f"{MICRO} --train-iters 5 --eval-iters 1 --eval-interval {interval} --metrics-file {metrics}")
        assert found(metrics) == [(k, "valid") for k in valid] + [(5, "test")]
        assert outcome.out.count("validation loss at iteration") == len(valid)
        assert outcome.out.count("test loss at iteration 5") == 1


def test_without_evaluation_data_training_goes_through(tmp_path: Path) -> None:
    flags = f"--data-path {write_tokens(tmp_path / 'd', random_documents(60))} --split 100,0,0"
    run(f"{NETWORK} {flags} --eval-iters 2 --eval-interval 1 --train-iters 2 --metrics-file {tmp_path}/m.jsonl")
    assert found(tmp_path / "m.jsonl") == []
    assert len(written(tmp_path / "m.jsonl")) == 2


@pytest.mark.slow
def test_full_validation_counts_every_sample_once(tmp_path: Path) -> None:
    """7 and 5 samples in microbatches of 2 on 3 ranks, and on two pipelines, where shares are uneven and the last
    microbatch is small; the truth: one evaluation of exactly 7, one by one."""
    flags = (
        f"{NETWORK} {data(tmp_path, train=50, valid=7, test=5)} --fp64 --eod-mask-loss --train-iters 1 --num-layers 4 "
    )
    pipeline = "--pipeline-model-parallel-size 2"
    layouts = (("", 3), (f"{pipeline} --num-virtual-stages-per-pipeline-rank 2", 4))
    for number, (layout, processes) in enumerate(layouts):
        size = f"--global-batch-size {processes * 4} {layout} --metrics-file {tmp_path}/{number}.jsonl"
        run(f"{flags} --full-validation --eval-iters 1 --lr 0 {size}", processes)
    truth: dict[str, float] = {}
    for split, count in (("valid", 7), ("test", 5)):
        metrics = tmp_path / f"{split}.jsonl"
        sizes = f"--micro-batch-size 1 --global-batch-size {count}"
        run(f"{flags} --skip-train --eval-iters 1 {sizes} --metrics-file {metrics}")
        truth |= {record["split"]: record["lm_loss"] for record in evaluations(metrics) if record["split"] == split}
    for number in range(len(layouts)):
        losses = {record["split"]: record["lm_loss"] for record in evaluations(tmp_path / f"{number}.jsonl")}
        assert losses == pytest.approx(truth, rel=1e-10)


def test_dropout_is_off_in_an_evaluation(tmp_path: Path) -> None:
    for rate in (0, 0.5):
        dropout = f"--hidden-dropout {rate} --attention-dropout {rate} --attention-backend unfused"
        run(f"{MICRO} {dropout} --eval-iters 2 --skip-train --metrics-file {tmp_path}/{rate}.jsonl")
    assert evaluations(tmp_path / "0.jsonl") == evaluations(tmp_path / "0.5.jsonl")
