"""`--deterministic-mode`: the same numbers every time on CUDA too.

Key idea: torch has one switch for kernels that sum in a fixed order (the embedding's `index_add_`, flash attention's
backward); what reads the environment when CUDA starts must be told before, and the attention kernels that have no fixed
order are left out where they are chosen (`nn.attention_backend`). A CPU's kernels are deterministic anyhow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from megalite.config.errors import FlagError

_WORKSPACE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
_ALGORITHM = "NCCL_ALGO"


def prepare_determinism(device: torch.device) -> None:
    """Set what cuBLAS and NCCL read when they start. A value of the user's that allows other sums is a FlagError."""
    if device.type != "cuda":
        return
    if os.environ.setdefault(_WORKSPACE, _WORKSPACES[0]) not in _WORKSPACES:
        raise FlagError(
            f"--deterministic-mode: the environment has {_WORKSPACE}={os.environ[_WORKSPACE]}; unset it, or set one of "
            f"{', '.join(_WORKSPACES)}"
        )
    algorithm = os.environ.setdefault(_ALGORITHM, "Ring")
    if "NVLS" in algorithm and not algorithm.startswith("^"):
        raise FlagError(
            f"--deterministic-mode: the environment has {_ALGORITHM}={algorithm}, and NVLS sums in no fixed "
            "order; unset it, or set Ring or Tree"
        )


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Only deterministic kernels within, where that is `wanted`; afterwards as before."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
