"""Layouts of two processes against each other, and a pipeline against its prediction, as whole runs of pretrain_gpt.py.

Runs alternate, and ratios are taken within each round, so that a machine that slows down slows all alike. The model is
a Llama of 49 million parameters on sequences of 512 tokens, one thread a process.

    python benchmarks/layouts.py compare --layouts dp2 tp2 --rounds 5
    python benchmarks/layouts.py pipeline
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from megalite.pipeline.lowering import lower
from megalite.pipeline.schedules import build_schedule
from megalite.pipeline.simulator import simulate
from megalite.pipeline.timeline import median_costs, read_steps

ROOT = Path(__file__).parents[1]
MODEL = (
    "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--swiglu --ffn-hidden-size 1408 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --seq-length 512 --max-position-embeddings 512 --hidden-dropout 0 "
    "--attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 31999 "
    "--make-vocab-size-divisible-by 1 --micro-batch-size 2 --lr 1e-4 --eval-iters 0 --log-interval 1 --device cpu "
    "--threads-per-rank 1"
)
TINY = "--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32 --vocab-size 255"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --data-parallel-sharding-strategy"
LAYOUTS = {
    "dp2": "",
    "tp2": "--tensor-model-parallel-size 2",
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 6 "
    "--decoder-last-pipeline-num-layers 0",
    "zero1": f"{OVERLAP} optim",
    "zero2": f"{OVERLAP} optim_grads",
    "zero3": f"{OVERLAP} optim_grads_params",
}


def train(flags: str, steps: int, global_batch: int, folder: Path, processes: int = 2) -> list[dict[str, float]]:
    """What a run's metrics file says of its steps, but for the first, which warms up."""
    metrics = folder / "metrics.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += [str(ROOT / "pretrain_gpt.py"), *MODEL.split(), *flags.split()]
    command += ["--global-batch-size", str(global_batch), "--train-iters", str(steps + 1)]
    done = subprocess.run([*command, "--metrics-file", str(metrics)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return [json.loads(line) for line in metrics.read_text("utf-8").splitlines()][1:]


def measure(
    names: list[str], rounds: int, steps: int, global_batch: int, extra: str
) -> tuple[dict[str, list[float]], list[float]]:
    """Median tokens per second of each layout in each round, and how far the last losses of a round are apart."""
    spreads = []
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        losses = {}
        for name in names if number % 2 == 0 else reversed(names):
            with tempfile.TemporaryDirectory() as folder:
                lines = train(f"{LAYOUTS[name]} {extra}", steps, global_batch, Path(folder))
            rates[name].append(statistics.median(line["tokens_per_second"] for line in lines))
            losses[name] = lines[-1]["lm_loss"]
        spreads.append(max(losses.values()) / min(losses.values()) - 1)
    return rates, spreads


def compare(names: list[str], rounds: int, steps: int, global_batch: int, extra: str) -> None:
    """Print the rate of each layout, and its ratio to the first one, round by round."""
    rates, spreads = measure(names, rounds, steps, global_batch, extra)
    print(f"losses of a round agree to {max(spreads):.1e}")
    print(f"\n{'layout':10} {'tokens/s':>9} {'min':>7} {'max':>7}   of {names[0]} (median, min, max of the rounds)")
    for name in names:
        ratios = [mine / first for mine, first in zip(rates[name], rates[names[0]], strict=True)]
        own = rates[name]
        print(
            f"{name:10} {statistics.median(own):9.0f} {min(own):7.0f} {max(own):7.0f}   "
            f"{statistics.median(ratios):.3f} {min(ratios):.3f} {max(ratios):.3f}"
        )


def pipeline(steps: int, global_batch: int, layout: str) -> None:
    """A measured pipeline against the simulation of the same schedule with the measured cost of each action."""
    microbatches = global_batch // 2
    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder, "timeline")
        lines = train(f"{LAYOUTS['pp2']} {layout} --timeline {timeline}", steps, global_batch, Path(folder))
        measured = read_steps(timeline)[1:]
    costs = median_costs(measured)
    predicted = simulate(lower(build_schedule("1f1b", 2, 1, microbatches), 2, 1), costs)
    makespans = [step.makespan for step in measured]
    elapsed = [line["elapsed_ms"] for line in lines]
    makespan, whole = statistics.median(makespans), statistics.median(elapsed)
    busiest = predicted.makespan * (1 - min(predicted.bubble_shares()))
    print(f"PP 2, 1f1b, {microbatches} microbatches, {len(measured)} steps; milliseconds")
    print(f"  busiest stage's computing      {busiest:9.0f}")
    print(
        f"  simulated pipeline             {predicted.makespan:9.0f}   {predicted.makespan / makespan:.3f} of measured"
    )
    print(f"  measured pipeline              {makespan:9.0f}   ({min(makespans):.0f} to {max(makespans):.0f})")
    print(f"  whole step (with the update)   {whole:9.0f}   {predicted.makespan / whole:.3f} predicted / whole")
    shares = [statistics.fmean(shares) for shares in zip(*(step.bubble_shares() for step in measured), strict=True)]
    pairs = zip(predicted.bubble_shares(), shares, strict=True)
    print("  idle share of each stage       " + ", ".join(f"{a:.1%} simulated, {b:.1%} measured" for a, b in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    comparison = commands.add_parser("compare", help="layouts against the first one named")
    comparison.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=["dp2", "tp2"])
    comparison.add_argument("--rounds", type=int, default=5)
    comparison.add_argument("--steps", type=int, default=3, help="measured steps of each run, after one for warm-up")
    comparison.add_argument("--global-batch-size", type=int, default=8)
    comparison.add_argument("--extra", default="", help="flags for all layouts, such as --bf16")
    prediction = commands.add_parser("pipeline", help="a pipeline of two against the simulator")
    prediction.add_argument("--steps", type=int, default=3)
    prediction.add_argument("--global-batch-size", type=int, default=32)
    prediction.add_argument("--extra", default="")
    args = parser.parse_args()
    if args.command == "compare":
        compare(args.layouts, args.rounds, args.steps, args.global_batch_size, args.extra)
    else:
        pipeline(args.steps, args.global_batch_size, args.extra)


if __name__ == "__main__":
    main()
