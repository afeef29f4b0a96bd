"""Tiny checkpoints as training leaves them, for tests of generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.checkpoint.checkpoint import save_checkpoint
from megalite.checkpoint.storage import Retention
from megalite.config.schema import PrecisionConfig, RunConfig, TokenizerConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage
from megalite.nn.module import named_specs
from megalite.precision.policy import Precision
from tests.helpers import pieces_of, tiny_model

NULL = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=130)  # 131 ids with its EOD, 130


def save_tiny(
    root: Path,
    *,
    iteration: int = 10,
    precision: PrecisionConfig | None = None,
    tokenizer: TokenizerConfig = NULL,
    vocab_size: int = 131,
    **network: Any,
) -> GPTStage:
    """A checkpoint of an untrained model in `root`, with optimizer state beside the weights; the model."""
    config = RunConfig(precision=precision or PrecisionConfig(), tokenizer=tokenizer)
    mesh, policy = single_process_mesh(), Precision.from_config(config.precision)
    values: dict[str, Any] = {"init_method_std": 0.4, **network}
    model = tiny_model(mesh, policy, vocab_size=vocab_size, seed=iteration, **values)
    config.model = model.config
    config.model.attention_dropout = config.model.hidden_dropout = 0.1
    weights = [(name, parameter.detach(), spec) for name, parameter, spec in named_specs(model)]
    tensors = [(f"model.{name}", tensor, spec) for name, tensor, spec in weights]
    tensors += [(f"optimizer.exp_avg.{name}", tensor.to(policy.wide), spec) for name, tensor, spec in weights]
    state: dict[str, Any] = {"training": {"iteration": iteration}}
    kwargs: dict[str, Any] = {"config": config, "training_state": state, "retain": Retention()}
    save_checkpoint(root, iteration, mesh=mesh, pieces=pieces_of(tensors), **kwargs)
    return model
