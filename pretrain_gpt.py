#!/usr/bin/env python
"""Pretrain a GPT model.

One process: `python pretrain_gpt.py FLAGS`. Several: `torchrun --nproc-per-node N pretrain_gpt.py FLAGS`.
"""

from __future__ import annotations

import sys

from megalite.config.flags import build_parser

PROGRAM = "pretrain_gpt.py"
DESCRIPTION = "Pretrain a GPT model. Run it with python (one process), torchrun or srun (several)."


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        build_parser(PROGRAM, DESCRIPTION).parse_args(["--help"])  # answers before torch is imported
    from megalite.distributed.launch import Environment, run_worker

    def work(environment: Environment) -> None:
        from megalite.training.pretrain import train

        train(sys.argv[1:], environment, program=PROGRAM, description=DESCRIPTION)

    run_worker(work)


if __name__ == "__main__":
    main()
