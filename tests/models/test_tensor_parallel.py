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
from megalite.models.gpt import plain_info, units_of
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


COUNTED = torch.arange(3 * 24).view(24, 3) % 5 == 1  # [s, b]


def counted_loss_and_gradients(mesh: Mesh, overrides: dict[str, Any], chosen: bool) -> tuple[float, Gradients]:
    """The summed loss of the counted tokens, chosen before the output layer or after, and this rank's gradients."""
    model = tiny_model(mesh, FP64, init_method_std=0.1, **overrides)
    text = tiny_tokens(3, 24)
    tokens, labels = text[:, :-1], text[:, 1:]
    info = plain_info(tokens)
    if mesh.layout.sequence_parallel:
        info = replace(info, group=mesh.tp)
    hidden = model(tokens, info)
    if chosen:
        losses = model.token_losses(hidden, labels, counted=COUNTED.flatten().nonzero().flatten())
    else:
        losses = model.token_losses(hidden, labels)[COUNTED]
    losses.sum().backward()
    return losses.sum().item(), {name: (spec, p.grad) for name, p, spec in named_specs(model) if p.grad is not None}


def loss_and_gradients(mesh: Mesh, overrides: dict[str, Any], main_grads: bool) -> tuple[float, Gradients]:
    """The mean loss of three samples and this rank's gradients, from `.grad` or from the optimizer's main gradients."""
    model = tiny_model(mesh, FP64, init_method_std=0.1, **overrides)
    if main_grads:
        Optimizer(units_of([model]), mesh, FP64, OptimizerConfig()).begin_step(1)
    text = tiny_tokens(3, 24)
    tokens, labels = text[:, :-1], text[:, 1:]
    info = replace(plain_info(tokens), dropout_keys=random.fold(7, torch.arange(3)))
    loss = model.token_losses(model(tokens, info), labels, label_smoothing=0.1).mean()
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


@pytest.mark.parametrize("parallel", [False, True], ids=["tensor parallel", "sequence parallel"])
@pytest.mark.parametrize("network", ["gpt2 padded to 128", "llama with two groups"])
def test_an_output_layer_for_counted_tokens_alone_equals_one_for_all(
    pool: ProcessPool, network: str, parallel: bool
) -> None:
    overrides = NETWORKS[network]
    loss, gradients = counted_loss_and_gradients(single_process_mesh(), overrides, False)
    layout = Layout(tp=2, sequence_parallel=parallel)
    results = pool.run(counted_loss_and_gradients, 2, overrides, True, layout=layout)
    for rank_loss, _ in results:
        assert rank_loss == pytest.approx(loss, rel=1e-12)
    for name, (spec, gradient) in gradients.items():
        (box,) = spec.boxes
        parts = [(rank, *rank_gradients[name]) for rank, (_, rank_gradients) in enumerate(results)]
        expected = gradient[box.local_slices]
        assert torch.allclose(assemble_gradients(parts), expected, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("network", ["gpt2", "llama with two groups"])
def test_copies_on_all_ranks_have_equal_gradients_unless_they_hold_parts(pool: ProcessPool, network: str) -> None:
    results = pool.run(loss_and_gradients, 4, NETWORKS[network], False, layout=Layout(tp=4))
    for name, (spec, _) in results[0][1].items():
        whole = len(spec.boxes) == 1 and spec.boxes[0].shape == spec.shape
        if whole and not spec.boxes[0].sum_over:
            gradients = [rank_gradients[name][1] for _, rank_gradients in results]
            assert all(torch.allclose(g, gradients[0], rtol=1e-12, atol=1e-15) for g in gradients), name
