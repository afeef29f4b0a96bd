"""LoRA against PEFT on transformers: the same model folder, microbatches and update, alternating in one run.

    sh examples/finetune_lora.sh runs/lora           # makes the model folder and the data
    python -m benchmarks.lora --folder runs/lora

One process of two threads. Theirs: `LlamaForCausalLM` with SDPA and a `LoraConfig` of the same targets, rank and scale,
fused AdamW, clipping; padding is on the right, so that no mask is needed. With `--compile` theirs is compiled, for
lengths that vary. Tokens are counted as they are processed, padding of a microbatch included, alike on both sides.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.fields import section_names
from megalite.data.microbatch import Microbatch
from megalite.distributed.launch import Environment, start
from megalite.training.prepare import prepare
from megalite.training.run import build_run

RANK, ALPHA, RATE, THREADS = 16, 32, 1e-4, 2
FLAGS = (
    f"--task sft --peft lora --lora-target-modules all-linear --lora-rank {RANK} --lora-alpha {ALPHA} "
    f"--micro-batch-size 4 --global-batch-size 8 --train-iters 1000 --lr {RATE} --weight-decay 0 --clip-grad 1.0 "
    f"--eval-iters 0 --device cpu --threads-per-rank {THREADS} --num-workers 0"
)


class Ours:
    """Steps of `finetune.py`, in this process."""

    def __init__(self, folder: Path, length: int, flags: list[str]):
        words = [*FLAGS.split(), "--load-hf", f"{folder / 'model'}", "--sft-data", f"{folder / 'train.jsonl'}"]
        words += ["--seq-length", str(length), *flags]
        environment = Environment()
        prepared = prepare(words, environment, program="lora.py", description="", sections=section_names())
        self._mesh = start(prepared.config.layout, environment, prepared.device)
        self.run = build_run(prepared, self._mesh.__enter__())
        self._source = self.run.trainer.microbatches

    def draw(self) -> list[Microbatch]:
        """The next step's microbatches."""
        return [next(self._source), next(self._source)]

    def step(self, microbatches: list[Microbatch]) -> float:
        self.run.trainer.microbatches = iter(microbatches)
        return self.run.trainer.step().lm_loss


class Theirs:
    """Steps of PEFT on transformers."""

    def __init__(self, folder: Path, bf16: bool, compiled: bool):
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if bf16 else torch.float32
        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, attn_implementation="sdpa")
        how = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(base, how).train()
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=RATE, betas=(0.9, 0.999), weight_decay=0, fused=True)
        self.run: Any = torch.compile(self.model, dynamic=True) if compiled else self.model

    def _loss(self, batch: Microbatch, tokens: Tensor) -> Tensor:
        logits = self.run(input_ids=batch.tokens, use_cache=False).logits
        labels = batch.labels.masked_fill(~batch.loss_mask, -100)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / tokens

    def step(self, microbatches: list[Microbatch]) -> float:
        tokens = torch.stack([batch.loss_mask.sum() for batch in microbatches]).sum()
        total = 0.0
        for batch in microbatches:
            loss = self._loss(batch, tokens)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def sides(folder: Path, length: int, *, bf16: bool, compiled: bool) -> tuple[Ours, Theirs]:
    """Ours, and PEFT's, perhaps with torch.compile."""
    torch.set_num_threads(THREADS)
    return Ours(folder, length, ["--bf16"] * bf16), Theirs(folder, bf16, compiled)


def alternate(ours: Ours, theirs: Theirs, rounds: int, steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """Tokens per second of each round, and losses of each step, of both sides. The first round warms up."""
    rates: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    both = [ours, theirs]
    for number in range(rounds + 1):
        batches = [ours.draw() for _ in range(steps)]
        tokens = sum(each.tokens.numel() for step in batches for each in step)
        for side in (0, 1) if number % 2 else (1, 0):
            begin = time.perf_counter()
            losses[side] += [both[side].step(step) for step in batches]
            rates[side].append(tokens / (time.perf_counter() - begin))
    return [each[1:] for each in rates], losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/lora"), help="of examples/finetune_lora.sh")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a round")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true", help="theirs with torch.compile")
    args = parser.parse_args()
    pair = sides(args.folder, args.seq_length, bf16=args.bf16, compiled=args.compile)
    rates, losses = alternate(*pair, args.rounds, args.steps)
    apart = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    ratios = [a / b for a, b in zip(*rates, strict=True)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"losses apart by at most {apart:.1e} of {len(losses[0])} steps; first {losses[0][0]:.4f}")
    print(f"tokens/s: ours {statistics.median(rates[0]):.0f}, PEFT {statistics.median(rates[1]):.0f}")
    print(f"ours / PEFT: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"peak memory of both in one process: {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
