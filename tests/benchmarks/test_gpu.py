"""`benchmarks/gpu.py`, end to end on a CPU with tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.workloads import OurSteps
from megalite.config.schema import PrecisionConfig


@pytest.mark.slow
def test_every_precision_is_right_and_every_side_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain PyTorch is the truth of the speed rows: the same loss and gradient norm at the first step."""
    file = tmp_path / "gpu.json"
    assert (
        gpu.main(
            [*["--tiny", "--windows", "1", "--precisions", "bf16", "fp8-tensorwise", "fp8-mxfp8", "--json"], str(file)]
        )
        == 0
    )
    rows = json.loads(file.read_text("utf-8"))["rows"]
    shown = capsys.readouterr().out
    by_side = {(row["workload"], row["side"]): row for row in rows}
    for row in rows:
        assert row["side"] in shown
        assert row["rates"] or row["note"] or row["workload"] == "correctness"
    for precision, limit in gpu.LIMITS.items():
        assert by_side["correctness", f"megalite {precision}"]["gradient_apart"] <= limit
    for shape in gpu.GPU:
        ours = by_side[shape, "megalite bf16"]
        assert ours["mfu"] > 0 and ours["ratio"] > 0 and by_side[shape, "plain PyTorch bf16"]["rates"]
        assert ours["loss_apart"] < 1e-3 and ours["gradient_apart"] < 1e-2
        assert by_side[shape, "megalite fp8-tensorwise"]["ratio_of"] == "x bf16"
        assert "emulated" in by_side[shape, "megalite fp8-mxfp8"]["note"]


@pytest.mark.slow
def test_wrong_gradients_fail_the_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = gpu.gradients_of

    def wrong(precision: str, device: torch.device) -> tuple[float, dict[str, torch.Tensor], str]:
        loss, found, note = right(precision, device)
        return loss, {name: grad * 1.1 if precision == "bf16" else grad for name, grad in found.items()}, note

    monkeypatch.setattr(gpu, "gradients_of", wrong)
    assert gpu.main(["--tiny", "--minutes", "0"]) == 1
    wrongs = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert len(wrongs) == 1 and "megalite bf16" in wrongs[0]


def test_what_a_device_cannot_do_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: OurSteps) -> tuple[float, float]:
        raise torch.OutOfMemoryError("no memory\nmore")

    monkeypatch.setattr(OurSteps, "step", full)
    work = gpu.Speed(torch.device("cpu"), tiny=True, windows=1, until=float("inf"))
    row = work.row("350m", gpu.TINY_GPU["350m"], "bf16")
    assert row.note == "OutOfMemoryError: no memory" and not row.rates
    assert gpu.precision_of("fp8-blockwise") == PrecisionConfig(bf16=True, fp8_format="e4m3", fp8_recipe="blockwise")
