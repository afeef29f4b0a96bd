"""One GPU in five minutes: is every precision right, how fast is training, and how fast is plain PyTorch beside it.

    python -m benchmarks.gpu --json gpu.json
    python -m benchmarks.gpu --tiny            # the same on a CPU, with tiny models

Right: losses and gradients of a small model in each precision against float64 on the CPU, at the second step, so that
delayed scales have a history. Fast: steps of 350M, 1.3B and a 7B-shaped model (of fewer layers) in bf16 and FP8, and of
a plain Llama of the same shape with SDPA, torch.compile, autocast and fused AdamW. MFU: the model's FLOP/s over those
of a GEMM of the same dtype in the same run, and over the vendor's. "apart": the first step's loss and gradient norm
from those of what the row is compared with. What a device can't do is a row that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.measure import Row, apart, gemm_peak, reason, seconds, table, vendor_peak, write_json
from benchmarks.peers import plain_steps
from benchmarks.workloads import GPU, TINY_GPU, OurSteps, Workload, llama
from megalite.config.schema import PrecisionConfig
from megalite.precision.backends import problem
from megalite.precision.fp8 import Fp8

SMALL = Workload(llama(2, 128, 4, 2, 256), 512, 64, 2)
"""Of which correctness is shown; blocks of 128 fit."""
FP8 = ("fp8-tensorwise", "fp8-delayed", "fp8-blockwise", "fp8-mxfp8")
LIMITS = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 5e-3, **dict.fromkeys(FP8, 0.2)}
"""The largest difference of all gradients from those in float64, relative to their norm; losses a tenth of it."""
SHORTEST = 2.0  # seconds that a measured window has at least


class Steps(Protocol):
    """`OurSteps` or `PeerSteps`."""

    def take(self, batches: list[Tensor]) -> None: ...

    def step(self) -> tuple[float | Tensor, float | Tensor]: ...


def precision_of(name: str) -> PrecisionConfig:
    """`fp32`, `bf16`, `fp16`, `fp64` or FP8 by recipe. Torch's GEMMs take scales of blocks for E4M3 alone."""
    if name in FP8:
        recipe = name.removeprefix("fp8-")
        form = "hybrid" if recipe in ("delayed", "tensorwise") else "e4m3"
        return PrecisionConfig(bf16=True, fp8_format=form, fp8_recipe=recipe)
    return PrecisionConfig(
        bf16=name == "bf16", fp16=name == "fp16", fp64=name == "fp64", loss_scale=1024.0 if name == "fp16" else None
    )


def without_gemms(precision: PrecisionConfig, device: torch.device) -> str | None:
    """Why FP8 products would only be emulated on this device."""
    found = {name: problem(name, precision, device) for name in ("te", "torch")} if precision.fp8_format else {}
    return "; ".join(f"{name} {why}" for name, why in found.items()) if found and all(found.values()) else None


def gradients_of(precision: str, device: torch.device) -> tuple[float, dict[str, Tensor], str]:
    """Loss and float64 gradients of the small model at its second step, after one that changed no weight; and who
    multiplies in FP8."""
    config = precision_of(precision)
    steps = OurSteps(SMALL, config, device, rate=0.0)
    found: dict[str, Tensor] = {}

    def take(loss_scale: float) -> None:
        for piece in steps.model.optimizer.gradient_pieces():
            found[piece.name] = piece.flat.cpu().to(torch.float64) / loss_scale

    steps.take(SMALL.batches(0, 2))
    steps.step()
    steps.trainer.on_first_gradients = take
    loss, _ = steps.step()
    fp8 = Fp8.from_config(config, device)
    return loss, found, "" if fp8 is None else fp8.description


def correctness(device: torch.device) -> Iterator[Row]:
    """A row for each precision."""
    true_loss, truth, _ = gradients_of("fp64", torch.device("cpu"))
    whole = torch.cat(list(truth.values()))
    for precision, limit in LIMITS.items():
        row = Row("correctness", f"megalite {precision}")
        with failing_into(row):
            loss, found, row.note = gradients_of(precision, device)
            row.loss_apart = abs(loss - true_loss) / true_loss
            difference = torch.cat([found[name] for name in truth]) - whole
            row.gradient_apart = (difference.norm() / whole.norm()).item()
            if not (row.gradient_apart <= limit and row.loss_apart <= limit / 10):
                row.note = f"WRONG: over {limit:g} (losses {limit / 10:g}); {row.note}"
        yield row


@contextlib.contextmanager
def failing_into(row: Row) -> Iterator[None]:
    """An error becomes the row's note: the other rows are still wanted. What was on the device is freed."""
    try:
        yield
    except Exception as error:
        row.note = reason(error)
    gc.collect()
    if torch.cuda.is_available():
        torch.compiler.reset()  # else it would take the next shape for a varying one
        torch.cuda.empty_cache()


def measure(row: Row, workload: Workload, make: Callable[[], Steps], device: torch.device, windows: int) -> None:
    """Fill in a row: the first step's loss and norm, rates of windows of several steps after a warm-up, memory."""
    steps, batches = make(), workload.batches(0, 2)
    steps.take(batches[:1])
    loss, norm = steps.step()  # also compiles
    row.first = float(loss), float(norm)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def run(count: int) -> None:
        for _ in range(count):
            steps.step()

    def timed(count: int) -> float:
        steps.take([batches[number % 2] for number in range(count)])
        return seconds(partial(run, count), device)

    timed(1)
    count = 1 if device.type == "cpu" else max(2, round(SHORTEST / (timed(2) / 2)))
    row.rates = [count * workload.tokens / timed(count) for _ in range(windows)]
    if device.type == "cuda":
        row.memory = torch.cuda.max_memory_allocated(device)


COMPILED = "+compile"


def plan(shapes: Iterable[str], precisions: Iterable[str]) -> list[tuple[str, str]]:
    """(shape, side), what matters most first: time may run out."""
    wide = ["plain", *(each for each in precisions if not each.startswith("fp8"))]
    narrow = [each for each in precisions if each.startswith("fp8")]
    return [*itertools.product(shapes, wide), *((shape, side) for side in narrow for shape in reversed([*shapes]))]


class Speed:
    """Rows of shapes and sides, measured one after the other. `until`: by `time.monotonic`, when no more begin."""

    def __init__(self, device: torch.device, *, tiny: bool, windows: int, until: float):
        self.device, self.tiny, self.windows, self.until = device, tiny, windows, until
        self.peaks: dict[str, float] = {}
        self.rows: dict[tuple[str, str], Row] = {}

    def row(self, name: str, workload: Workload, side: str) -> Row:
        """Measure one side: `plain`, or ours in a precision, perhaps compiled."""
        name_of_precision, compiled = side.removesuffix(COMPILED), side.endswith(COMPILED)
        dtype = "bf16" if side == "plain" else name_of_precision.split("-")[0]
        precision = precision_of(dtype if side == "plain" else name_of_precision)
        row = Row(name, f"megalite {side}", flops=workload.flops)
        make: Callable[[], Steps] = partial(OurSteps, workload, precision, self.device, compiled=compiled)
        if side == "plain":
            row.side = f"plain PyTorch bf16{'' if self.tiny else COMPILED}"
            make = partial(plain_steps, workload, dtype, self.device, compiled=not self.tiny)
        why = without_gemms(precision, self.device)
        if time.monotonic() > self.until:
            row.note = "left out: the time was over (--minutes)"
        elif compiled and self.tiny:
            row.note = "left out: --tiny doesn't compile"
        elif why is not None:
            row.note = f"left out, it would be emulated: {why}"
        else:
            with failing_into(row):
                if dtype not in self.peaks:
                    self.peaks[dtype] = gemm_peak(dtype, self.device, 128 if self.tiny else None)
                row.peak, row.vendor = self.peaks[dtype], vendor_peak(dtype, self.device)
                measure(row, workload, make, self.device, self.windows)
        self.rows[name, side] = row
        return row

    def compare(self) -> None:
        """FP8 with bf16, the others with plain PyTorch."""
        for (name, side), row in self.rows.items():
            other = f"bf16{COMPILED if side.endswith(COMPILED) else ''}" if side.startswith("fp8") else "plain"
            base = self.rows.get((name, other))
            if base is not None and base is not row and row.rates and base.rates:
                row.compare(f"x {other}", row.rates, base.rates)
                row.loss_apart, row.gradient_apart = apart(row.first, base.first)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU, not compiled, in seconds")
    parser.add_argument("--shapes", nargs="+", choices=list(GPU), default=list(GPU))
    eager = ["fp32", "bf16", "fp16", *FP8]
    every, default = [*eager, *(name + COMPILED for name in eager)], ["bf16", f"bf16{COMPILED}", *FP8]
    parser.add_argument("--precisions", nargs="+", choices=every, default=default, help="whose speed is measured")
    parser.add_argument("--windows", type=int, default=3, help="measured windows of each row")
    parser.add_argument("--minutes", type=float, default=5, help="begin no measurement after so many")
    args = parser.parse_args(argv)
    if not (args.tiny or torch.cuda.is_available()):
        parser.error("there is no GPU here: --tiny runs everything on a CPU")
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    if args.tiny:
        torch.set_num_threads(1)
    work = Speed(device, tiny=args.tiny, windows=args.windows, until=time.monotonic() + 60 * args.minutes)
    rows = list(correctness(device))
    for name, side in plan(args.shapes, args.precisions):
        row = work.row(name, (TINY_GPU if args.tiny else GPU)[name], side)
        print(f"{name}, {row.side}: {row.note or f'{row.rate:.0f} tokens/s'}", file=sys.stderr, flush=True)
    work.compare()
    rows += work.rows.values()
    print(table(rows))
    if args.tiny:
        print("\n--tiny: tiny models on a CPU, not compiled; the rates mean nothing")
    write_json(args.json, rows, tiny=args.tiny)
    return int(any("WRONG" in row.note for row in rows))


if __name__ == "__main__":
    sys.exit(main())
