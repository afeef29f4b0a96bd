"""Tensor parallelism against one process in float64: the loss and every parameter's gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.distributed import random
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.param_spec import ParamSpec
from megalite.distributed.pool import ProcessPool
from megalite.models.gpt import plain_tokens, units_of
from megalite.nn.module import named_specs
from megalite.optimizer.optimizer import Optimizer
from tests.helpers import FP64, LLAMA, assemble_gradients, tiny_model, tiny_tokens

Gradients = dict[str, tuple[ParamSpec, Tensor]]

NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 padded to 128": {"make_vocab_size_divisible_by": 128},
    "llama with two groups": LLAMA,
    "llama with one group, biases, norms of queries and keys": {
        **LLAMA,
        "num_query_groups": 1,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": False,
    },
    "llama, biases in the attention alone, longrope": {
        **LLAMA,
        "add_qkv_bias": True,
        "add_proj_bias": True,
        "position_embedding_type": "longrope",
        "rope_original_max_position_embeddings": 16,
        "longrope_short_factor": [1.0, 1.1, 1.5, 2.0],
        "longrope_long_factor": [1.5, 2.0, 3.5, 8.0],
    },
    "squared relu with every dropout": {"squared_relu": True, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "llama with every dropout": {**LLAMA, "hidden_dropout": 0.1, "attention_dropout": 0.1},
}


def loss_and_gradients(mesh: Mesh, overrides: dict[str, Any], main_grads: bool) -> tuple[float, Gradients]:
    """The mean loss of three samples and this rank's gradients, from `.grad` or from the optimizer's main gradients."""
    model = tiny_model(mesh, FP64, init_method_std=0.1, **overrides)
    if main_grads:
        Optimizer(units_of([model]), mesh, FP64, OptimizerConfig()).begin_step(1)
    text = tiny_tokens(3, 24)
    tokens, labels = text[:, :-1], text[:, 1:]
    info = replace(plain_tokens(tokens), dropout_keys=random.fold(7, torch.arange(3)))
    loss = model.loss(model(tokens, info), labels, scale=1 / labels.numel(), label_smoothing=0.1).total
    loss.backward()
    gradients: Gradients = {}
    for name, parameter, spec in named_specs(model):
        gradient = parameter.gradient_sink.target() if main_grads else parameter.grad  # type: ignore[attr-defined]
        gradients[name] = (spec, gradient.clone())
    return loss.item(), gradients


@pytest.mark.parametrize("main_grads", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("network", NETWORKS)
def test_loss_and_every_gradient_equal_one_process(pool: ProcessPool, network: str, tp: int, main_grads: bool) -> None:
    overrides = NETWORKS[network]
    loss, gradients = loss_and_gradients(single_process_mesh(), overrides, main_grads)
    results = pool.run(loss_and_gradients, tp, overrides, main_grads, layout=Layout(tp=tp))
    for rank_loss, _ in results:
        assert rank_loss == pytest.approx(loss, rel=1e-10)
    total = sum(gradient.square().sum().item() for _, gradient in gradients.values()) ** 0.5
    for name, (spec, gradient) in gradients.items():
        (box,) = spec.boxes
        expected = gradient[box.local_slices]
        parts = [(rank, *rank_gradients[name]) for rank, (_, rank_gradients) in enumerate(results)]
        scale = max(expected.abs().max().item(), 1e-6 * total)
        assert (assemble_gradients(parts) - expected).abs().max().item() <= 1e-10 * scale, name
