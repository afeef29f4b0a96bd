"""Bytes of a run on one rank as closed formulas, and what the machine has."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import astuple, dataclass
from pathlib import Path

from megalite.config.schema import RunConfig
from megalite.estimate.activations import compute_bytes, wide_bytes

_SMALL_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""In the order of ZeRO's stages."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank. `local_parameters`: of the rank's part of the model, before sharding. `fp8_weights`: what is
    kept of them in eight bits besides, from the first forward after an update on."""

    local_parameters: int
    parameters: int
    main_gradients: int
    main_parameters: int
    moments: int
    activations: int
    fp8_weights: int = 0

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        """Of both, where a rank's parameters are shared out in different ways."""
        return MemoryEstimate(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def state(self) -> int:
        """What stays between steps."""
        return self.parameters + self.main_gradients + self.main_parameters + self.moments

    @property
    def total(self) -> int:
        return self.state + self.activations + self.fp8_weights


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_machine_memory() -> int:
    """Bytes of it that are free."""
    with contextlib.suppress(OSError):
        if found := re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text()):
            return int(found[1]) * 1024
    return machine_memory() // 2  # other systems: half of all


def estimate_memory(
    config: RunConfig,
    local_parameters: int,
    *,
    activations: int,
    ranks: int = 1,
    frozen: int = 0,
    fp8: int = 0,
) -> MemoryEstimate:
    """Prediction for a rank whose part of the model, or its part of one domain, has `local_parameters`, shared out
    among `ranks` data-parallel ranks as the resolved configuration says (Rajbhandari et al. 2020). Padding is left out.

    In half precision that is 18 bytes a parameter without sharding, 6 + 12/d, 2 + 16/d, 18/d with the three stages;
    with --main-grads-dtype bf16, --main-params-dtype bf16 and moments in fp8 it is 6, 4 + 2/d, 2 + 4/d, 6/d.
    `activations`: the rank's bytes of them at their most. `frozen`: how many of the parameters aren't trained; they
    have no state and aren't shared out. `fp8`: how many are of layers that compute in FP8.
    """
    compute, wide = compute_bytes(config), wide_bytes(config)
    formats = config.precision
    names = (formats.main_grads_dtype, formats.main_params_dtype, formats.exp_avg_dtype, formats.exp_avg_sq_dtype)
    gradient, main, first, second = (_SMALL_BYTES.get(name, wide) for name in names)
    if formats.main_params_dtype == "bf16":
        main = 0  # the parameters themselves
    has_main = compute != wide or formats.main_params_dtype != "fp32"
    moments = first + second if config.optimizer.optimizer == "adam" else wide
    stage = STRATEGIES.index(config.layout.data_parallel_sharding_strategy or "no_shard")
    trained = local_parameters - frozen
    share = -(-trained // ranks)
    state = share if stage >= 1 else trained
    stored = fp8 if config.precision.fp8_param_gather else 0
    held = frozen + (share if stage >= 3 else trained)
    kept = 0 if stage >= 3 and not frozen else 2 * fp8 - stored  # as rows and as columns
    return MemoryEstimate(
        local_parameters=local_parameters,
        parameters=compute * held - (compute - 1) * (-(-stored // ranks) if stage >= 3 else stored),
        main_gradients=gradient * (share if stage >= 2 else trained),
        main_parameters=main * (state if has_main else -(-stored // ranks)),
        moments=moments * state,
        activations=activations,
        fp8_weights=kept,
    )


def data_parallel_bytes(
    *,
    parameters: int,
    ranks: int,
    microbatches: int,
    gradient_bytes: int,
    gathered_bytes: int,
    sharded: tuple[bool, bool, bool],
) -> int:
    """Bytes that a rank sends to others of its `ranks` in one step (Rajbhandari et al. 2020, section 7).

    `sharded`: the optimizer's state, gradients, parameters. A reduce-scatter or a gather sends (d - 1)/d of the whole,
    an all-reduce twice that. `gradient_bytes`: of one gradient; `gathered_bytes`: of all parameters, in the formats in
    which they are gathered. Sharded gradients are reduced, and sharded parameters gathered twice, every microbatch; an
    upper bound there, as what is still gathered isn't gathered again.
    """
    state, gradients, gathered = sharded
    reductions = (microbatches if gradients else 1) * (1 if state else 2)
    gathers = 2 * microbatches if gathered else int(state)
    return (reductions * gradient_bytes * parameters + gathers * gathered_bytes) * (ranks - 1) // ranks
