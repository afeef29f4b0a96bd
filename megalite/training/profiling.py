"""`--profile`: a trace of some steps; `--timeline`: when each action of a schedule ran."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from megalite.config.schema import LoggingConfig
from megalite.pipeline.schedules import Action


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


class Timeline:
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
