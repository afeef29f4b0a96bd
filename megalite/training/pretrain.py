"""Pretraining: from flags to a finished run."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.distributed.launch import Environment, start
from megalite.training.determinism import deterministic
from megalite.training.outputs import owned_outputs
from megalite.training.prepare import prepare
from megalite.training.run import Run


def pretrain(argv: Sequence[str], environment: Environment, *, program: str, description: str) -> None:
    """The whole run of one process."""
    train(argv, environment, program=program, description=description)


def train(
    argv: Sequence[str],
    environment: Environment,
    *,
    program: str,
    description: str,
    sections: Sequence[str] | None = None,
) -> None:
    """As `pretrain`, with the flags of some sections of the configuration; None: of pretraining's."""
    prepared = prepare(argv, environment, program=program, description=description, sections=sections)
    with (
        deterministic(prepared.config.training.deterministic_mode),
        start(prepared.config.layout, environment, prepared.device) as mesh,
        owned_outputs(prepared.config, mesh),
    ):
        run = Run(prepared, mesh)
        run.loop().run()
        run.save_adapter()
        run.close()
