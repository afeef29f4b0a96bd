"""What a run records of single steps when asked: times of phases (`--timing-log-level`), of operators (`--profile`), of
actions and collectives (`--timeline`), and every parameter's whole gradient (`--dump-grads`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import save_file
from torch import Tensor

from megalite.config.schema import LoggingConfig
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import gather
from megalite.optimizer.optimizer import Optimizer
from megalite.pipeline.schedules import Action


class Timers:
    """Sums the time of named sections between two log lines. On CUDA a timed section waits for the device."""

    def __init__(self, level: int, device: torch.device):
        self.level, self.device = level, device
        self.totals: dict[str, float] = {}

    @contextlib.contextmanager
    def section(self, name: str, level: int = 1) -> Iterator[None]:
        """Time the block, where `level` is asked for."""
        if level > self.level:
            yield
            return
        self._wait()
        begin = time.perf_counter()
        yield
        self._wait()
        self.totals[name] = self.totals.get(name, 0.0) + time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def lines(self, iterations: int) -> list[str]:
        """A line with mean milliseconds per iteration since the last call, if anything was timed; starts over."""
        parts = [f"{name}: {1e3 * total / iterations:.2f}" for name, total in self.totals.items()]
        self.totals = {}
        return [" time per iteration (ms) | " + " | ".join(parts)] if parts else []


class Profiler:
    """torch.profiler around steps `--profile-step-start` to `--profile-step-end` (not included)."""

    def __init__(self, config: LoggingConfig, directory: Path, rank: int):
        self.config = config
        self.target = directory / f"rank_{rank}.json"
        self._profile: torch.profiler.profile | None = None

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Around step `iteration` (from 1)."""
        if self.config.profile and iteration == self.config.profile_step_start:
            self._profile = torch.profiler.profile()
            self._profile.__enter__()
        yield
        if iteration + 1 >= self.config.profile_step_end:
            self.close()

    def close(self) -> None:
        """Write the trace of what was profiled, if anything."""
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self.target))
        self._profile = None


class TimelineRecorder:
    """Writes one JSON line per executed action to `DIR/rank_N.jsonl`, and one per data-parallel collective to
    `DIR/collectives_N.jsonl`; times in ms from the first one."""

    def __init__(self, directory: str, rank: int):
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.actions = self._open(folder / f"rank_{rank}.jsonl")
        self.collectives = self._open(folder / f"collectives_{rank}.jsonl")
        self.zero: float | None = None

    @staticmethod
    def _open(path: Path) -> TextIO:
        return path.open("w", encoding="utf-8", buffering=1)

    def __call__(self, action: Action, begin: float, end: float) -> None:
        """A recorder of `PipelineRuntime`."""
        what = {"kind": action.kind, "chunk": action.chunk, "microbatch": action.microbatch}
        self._write(self.actions, what, begin, end)

    def collective(self, kind: str, chunk: int, bucket: int, begin: float, end: float) -> None:
        """A recorder of the optimizer's collectives."""
        self._write(self.collectives, {"kind": kind, "chunk": chunk, "bucket": bucket}, begin, end)

    def _write(self, file: TextIO, what: dict[str, Any], begin: float, end: float) -> None:
        self.zero = begin if self.zero is None else self.zero
        file.write(json.dumps(what | {"start_ms": begin - self.zero, "end_ms": end - self.zero}) + "\n")

    def close(self) -> None:
        self.actions.close()
        self.collectives.close()


def gather_gradients(optimizer: Optimizer, mesh: Mesh, loss_scale: float) -> dict[str, Tensor]:
    """Global name → full unscaled gradient on the CPU of the first rank; nothing on the others. Collective."""
    gradients = gather(optimizer.gradient_pieces(), mesh)
    return {name: gradient / loss_scale for name, gradient in gradients.items()}


def dump_gradients(directory: str, optimizer: Optimizer, mesh: Mesh, loss_scale: float) -> None:
    """Write `directory/grads.safetensors` on the first rank. Collective."""
    gradients = gather_gradients(optimizer, mesh, loss_scale)
    if mesh.is_first:
        Path(directory).mkdir(parents=True, exist_ok=True)
        save_file(gradients, Path(directory) / "grads.safetensors")
