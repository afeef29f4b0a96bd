"""What a proof does without is told."""

from __future__ import annotations

import pytest

from megalite.config.fields import get
from megalite.config.schema import RunConfig
from megalite.verify.configs import for_proof
from megalite.verify.replace import unused_note


@pytest.mark.parametrize(
    ("flag", "path", "value"),
    [
        ("--save-adapter a", "peft.save_adapter", "a"),
        ("--save-best-adapter b", "peft.save_best_adapter", "b"),
        ("--eval-prompt Hello", "finetune.eval_prompt", ["Hello"]),
        ("--train-epochs 3", "finetune.train_epochs", 3),
        ("--save c", "checkpoint.save", "c"),
    ],
)
def test_a_flag_that_a_proof_does_not_use_is_named(flag: str, path: str, value: object) -> None:
    config = RunConfig()
    room, name = path.split(".")
    setattr(getattr(config, room), name, value)
    proof = for_proof(config, 2)
    assert get(proof, path) is None
    (note,) = unused_note(config, proof)
    assert note.startswith(f"{flag}: not used")
