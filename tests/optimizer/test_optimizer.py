"""The flat optimizer against torch's on separate tensors, and main parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.config.schema import OptimizerConfig
from megalite.distributed import random
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.models.gpt import GPTStage, plain_tokens, units_of
from megalite.nn.module import named_specs
from megalite.optimizer.optimizer import Optimizer
from megalite.precision.policy import Precision
from megalite.precision.states import WIDE, StateNames
from tests.helpers import BF16, FP16, FP32, FP64, tiny_model, tiny_tokens

MESH = single_process_mesh()
STEPS = [(1e-3, 5e-4, 0.1), (2e-3, 1e-3, 0.1), (1e-3, 1e-4, 0.05), (0.0, 1e-3, 0.3), (5e-4, 5e-4, 0.0)]
"""(learning rate, decoupled learning rate, weight decay) of some steps."""


def optimizer_of(model: GPTStage, precision: Precision = FP64, mesh: Mesh = MESH, **fields: Any) -> Optimizer:
    return Optimizer(units_of([model]), mesh, precision, OptimizerConfig(**fields))


def draw_gradients(model: GPTStage, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Fill the main gradients; the same numbers in float64, unscaled."""
    gradients = {}
    for name, parameter, spec in named_specs(model):
        gradient = torch.zeros(spec.local_shape, dtype=torch.float64)
        random.fill_normal(gradient, random.fold(step, name), 1.0, spec.shape, (0,) * len(spec.shape))
        parameter.gradient_sink.target().copy_(gradient * scale)  # type: ignore[attr-defined]
        gradients[name] = gradient
    return gradients


def take_step(optimizer: Optimizer, rates: tuple[float, float, float], loss_scale: float = 1.0) -> float:
    result = optimizer.measure(loss_scale)
    assert result.finite
    lr, decoupled, decay = rates
    optimizer.step(result, lr=lr, decoupled_lr=decoupled, weight_decay=decay, loss_scale=loss_scale)
    return result.grad_norm


def reference(model: GPTStage, kind: str, clip: float, steps: int, **options: Any) -> dict[str, Tensor]:
    """Parameters after some steps of torch's single-tensor optimizer on separate float64 copies."""
    copies = {name: nn.Parameter(p.detach().double().clone()) for name, p, _ in named_specs(model)}
    groups = []
    for name, _, spec in named_specs(model):
        groups.append({"params": [copies[name]], "treatment": spec.treatment})
    make = torch.optim.AdamW if kind == "adam" else torch.optim.SGD
    optimizer = make(groups, lr=0.1, foreach=False, **options)
    for step in range(steps):
        for name, gradient in draw_gradients(model, step).items():
            copies[name].grad = gradient
        if clip:
            nn.utils.clip_grad_norm_(copies.values(), clip)
        lr, decoupled, decay = STEPS[step]
        for group in optimizer.param_groups:
            group["lr"] = decoupled if group["treatment"].lr_group == "decoupled" else lr
            group["weight_decay"] = decay if group["treatment"].decays else 0.0
        optimizer.step()
    return {name: parameter.detach() for name, parameter in copies.items()}


ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-6}
CASES = [
    *(("adam", ADAM, clip, FP64, 1e-12) for clip in (0.0, 1.0)),
    *(("adam", ADAM, clip, FP32, 2e-6) for clip in (1.0, 1e6)),
    *(("sgd", {"momentum": momentum}, 1.0, FP64, 1e-12) for momentum in (0.9, 0.0)),
]


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
@pytest.mark.parametrize(("kind", "options", "clip", "precision", "tolerance"), CASES)
def test_flat_updates_equal_torchs_on_separate_tensors(
    kind: str, options: dict[str, Any], clip: float, precision: Precision, tolerance: float, loss_scale: float
) -> None:
    model = tiny_model(MESH, precision)
    momentum = options.get("momentum", 0.9)
    fields = {"optimizer": kind, "sgd_momentum": momentum, "adam_beta2": 0.95, "adam_eps": 1e-6}
    optimizer = optimizer_of(model, precision, clip_grad=clip, **fields)
    expected = reference(model, kind, clip, len(STEPS), **options)
    for step, rates in enumerate(STEPS):
        gradients = draw_gradients(model, step, loss_scale)
        norm = take_step(optimizer, rates, loss_scale)
        unscaled = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        assert norm == pytest.approx(unscaled, rel=1e-7 if precision is FP32 else 1e-14), "before clipping"
    for name, parameter, _ in named_specs(model):
        assert (parameter.double() - expected[name]).abs().max() < tolerance, name


def test_outside_fp64_the_norm_is_rounded_once_to_fp32() -> None:
    model = tiny_model(MESH, FP32)
    optimizer = optimizer_of(model, FP32)
    draw_gradients(model, 0)
    norm = optimizer.measure(1.0).grad_norm
    exact = sum(p.gradient_sink.target().double().square().sum() for _, p, _ in named_specs(model)) ** 0.5  # type: ignore[attr-defined]
    assert norm == exact.to(torch.float32).item()


@pytest.mark.parametrize("precision", [BF16, FP16], ids=["bf16", "fp16"])
def test_updates_too_small_for_half_precision_add_up_in_the_main_parameters(precision: Precision) -> None:
    """Steps of a 21st of the unit in the last place below 1: the rounded parameter moves at the eleventh."""
    model = tiny_model(MESH, precision)
    optimizer = optimizer_of(model, precision, optimizer="sgd", sgd_momentum=0.0, clip_grad=0.0)
    weight = model.decoder.final_layernorm.weight  # type: ignore[union-attr]
    unit = torch.finfo(precision.compute).eps / 2
    for step in range(20):
        optimizer.begin_step(1)
        weight.gradient_sink.target().fill_(1.0)  # type: ignore[union-attr]
        take_step(optimizer, (unit / 21, 0.0, 0.0))
        assert (weight == 1.0).all() == (step < 10)
    for segment in optimizer.segments:
        assert torch.equal(segment.parameters, segment.main.to(precision.compute))


def copy_values(source: GPTStage, target: GPTStage) -> None:
    with torch.no_grad():
        for (_, theirs, _), (_, ours, _) in zip(named_specs(source), named_specs(target), strict=True):
            ours.copy_(theirs)


def assert_equal(a: GPTStage, b: GPTStage) -> None:
    for (name, ours, _), (_, theirs, _) in zip(named_specs(a), named_specs(b), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    "states", [WIDE, StateNames(main_params="fp16", exp_avg="bf16", exp_avg_sq="fp8")], ids=["wide", "lean"]
)
def test_weights_changed_from_outside_survive_a_step_with_rate_zero_once_the_main_parameters_know(
    states: StateNames,
) -> None:
    precision = replace(BF16, states=states)
    model, other = tiny_model(MESH, precision), tiny_model(MESH, precision, seed=5)
    optimizer = optimizer_of(model, precision)
    copy_values(other, model)
    optimizer.parameters_loaded(with_state=False)
    draw_gradients(model, 0)
    take_step(optimizer, (0.0, 0.0, 0.1))
    assert_equal(model, other)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("precision", [FP64, BF16], ids=["fp64", "bf16"])
def test_restored_state_and_steps_continue_bit_by_bit(kind: str, precision: Precision) -> None:
    straight = tiny_model(MESH, precision)
    optimizer = optimizer_of(straight, precision, optimizer=kind)
    for step in range(3):
        draw_gradients(straight, step)
        take_step(optimizer, STEPS[step])
    state = {name: piece.flat.clone() for name, piece in optimizer.named_state()}
    resumed = tiny_model(MESH, precision, seed=9)
    copy_values(straight, resumed)
    second = optimizer_of(resumed, precision, optimizer=kind)
    for name, piece in second.named_state():
        piece.flat.copy_(state.pop(name))
    assert not state
    second.parameters_loaded(with_state=True)
    second.set_steps(optimizer.steps)
    assert second.steps == optimizer.steps == 3
    for step in (3, 4):
        for model, each in ((straight, optimizer), (resumed, second)):
            draw_gradients(model, step)
            take_step(each, STEPS[step])
    assert_equal(straight, resumed)


def test_state_exists_before_the_first_step() -> None:
    optimizer = optimizer_of(tiny_model(MESH, BF16), BF16)
    kinds = {name.partition(".")[0] for name, _ in optimizer.named_state()}
    assert kinds == {"exp_avg", "exp_avg_sq", "main"}
    assert optimizer.steps == 0
    for name, piece in optimizer.named_state():
        assert piece.flat.numel() == math.prod(piece.spec.local_shape)
        assert piece.flat.dtype == torch.float32
        assert name.startswith("main") or (piece.flat == 0).all()


def test_zero_grad_clears_and_padding_never_moves() -> None:
    model = tiny_model(MESH, FP64, make_vocab_size_divisible_by=128)
    optimizer = optimizer_of(model)
    for seed in range(3):
        optimizer.begin_step(1)
        assert all((bucket.held_grads == 0).all() for bucket in optimizer.buckets)
        text = tiny_tokens(2, 16, seed=seed)
        model.loss(model(text[:, :-1], plain_tokens(text[:, :-1])), text[:, 1:]).total.backward()
        take_step(optimizer, STEPS[0])
    assert (model.output_weight[131:] == 0).all()


@pytest.mark.parametrize("states", [WIDE, StateNames(exp_avg="fp8")], ids=["wide", "lean"])
def test_a_rank_without_trainable_parameters_takes_part(states: StateNames) -> None:
    model = tiny_model(MESH, FP64)
    model.requires_grad_(False)
    optimizer = optimizer_of(model, replace(FP64, states=states))
    optimizer.begin_step(1)
    optimizer.reduce_gradients()
    assert take_step(optimizer, STEPS[0], loss_scale=2.0) == 0.0
    optimizer.set_steps(4)
    assert optimizer.steps == 4
    assert list(optimizer.named_state()) == []


@pytest.mark.cuda
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_training_step_on_cuda_equals_one_on_the_cpu(dropout: float) -> None:
    """In fp32 with plain attention; dropout is a function of place, so it is the same there."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    overrides = {"hidden_dropout": dropout, "attention_dropout": dropout, "attention_backend": "unfused"}
    results = []
    try:
        for device in ("cpu", "cuda"):
            mesh = single_process_mesh(device)
            model = tiny_model(mesh, FP32, **overrides)
            optimizer = optimizer_of(model, FP32, mesh)
            text = tiny_tokens(4, 32).to(device)
            keys = random.fold(7, torch.arange(4)).to(device)
            info = replace(plain_tokens(text[:, :-1]), dropout_keys=keys)
            loss = model.loss(model(text[:, :-1], info), text[:, 1:], scale=1 / 128).total
            loss.backward()
            norm = take_step(optimizer, STEPS[0])
            results.append((loss.item(), norm, {n: p.detach().cpu() for n, p, _ in named_specs(model)}))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    (cpu_loss, cpu_norm, cpu_values), (cuda_loss, cuda_norm, cuda_values) = results
    assert cuda_loss == pytest.approx(cpu_loss, rel=1e-5)
    assert cuda_norm == pytest.approx(cpu_norm, rel=1e-4)
    # Adam's first update is about the sign of a gradient: where that is rounding noise it may differ by two rates.
    for name, value in cpu_values.items():
        difference = (cuda_values[name] - value).abs()
        assert difference.max() <= 2.1e-3, name
        assert difference.mean() <= 2e-5, name
