"""What a training step reads back from the device: each such read waits for it on a GPU.

On a CPU the same code reads the same numbers, so they are counted here, once by torch's profiler, as its operator, and
once by whose code asks for them; `docs/performance.md` says why each remains.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from benchmarks.workloads import OurSteps, Workload, llama
from megalite.config.schema import PrecisionConfig

WORKLOAD = Workload(llama(2, 32, 4, 2, 64), 256, 32, 2)
READS = {
    *("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"),
    *("nonzero", "is_nonzero", "equal", "allclose", "unique", "masked_select", "_local_scalar_dense"),
}
FROM_THE_DEVICE = {
    ("gradient_norm.py", "squares"): 1,  # whether to take the step, and how much to clip
    ("trainer.py", "step"): 1,  # loss and tokens, for the log and for the same decision
}
ON_THE_HOST = {
    ("objective.py", "token_indices"): 1,  # of each microbatch, before it is uploaded
    ("optimizer.py", "measure"): 1,  # rounds a Python number
}
OF_LEAN_STATES = {("lean.py", "_fit"): 1}  # the scales of the optimizer's states
ON_A_CPU_ALONE = {("cross_entropy.py", "backward"): 1}  # an assertion, of each microbatch


def steps(precision: PrecisionConfig) -> OurSteps:
    made = OurSteps(WORKLOAD, precision, torch.device("cpu"))
    made.take(WORKLOAD.batches(0, 3))
    made.step()
    made.step()  # scales of FP8 have a history from now on
    return made


class Reads(TorchFunctionMode):
    """Counts by the file and function of ours that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[tuple[str, str]] = collections.Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and "megalite" not in Path(frame.f_code.co_filename).parts:
                frame = frame.f_back
            if frame is not None:
                self.found[Path(frame.f_code.co_filename).name, frame.f_code.co_name] += 1
        return func(*args, **(kwargs or {}))


PRECISIONS = {
    "fp32": PrecisionConfig(),
    "bf16": PrecisionConfig(bf16=True),
    "fp16": PrecisionConfig(fp16=True, loss_scale=1024.0),
    "fp8 delayed": PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_backend="emulated"),
    "lean states": PrecisionConfig(
        bf16=True,
        use_precision_aware_optimizer=True,
        main_grads_dtype="bf16",
        main_params_dtype="fp16",
        exp_avg_dtype="fp8",
        exp_avg_sq_dtype="fp8",
    ),
    "fp8 blockwise": PrecisionConfig(bf16=True, fp8_format="e4m3", fp8_recipe="blockwise", fp8_backend="emulated"),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_reads_from_the_device_only_what_is_documented(precision: str) -> None:
    made = steps(PRECISIONS[precision])
    with Reads() as reads:
        made.step()
    lean = OF_LEAN_STATES if PRECISIONS[precision].use_precision_aware_optimizer else {}
    assert dict(reads.found) == FROM_THE_DEVICE | ON_THE_HOST | ON_A_CPU_ALONE | lean


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8 delayed"])
def test_the_profile_of_a_step_shows_no_other_reads(precision: str) -> None:
    """`tolist` of a tensor on a CPU is no operator. The fused kernel of a CPU reads the count of updates of each
    segment; a GPU's has it on the device."""
    made = steps(PRECISIONS[precision])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        made.step()
    counts = collections.Counter(event.name for event in profiled.events())
    updates = len(made.model.optimizer.segments)
    known = sum(ON_THE_HOST.values()) + sum(ON_A_CPU_ALONE.values()) + updates
    assert counts["aten::_local_scalar_dense"] <= known and counts["aten::item"] <= known
    assert counts["aten::nonzero"] == counts["aten::equal"] == 0
