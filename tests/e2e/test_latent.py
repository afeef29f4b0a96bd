"""A run with multi-latent attention and multi-token prediction as a whole program."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.inference.load import load_for_generation
from megalite.inference.options import GenerationOptions
from tests.e2e.runs import MICRO, TOLERANCE, run, steps
from tests.inference.checkpoints import generate

NETWORK = (
    "--num-layers 4 --multi-latent-attention --position-embedding-type rope --q-lora-rank 20 --kv-lora-rank 12 "
    "--qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5 --qk-layernorm --mtp-num-layers 2 --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --eval-interval 2 --eval-iters 1 "
)
FLAGS = f"{MICRO} {NETWORK} --fp64 --attention-backend unfused --global-batch-size 4 --train-iters 4 "
FOUR_RANKS = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 "
)


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_any_layout_and_reports_each_depth(tmp_path: Path) -> None:
    def go(name: str, flags: str, processes: int = 1) -> str:
        folder = tmp_path / name
        saving = f"--save {folder} --load {folder} --metrics-file {folder}.jsonl "
        return run(FLAGS + saving + flags, processes).out

    out = go("straight", "")
    go("moved", f"--exit-interval 2 {FOUR_RANKS}", 4)
    go("moved", "--use-distributed-optimizer", 2)
    straight, moved = (steps(tmp_path / f"{name}.jsonl") for name in ("straight", "moved"))
    assert len(straight) == 4
    for one, other in zip(straight, moved, strict=True):
        assert len(one["mtp_losses"]) == 2
        pairs = zip([one["lm_loss"], *one["mtp_losses"]], [other["lm_loss"], *other["mtp_losses"]], strict=True)
        assert all(abs(a - b) <= TOLERANCE * a for a, b in pairs)
    line = next(line for line in out.splitlines() if "iteration        4/" in line)
    for depth, loss in enumerate(straight[-1]["mtp_losses"], start=1):
        assert f"| mtp_{depth} loss: {loss:.6E} |" in line
    loaded = load_for_generation(str(tmp_path / "moved"))
    assert len(generate(loaded.model, [[3, 1, 4]], GenerationOptions(max_new_tokens=5))[0]) == 5
