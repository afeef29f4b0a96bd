#!/usr/bin/env python
"""Fine-tune a GPT model on answers, labels or plain text.

One process: `python finetune.py FLAGS`. Several: `torchrun --nproc-per-node N finetune.py FLAGS`.
"""

from __future__ import annotations

import sys

from megalite.config.fields import finetuning_sections
from megalite.config.flags import build_parser

PROGRAM = "finetune.py"
DESCRIPTION = (
    "Fine-tune a GPT model. Run it with python (one process), torchrun or srun (several): finetune.py --load-hf DIR "
    "--sft-data FILE.jsonl --peft lora --save-adapter DIR --seq-length 512 --micro-batch-size 4 --train-iters 100 "
    "--lr 1e-4. See docs/finetuning.md."
)


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        parser = build_parser(PROGRAM, DESCRIPTION, finetuning_sections(), megatron=True)
        parser.parse_args(["--help"])  # answers before torch is imported
    from megalite.distributed.launch import Environment, run_worker

    def work(environment: Environment) -> None:
        from megalite.training.pretrain import train

        sections = finetuning_sections()
        train(sys.argv[1:], environment, program=PROGRAM, description=DESCRIPTION, sections=sections)

    run_worker(work)


if __name__ == "__main__":
    main()
