"""Training speed beside others on the same machine, in one table.

    make bench
    make bench BENCH_ARGS="--workloads w1 w1l --dtype bf16 --rounds 5 --json runs/bench.json"

| workload | what | beside |
|---|---|---|
| w1 | GPT-2 style, 45 million parameters, one process | transformers; both eager and compiled |
| w1l | Llama style, 49 million parameters, one process | the same |
| w2 | w1l on two processes of one thread, two microbatches a step | PyTorch's DDP and fully_shard |
| w2-layouts | the same as whole runs of pretrain_gpt.py: TP 2 and PP 2 | our own DP 2 |
| optimizer | norm, clip and update of w1 | torch's fused AdamW on one tensor |
| lora | adapters on the model of examples/finetune_lora.sh | PEFT |
| text | the quickstart's text to token files, two workers | |
| indices | the sample index of a billion tokens | |
| checkpoint | save and load of w1's model with Adam's moments | torch.save, torch.load |

All sides begin with the same weights, get the same tokens, hold fp32 parameters, and take turns; the first losses and
gradient norms must agree. MFU: the model's FLOP/s over those of a GEMM (2048 cubed) of the same dtype in the same run.
Absolute rates differ between machines; ratios and their spread count.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import files, layouts, lora, optimizer, sharding
from benchmarks.measure import Row, gemm_peak, reason, table, write_json
from benchmarks.peers import transformers_steps
from benchmarks.sides import LIMITS, Steps, Turns, take_turns
from benchmarks.workloads import CPU, TINY_CPU, OurSteps, Workload
from megalite.config.schema import PrecisionConfig
from megalite.distributed.launch import keep_freed_memory

CPU_DEVICE = torch.device("cpu")
COMPARED = {"no_shard": "DistributedDataParallel", "optim_grads_params": "fully_shard"}


def our_steps(workload: Workload, dtype: str, *, compiled: bool = False) -> Steps:
    """Ours, with the allocator's settings that a run of pretrain_gpt.py makes."""
    keep_freed_memory()
    return OurSteps(workload, PrecisionConfig(bf16=dtype == "bf16"), CPU_DEVICE, compiled=compiled)


def one_process(name: str, args: argparse.Namespace) -> list[Row]:
    """w1, w1l: ours and transformers."""
    workload = (TINY_CPU if args.tiny else CPU)[name]
    sides = {"megalite": our_steps, "transformers": partial(transformers_steps, device=CPU_DEVICE)}
    makes: dict[str, Callable[[], Steps]] = {
        f"{side}{' + compile' if compiled else ''}": partial(make, workload, dtype=args.dtype, compiled=compiled)
        for compiled in (False, True)
        for side, make in sides.items()
        if not (compiled and args.tiny)
    }
    peak = args.peak()
    rows = [Row(name, side, flops=workload.flops, peak=peak) for side in makes]
    take_turns(rows, list(makes.values()), workload, args.dtype, Turns(args.rounds, args.steps, args.threads))
    left_out = [f"{side} + compile" for side in sides] if args.tiny else []
    return [*rows, *(Row(name, side, note="left out: --tiny doesn't compile") for side in left_out)]


def data_parallel(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """w2: ours and PyTorch's data parallelism."""
    workload = sharding.tiny_workload() if args.tiny else sharding.WORKLOAD
    peak, bf16 = args.peak(), args.dtype == "bf16"
    plain = bf16  # our modules can't compute under autocast
    for strategy, measured in sharding.measure(COMPARED, args.rounds, workload, bf16=bf16, plain=plain):
        ours = Row(name, f"megalite {strategy}", flops=workload.flops, peak=peak)
        peer = Row(name, f"PyTorch {COMPARED[strategy]}", flops=workload.flops, peak=peak)
        for row, times in ((ours, measured.ours), (peer, measured.theirs)):
            row.rates = [sharding.tokens_of(workload) / each for each in times]
        peer.loss_apart = measured.apart
        peer.note = "the plain Llama of benchmarks/plain.py" if plain else "on our modules"
        if measured.apart > LIMITS[args.dtype][0]:
            peer.rates, peer.note = [], f"not measured: its losses aren't ours within {LIMITS[args.dtype][0]:g}"
        else:
            peer.compare("megalite / this", ours.rates, peer.rates)
        yield from (ours, peer)


def whole_runs(name: str, args: argparse.Namespace) -> list[Row]:
    """w2-layouts: TP 2 and PP 2 over DP 2."""
    names, extra = ["dp2", "tp2", "pp2"], ["--bf16"] * (args.dtype == "bf16") + layouts.TINY.split() * args.tiny
    workload = sharding.WORKLOAD
    rates, spreads = layouts.measure(names, args.rounds, args.steps, 8, " ".join(extra))
    flops, peak = (0.0, None) if args.tiny else (workload.flops, args.peak())
    rows = [Row(name, f"megalite {layout}", rates[layout], flops=flops, peak=peak) for layout in names]
    for row in rows[1:]:
        row.compare("x dp2", row.rates, rows[0].rates)
        row.loss_apart = max(spreads)
        if row.loss_apart > LIMITS[args.dtype][0]:
            row.note = f"losses aren't those of dp2 within {LIMITS[args.dtype][0]:g}"
    return rows


def updates(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """optimizer: time over that of torch's step, so that above 1 is slower."""
    times = optimizer.measure((TINY_CPU if args.tiny else CPU)["w1"], 5 * args.rounds)
    first = times.pop(optimizer.TORCH)
    for side, own in times.items():
        row = Row(name, side)
        row.compare("x the time of torch's step", own, first)
        yield row


def adapters(name: str, args: argparse.Namespace) -> list[Row]:
    """lora: ours and PEFT's."""
    if not (args.lora_folder / "model").is_dir():
        made_by = f"sh examples/finetune_lora.sh {args.lora_folder}"
        return [Row(name, "megalite", note=f"left out: there is no {args.lora_folder}: {made_by}")]
    sides = lora.sides(args.lora_folder, 128, bf16=args.dtype == "bf16", compiled=False)
    rates, losses = lora.alternate(*sides, args.rounds, args.steps)
    rows = [Row(name, side, own) for side, own in zip(("megalite", "PEFT"), rates, strict=True)]
    rows[1].compare("megalite / this", *rates)
    rows[1].loss_apart = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    return rows


def without_training(name: str, args: argparse.Namespace) -> list[Row]:
    """text, indices, checkpoint."""
    if name == "text":
        return [files.text(name, files.QUICKSTART, args.rounds)]
    if name == "indices":
        return [files.indices(name, 10**6 if args.tiny else 10**9, args.rounds)]
    return list(files.checkpoint(name, (TINY_CPU if args.tiny else CPU)["w1"], args.rounds))


WORKLOADS = {
    "w1": one_process,
    "w1l": one_process,
    "w2": data_parallel,
    "w2-layouts": whole_runs,
    "optimizer": updates,
    "lora": adapters,
    **dict.fromkeys(("text", "indices", "checkpoint"), without_training),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = list(WORKLOADS)
    parser.add_argument("--workloads", nargs="+", choices=every, default=every[:4], help=f"default {every[:4]}")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one that warms up")
    parser.add_argument("--steps", type=int, default=2, help="steps of a side in a round")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of one process")
    parser.add_argument("--lora-folder", type=Path, default=Path("runs/lora"), help="of examples/finetune_lora.sh")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    parser.add_argument("--tiny", action="store_true", help="tiny models, not compiled: the rates mean nothing")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    args.peak = partial(gemm_peak, args.dtype, CPU_DEVICE, 128 if args.tiny else None)
    rows: list[Row] = []
    for name in args.workloads:
        try:
            found = list(WORKLOADS[name](name, args))
        except Exception as error:  # the other workloads are still wanted
            found = [Row(name, "", note=reason(error))]
        print(table(found), end="\n\n", file=sys.stderr, flush=True)
        rows += found
    print(table(rows))
    write_json(args.json, rows, dtype=args.dtype, rounds=args.rounds, steps=args.steps, tiny=args.tiny)
    return 0


if __name__ == "__main__":
    sys.exit(main())
