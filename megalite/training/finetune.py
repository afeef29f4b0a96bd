"""Fine-tuning: from flags to a finished run."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.config.fields import section_names
from megalite.distributed.launch import Environment
from megalite.training.pretrain import train


def finetune(argv: Sequence[str], environment: Environment, *, program: str, description: str) -> None:
    """The whole run of one process: pretraining's, with the flags of fine-tuning beside its own."""
    train(argv, environment, program=program, description=description, sections=section_names())
