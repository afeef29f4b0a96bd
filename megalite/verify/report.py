"""What `tools/verify_parallel.py` does and prints."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megalite.config.errors import FlagError
from megalite.config.schema import RunConfig
from megalite.config.schema_peft import PeftConfig
from megalite.distributed.launch import Environment
from megalite.distributed.pool import ProcessPool
from megalite.training.prepare import prepare_config
from megalite.verify.compare import Difference
from megalite.verify.configs import for_matrix, for_proof, resolved, shrink
from megalite.verify.layouts import variants
from megalite.verify.proof import Prover

_SHOWN = 12  # parameters listed


@dataclass(frozen=True)
class Row:
    """One layout and its difference from one process."""

    layout: str
    processes: int
    difference: Difference
    equal: bool

    def to_dict(self) -> dict[str, Any]:
        difference = self.difference
        return {
            "layout": self.layout,
            "processes": self.processes,
            "equal": self.equal,
            "bitwise": difference.bitwise,
            "loss": difference.loss,
            "grad_norm": difference.norm,
            "gradients": difference.parameters,
        }


def _described(config: RunConfig, processes: int) -> tuple[str, int]:
    layout = config.layout
    tp, pp, cp = (
        layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size, layout.context_parallel_size
    )  # fmt: skip
    text = f"TP {tp}{' + SP' if layout.sequence_parallel else ''} x PP {pp} x DP {processes // (tp * pp * cp)}"
    return text, processes


def _world(config: RunConfig, processes: int | None) -> int:
    """Processes of the layout: as given, else the smallest with two data-parallel ranks that eight allow."""
    layout = config.layout
    least = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    if processes is not None:
        return processes
    return 2 * least if 2 * least <= 8 else least


def _checked(config: RunConfig, world: int) -> RunConfig:
    """`config` resolved. A FlagError for what a worker would find wrong with files, in place of a run that fails."""
    return prepare_config(resolved(config, world), Environment(0, world, 0, world)).config


def prove_one(config: RunConfig, *, processes: int | None, shrunk: bool, steps: int, tolerance: float) -> list[Row]:
    """Prove the given layout and print the verdict. `config`: filled, not resolved."""
    world = _world(config, processes)
    config = for_proof(config, steps)
    with tempfile.TemporaryDirectory(prefix="megalite-") as folder:
        if shrunk:
            config = shrink(resolved(config, world), _described_dp(config, world), Path(folder))
        trained = _trained(_checked(config, world).peft)
        with ProcessPool(world) as pool:
            difference = Prover(pool, steps).prove(config, world)
    text, _ = _described(config, world)
    row = Row(text, world, difference, difference.worst <= tolerance)
    print(f"{text} against one process, {steps} steps in float64{trained}: largest relative differences")
    print(f"  {'loss':60} {difference.loss:.3g}\n  {'gradient norm':60} {difference.norm:.3g}")
    for name, value in list(difference.parameters.items())[:_SHOWN]:
        print(f"  {'gradient of ' + name:60} {value:.3g}")
    more = len(difference.parameters) - _SHOWN
    if more > 0:
        print(f"  and {more} more gradients, none larger")
    print(_verdict(row, tolerance))
    return [row]


def _described_dp(config: RunConfig, world: int) -> int:
    layout = config.layout
    used = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    return world // used


def _trained(peft: PeftConfig) -> str:
    """What is trained, where that isn't the whole model."""
    if peft.peft == "lora":
        return ", LoRA (B starts from random numbers, so that A has a gradient)"
    return "" if peft.peft == "none" else f", {peft.peft} tuning"


def _verdict(row: Row, tolerance: float) -> str:
    if row.equal:
        return f"EQUAL within {tolerance:g}" + (", losses and norms bit for bit" if row.difference.bitwise else "")
    return f"NOT EQUAL: {row.difference.worst:.3g} is over {tolerance:g}"


def prove_matrix(config: RunConfig, *, processes: int, steps: int, tolerance: float) -> list[Row]:
    """Prove every layout of up to `processes` processes of a small network of the given structure; print a table.
    `config`: filled, not resolved."""
    if processes < 1:
        raise FlagError(f"--matrix {processes} must be at least 1")
    with tempfile.TemporaryDirectory(prefix="megalite-") as folder:
        return _prove_all(for_matrix(for_proof(config, steps), Path(folder)), processes, steps, tolerance)


def _prove_all(small: RunConfig, processes: int, steps: int, tolerance: float) -> list[Row]:
    chosen = list(variants(processes))
    rows = []
    what = f"{steps} steps in float64{_trained(small.peft)}"
    print(f"{len(chosen)} layouts of up to {processes} processes against one, {what}")
    print(f"{'layout':44} {'loss':>9} {'norm':>9} {'gradients':>9}  verdict")
    with ProcessPool(min(processes, 8)) as pool:
        prover = Prover(pool, steps)
        for variant in tqdm(chosen, unit="layout", disable=None, leave=False, file=sys.stderr):
            difference = prover.prove(variant.apply(small), variant.processes)
            row = Row(str(variant), variant.processes, difference, difference.worst <= tolerance)
            rows.append(row)
            largest = max(difference.parameters.values())
            verdict = "bitwise" if difference.bitwise else "equal" if row.equal else "NOT EQUAL"
            line = f"{row.layout:44} {difference.loss:9.2g} {difference.norm:9.2g} {largest:9.2g}  {verdict}"
            tqdm.write(line, file=sys.stdout)
    wrong = sum(not row.equal for row in rows)
    print(f"{len(rows)} layouts, {wrong} not equal within {tolerance:g}")
    return rows
