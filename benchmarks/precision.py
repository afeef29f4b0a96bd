"""The validation loss after the same short training in every number format: how far each is from fp32 and from bf16.

    make quickstart                    # makes the corpus and the tokenizer
    python -m benchmarks.precision     # about an hour on CPU cores without bf16 instructions

Each mode is one process of `pretrain_gpt.py` with the seed, data and steps of the others; its command is printed and
can be repeated alone. A result that is in `--folder` already, from the same command, isn't made again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FP8 = "--bf16 --fp8-format hybrid --fp8-backend emulated --fp8-recipe"
LEAN = "--bf16 --use-precision-aware-optimizer"
MODES = {
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--fp16 --initial-loss-scale 65536",
    "fp8-delayed": f"{FP8} delayed",
    "fp8-tensorwise": f"{FP8} tensorwise",
    "fp8-blockwise": f"{FP8} blockwise",
    "fp8-mxfp8": f"{FP8} mxfp8",
    "bf16-moments": f"{LEAN} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "bf16-alone": f"{LEAN} --main-params-dtype bf16",
}
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--hidden-dropout 0 --attention-dropout 0"
)
TRAINING = (
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 30 --adam-beta2 0.98 --weight-decay 0.1 "
    "--device cpu --threads-per-rank 1 --log-interval 10"
)
VALIDATION_TOKENS = 32768


def command(mode: str, args: argparse.Namespace) -> list[str]:
    """The words that train and evaluate in one mode."""
    data, batch = args.data, str(args.batch_size)
    words = ["pretrain_gpt.py", *MODEL.split(), *TRAINING.split(), "--train-iters", str(args.steps)]
    words += ["--micro-batch-size", batch, "--global-batch-size", batch]
    words += ["--eval-iters", str(VALIDATION_TOKENS // (128 * args.batch_size))]
    words += [f"--{split}-data-path={data}/{split}_text_document" for split in ("train", "valid")]
    words += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{data}/tokenizer.model"]
    return [*words, f"--metrics-file={args.folder / mode}.jsonl", *MODES[mode].split()]


def loss_of(metrics: Path) -> float | None:
    """The validation loss at the end of a run's metrics file; None if it isn't there."""
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    last = json.loads(lines[-1]) if lines else {}
    return last["lm_loss"] if last.get("split") == "valid" else None


def run(mode: str, args: argparse.Namespace) -> float:
    """Validation loss of a mode, from an earlier run of the same command or from one that is made now."""
    words, made_by = command(mode, args), args.folder / f"{mode}.command"
    shown = shlex.join(["python", *words])
    loss = loss_of(args.folder / f"{mode}.jsonl")
    if loss is not None and made_by.is_file() and made_by.read_text(encoding="utf-8") == shown:
        return loss
    print(f"$ {shown}", flush=True)
    with (args.folder / f"{mode}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    loss = loss_of(args.folder / f"{mode}.jsonl")
    if done.returncode or loss is None:
        sys.exit(f"{mode} failed: see {log.name}")
    made_by.write_text(shown, encoding="utf-8")
    return loss


def table(losses: dict[str, float]) -> str:
    """Markdown: a row for each mode."""
    lines = ["| mode | flags | validation loss | against fp32 | against bf16 |", "|---|---|---|---|---|"]
    for mode, loss in losses.items():
        against = [f"{loss / losses[base] - 1:+.2%}" if base in losses else "" for base in ("fp32", "bf16")]
        flags = f"`{MODES[mode]}`" if MODES[mode] else ""
        lines.append(f"| {mode} | {flags} | {loss:.4f} | {against[0]} | {against[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=1, help="sequences of 128 tokens in a step")
    parser.add_argument("--data", type=Path, default=Path("runs/quickstart"), help="token files of tools/quickstart.py")
    parser.add_argument("--folder", type=Path, default=Path("runs/precision"), help="metrics and logs of the runs")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    print(table({mode: run(mode, args) for mode in args.modes}))


if __name__ == "__main__":
    main()
