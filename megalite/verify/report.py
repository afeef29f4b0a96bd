"""What `tools/verify_parallel.py` does and prints."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megalite.config.check_precision import FP8_BLOCKS
from megalite.config.errors import FlagError
from megalite.config.resolve import context_exchange, shards, virtual_stages
from megalite.config.schema import LayoutConfig, RunConfig
from megalite.config.schema_finetune import PeftConfig
from megalite.distributed.launch import Environment
from megalite.distributed.pool import ProcessPool
from megalite.estimate.memory import estimate_memory, machine_memory
from megalite.estimate.model import count_parameters
from megalite.training.prepare import prepare_config
from megalite.verify.configs import checked, for_proof
from megalite.verify.layouts import Variant, variants, with_experts
from megalite.verify.proof import Difference, Prover
from megalite.verify.replace import replace_absent_files, replaced_note, unused_note, use_made_data
from megalite.verify.small import for_matrix, shrink, small_layout

_PRELOADED = ["megalite.training.run"]
_SHOWN = 12  # parameters listed
_PROCESS_BYTES = 300_000_000  # of a process that has loaded torch


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


@dataclass(frozen=True)
class Size:
    """How big a proof may be. `processes`: to start; None: what the layout needs, with two data-parallel ranks where
    eight processes allow. `most_processes`: a proof with more is refused; None: by this machine's cores."""

    processes: int | None = None
    shrink: bool = False
    keep_layout: bool = False
    most_processes: int | None = None

    def refuse_if_over(self, count: int, layout: str, hint: str) -> None:
        """A FlagError for more processes than this machine should start."""
        most = self.most_processes or max(16, 4 * _cores())
        if count > most:
            raise FlagError(
                f"{layout} needs {count} processes; on this machine's {_cores()} cores at most {most} are started. "
                f"{hint}, or give --most-processes {count} to start them anyway"
            )


def prove_one(config: RunConfig, size: Size, *, steps: int, tolerance: float, notes: Sequence[str] = ()) -> list[Row]:
    """Prove the given layout and print the verdict. `config`: filled, not resolved. `notes`: for the user, printed
    after the number of processes."""
    asked, config = config, for_proof(config, steps)
    notes = [*notes, *unused_note(asked, config)]
    with tempfile.TemporaryDirectory(prefix="megalite-") as folder:
        if size.shrink:
            notes += replaced_note(config)
            config, world = _shrunk(config, size, Path(folder))
        else:
            notes += replace_absent_files(config)
            world = size.processes or _world(config.layout, least=1)
        text = layout_text(config.layout, world)
        size.refuse_if_over(world, text, "--shrink proves a small layout of the same kind")
        run = checked(config, world)
        _refuse_beyond_memory(run, world)
        # What a worker would find wrong with files is told here, in place of a run that fails.
        run = prepare_config(run, Environment(0, world, 0, world)).config
        _announce(f"{world} processes will start on {_cores()} CPU cores: {text}{_from(asked, config)}", notes)
        with ProcessPool(world, preload=_PRELOADED) as pool:
            difference = Prover(pool, steps, progress=partial(print, file=sys.stderr, flush=True)).prove(config, world)
    row = Row(text, world, difference, difference.worst <= tolerance)
    _print_row(row, f"{steps} steps in float64{_trained(run.peft)}", tolerance)
    return [row]


def _print_row(row: Row, what: str, tolerance: float) -> None:
    difference = row.difference
    print(f"{row.layout} against one process, {what}: largest relative differences")
    print(f"  {'loss':60} {difference.loss:.3g}\n  {'gradient norm':60} {difference.norm:.3g}")
    for name, value in list(difference.parameters.items())[:_SHOWN]:
        print(f"  {'gradient of ' + name:60} {value:.3g}")
    more = len(difference.parameters) - _SHOWN
    if more > 0:
        print(f"  and {more} more gradients with smaller or equal differences")
    if row.equal:
        print(f"EQUAL within {tolerance:g}" + (", losses and norms bit for bit" if difference.bitwise else ""))
    else:
        print(f"NOT EQUAL: {difference.worst:.3g} is above {tolerance:g}")


def _announce(line: str, notes: Sequence[str]) -> None:
    print(line, flush=True)
    for note in notes:
        print(note, file=sys.stderr)


def _cores() -> int:
    return os.cpu_count() or 1


def layout_text(layout: LayoutConfig, processes: int | None = None) -> str:
    """`TP 2 + SP x PP 4 x VPP 2 x DP 1`; without `processes` no DP."""
    tp, pp, chunks = (
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.num_virtual_stages_per_pipeline_rank or 1,
    )
    sequence = " + SP" if layout.sequence_parallel and tp > 1 else ""
    text = f"TP {tp}{sequence} x PP {pp}" + (f" x VPP {chunks}" if chunks > 1 else "")
    if processes is not None:
        text += f" x DP {processes // _least(layout)}"
    cp, ep, etp = layout.context_parallel_size, layout.expert_model_parallel_size, layout.expert_tensor_parallel_size
    text += f" x CP {cp} {context_exchange(layout)}" if cp > 1 else ""
    return text + (f" x EP {ep}" if ep > 1 else "") + (f" x ETP {etp}" if etp is not None else "")


def _from(asked: RunConfig, config: RunConfig) -> str:
    """The layout that was asked for, where it was cut down."""
    before, after = layout_text(_with_chunks(asked)), layout_text(config.layout)
    return "" if before == after else f", made smaller from {before} (--keep-layout keeps it)"


def _with_chunks(config: RunConfig) -> LayoutConfig:
    chunks = virtual_stages(config)
    return replace(config.layout, num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None)


def _least(layout: LayoutConfig) -> int:
    """Processes of one copy of the model."""
    return layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size


def _world(layout: LayoutConfig, *, least: int) -> int:
    """Processes for at least `least` data-parallel ranks, and two where eight processes allow."""
    copies = max(least, 2 if 2 * _least(layout) <= 8 else 1)
    ranks = layout.tensor_model_parallel_size * layout.context_parallel_size
    tensor = layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size
    grid = layout.expert_model_parallel_size * tensor
    return lcm(copies, lcm(ranks, grid) // ranks) * _least(layout)


def _shrunk(config: RunConfig, size: Size, folder: Path) -> tuple[RunConfig, int]:
    """A small run like `config`, and how many processes it takes."""
    layout = _with_chunks(config) if size.keep_layout else small_layout(config)
    world = size.processes or _world(layout, least=2 if shards(config) else 1)
    copies = world // _least(layout)
    if copies == 0 or world % _least(layout):
        raise FlagError(f"--processes {world}: {layout_text(layout)} needs a multiple of {_least(layout)} processes")
    if config.finetune.sft_data is None:
        use_made_data(config, 1)
    size.refuse_if_over(world, layout_text(layout, world), "Leave out --keep-layout")
    given = checked(config, _world(config.layout, least=copies))
    return shrink(given, copies, folder, None if size.keep_layout else layout), world


def _refuse_beyond_memory(config: RunConfig, world: int) -> None:
    """A FlagError for a network that this machine's memory can't hold: parameters, gradients and moments of all
    processes, or of the one process."""
    rows = config.model.model_vocab_size or config.tokenizer.vocab_size or 1  # no tokenizer has been read yet
    count = count_parameters(config.model, rows).total
    copies = world // _least(config.layout)
    local = count * copies // world
    held = world * estimate_memory(config, local, activations=0, ranks=copies).total
    needed = max(held, 4 * 8 * count) + world * _PROCESS_BYTES
    there = machine_memory()
    if needed > there:
        raise FlagError(
            f"{world} processes would need about {needed / 1e9:,.0f} GB of memory for {count:,} parameters in float64; "
            f"this machine has {there / 1e9:,.0f} GB. --shrink proves a small network of the same kind"
        )


def _trained(peft: PeftConfig) -> str:
    """What is trained, where that isn't the whole model."""
    if peft.peft == "lora":
        return ", LoRA (B starts from random numbers, so that A's gradient isn't zero)"
    return "" if peft.peft == "none" else f", {peft.peft} tuning"


def prove_matrix(
    config: RunConfig, size: Size, *, steps: int, tolerance: float, notes: Sequence[str] = ()
) -> list[Row]:
    """Prove every layout of up to `size.processes` processes of a small network of the given structure; print a table.
    `config`: filled, not resolved."""
    assert size.processes is not None
    with tempfile.TemporaryDirectory(prefix="megalite-") as folder:
        proof = for_proof(config, steps)
        notes = [*notes, *unused_note(config, proof), *replaced_note(config)]
        contexts = (1,) if proof.precision.fp8_recipe in FP8_BLOCKS else (1, 2, 4)  # blocks are longer than chunks
        layouts = variants(size.processes, contexts=contexts)
        chosen = list(layouts if proof.model.num_experts is None else with_experts(layouts))
        count = max(variant.processes for variant in chosen)
        size.refuse_if_over(count, f"--matrix {size.processes}", "Give a smaller number")
        _announce(
            f"{count} processes will start on {_cores()} CPU cores: {len(chosen)} layouts of up to {count} processes "
            f"against one, {steps} steps in float64{_trained(proof.peft)}",
            notes,
        )
        cases = [(variant, for_matrix(proof, variant, Path(folder))) for variant in chosen]
        return _prove_all(cases, count, steps, tolerance)


def _prove_all(cases: list[tuple[Variant, RunConfig]], processes: int, steps: int, tolerance: float) -> list[Row]:
    rows = []
    print(f"{'layout':60} {'loss':>9} {'norm':>9} {'gradients':>9}  verdict")
    with ProcessPool(processes, preload=_PRELOADED) as pool:
        prover = Prover(pool, steps)
        for variant, small in tqdm(cases, unit="layout", disable=None, leave=False, file=sys.stderr):
            difference = prover.prove(variant.apply(small), variant.processes)
            row = Row(str(variant), variant.processes, difference, difference.worst <= tolerance)
            rows.append(row)
            largest = max(difference.parameters.values())
            verdict = "bitwise" if difference.bitwise else "equal" if row.equal else "NOT EQUAL"
            line = f"{row.layout:60} {difference.loss:9.2g} {difference.norm:9.2g} {largest:9.2g}  {verdict}"
            tqdm.write(line, file=sys.stdout)
    wrong = sum(not row.equal for row in rows)
    print(f"{len(rows)} layouts, {wrong} not equal within {tolerance:g}")
    return rows
