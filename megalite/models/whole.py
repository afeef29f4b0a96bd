"""A model that one process owns whole, as its configuration describes it: for conversion, comparison and generation."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from megalite.config.schema import RunConfig
from megalite.distributed.mesh import Mesh
from megalite.models.gpt import GPTStage, plain_tokens
from megalite.models.stages import whole_model
from megalite.nn.attention_backend import choose_backend
from megalite.nn.module import Build
from megalite.precision.policy import Precision


def build_whole(config: RunConfig, vocab_size: int, mesh: Mesh) -> GPTStage:
    """The whole model of a resolved configuration on the mesh's device, in evaluation, its weights still undefined.

    With `--class-names` a classifier.
    """
    # No text may depend on the others, so none of its tokens is dropped.
    network = replace(config.model, moe_expert_capacity_factor=None)
    build = Build(network, mesh, Precision.from_config(config.precision))
    backend = choose_backend(config, mesh.device.type)
    classes = len(config.finetune.class_names or ()) or None
    return GPTStage(build, vocab_size, whole_model(config.model.num_layers), backend, classes).eval()


def outputs(model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits [b, s, vocabulary] of a whole model for `tokens` [b, s], or a classifier's scores [b, s, classes].

    `positions` int64 [s]: of the tokens; None: from 0 on.
    """
    assert isinstance(model, GPTStage)
    head = model.logits if model.classifier is None else model.classifier
    info = plain_tokens(tokens)
    if positions is not None:
        info = replace(info, positions=positions[None])
    result: Tensor = head(model(tokens, info))
    return result.transpose(0, 1)
