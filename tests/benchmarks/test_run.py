"""`make bench` with tiny models: one table, and what can't run is a row that says why."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import layouts, run
from benchmarks.measure import Row
from benchmarks.peers import Missing, PeerSteps
from benchmarks.sides import Turns, take_turns
from benchmarks.workloads import TINY_CPU, Workload


def rows_of(file: Path, *words: str) -> dict[tuple[str, str], dict[str, Any]]:
    assert run.main(["--tiny", "--threads", "1", "--rounds", "1", "--steps", "1", "--json", str(file), *words]) == 0
    rows = json.loads(file.read_text("utf-8"))["rows"]
    return {(row["workload"], row["side"]): row for row in rows}


@pytest.mark.slow
def test_all_sides_train_the_same_and_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows_of(
        tmp_path / "bench.json",
        *["--workloads", "w1l", "w2", "optimizer", "lora", "--dtype", "bf16", "--lora-folder"],
        "no",
    )
    shown = capsys.readouterr().out
    for (workload, side), row in found.items():
        assert workload in shown and side in shown
        assert row["ratios"] or row["note"] or side.startswith("megalite")
    peers = [("w1l", "transformers"), ("w2", "PyTorch DistributedDataParallel"), ("w2", "PyTorch fully_shard")]
    for peer in peers:
        assert found[peer]["ratio_of"] == "megalite / this" and found[peer]["ratio"] > 0
        assert found[peer]["loss_apart"] < 2e-3 and found[peer]["mfu"] > 0
    assert found["w1l", "transformers"]["gradient_apart"] < 2e-2 and found["w1l", "megalite"]["memory"] > 0
    assert "examples/finetune_lora.sh" in found["lora", "megalite"]["note"]


def test_files_are_timed_beside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = rows_of(tmp_path / "bench.json", "--workloads", "text", "indices", "checkpoint")
    assert found["text", "megalite"]["note"].endswith("make quickstart")
    assert "1,003,160 tokens" in found["indices", "megalite"]["note"]
    for what in ("save", "load"):
        assert found["checkpoint", f"megalite {what}"]["ratio_of"] == f"x the time of torch's {what}"
        assert found["checkpoint", f"torch {what}"]["seconds"][0] > 0
    assert list((tmp_path / "runs").iterdir()) == []


def test_layouts_are_compared_with_dp_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(flags: str, steps: int, *_: Any) -> list[dict[str, float]]:
        rate = 80.0 if "--tensor" in flags else 100.0
        return [{"tokens_per_second": rate, "lm_loss": 2.0}] * steps

    monkeypatch.setattr(layouts, "train", train)
    found = rows_of(tmp_path / "bench.json", "--workloads", "w2-layouts")
    ratios = {side: row["ratio"] for (_, side), row in found.items() if row["ratios"]}
    assert ratios == {"megalite tp2": 0.8, "megalite pp2": 1.0}


def stopped(workload: Workload, why: str) -> PeerSteps:
    """A side that can't run, or one of another model."""
    if why == "other":
        model = torch.nn.Linear(1, 1)
        return PeerSteps(
            model, lambda tokens: model(tokens[:, :1].float()).square().mean(), "fp32", torch.device("cpu")
        )
    raise Missing(f"not installed: {why}")


def test_a_side_that_cannot_run_or_trains_something_else_has_no_rate() -> None:
    workload = TINY_CPU["w1"]
    rows = [Row("w1", side) for side in ("megalite", "missing", "other")]
    makes = [partial(run.our_steps, workload, "fp32"), partial(stopped, workload, "pip install it")]
    take_turns(rows, [*makes, partial(stopped, workload, "other")], workload, "fp32", Turns(2, 1, 1))
    assert len(rows[0].rates) == 2
    assert rows[1].note == "Missing: not installed: pip install it"
    assert rows[2].note.startswith("not measured: its loss")
    assert not rows[1].rates and not rows[2].rates and not rows[1].ratios
