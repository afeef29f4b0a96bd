"""Runs a layout and one process, and compares them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from megalite.config.schema import RunConfig
from megalite.distributed.layout import Layout
from megalite.distributed.pool import ProcessPool
from megalite.verify.compare import Difference, compare
from megalite.verify.configs import on_one_process, resolved
from megalite.verify.trace import Trace, trace

Tracer = Callable[..., Trace | None]  # called as `trace` is


@dataclass
class Prover:
    """Compares configurations (for proof, unresolved) with one process on a pool of worker processes.

    One-process traces are kept, since many layouts share one. `timeout`: seconds for one run. `progress`: is told each
    part as it begins, and then steps are shown by a bar.
    """

    pool: ProcessPool
    steps: int = 10
    timeout: float = 300.0
    progress: Callable[[str], None] | None = None
    _truths: dict[str, Trace] = field(default_factory=dict)

    def prove(self, config: RunConfig, world_size: int, *, tracer: Tracer = trace) -> Difference:
        """How far `config` on `world_size` processes is from one process."""
        given = resolved(config, world_size)
        self._tell(f"1 of 2: the layout, {self.steps} steps (starting {world_size} processes takes a while)")
        mine = self._trace(given, world_size, tracer)
        one = on_one_process(config)
        # Batch sizes that follow from the data-parallel size are those of the layout.
        one.training.global_batch_size = given.training.global_batch_size
        single = resolved(one, 1)
        key = json.dumps(single.to_dict(), sort_keys=True)
        if key not in self._truths:
            self._tell(f"2 of 2: one process, {self.steps} steps")
            self._truths[key] = self._trace(single, 1, trace)
        return compare(mine, self._truths[key])

    def _tell(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    def _trace(self, config: RunConfig, world_size: int, tracer: Tracer) -> Trace:
        layout = Layout.from_config(config.layout, world_size)
        traced = tracer if self.progress is None else partial(tracer, bar=True)
        results = self.pool.run(traced, world_size, config.to_dict(), self.steps, layout=layout, timeout=self.timeout)
        assert isinstance(results[0], Trace)
        return results[0]
