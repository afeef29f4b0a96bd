"""States in few bits: AdamW with known rounding, the same in every layout, and right on average."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import OptimizerConfig, PrecisionConfig
from megalite.distributed import random
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage, plain_tokens, units_of
from megalite.nn.module import named_specs
from megalite.optimizer import lean
from megalite.optimizer.optimizer import Optimizer
from megalite.precision.policy import Precision
from tests.helpers import BF16, tiny_model
from tests.optimizer.test_gradient_norm import WIDE
from tests.optimizer.test_optimizer import STEPS, draw_gradients, take_step

MESH, SEED = single_process_mesh(), 11
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
MIXES = [  # main parameters, first and second moments
    ("fp32", "bf16", "bf16"),
    ("bf16", "bf16", "bf16"),
    ("fp16", "fp16", "fp16"),
    ("fp16", "fp8", "fp8"),
    ("bf16", "fp32", "fp8"),
]


def precision_of(mix: tuple[str, str, str], **fields: Any) -> Precision:
    names = dict(zip(("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), mix, strict=True))
    return Precision.from_config(PrecisionConfig(**names, **fields))


def optimizer_of(model: GPTStage, precision: Precision, **fields: Any) -> Optimizer:
    return Optimizer(units_of([model]), MESH, precision, OptimizerConfig(**fields), seed=SEED)


def state_of(optimizer: Optimizer) -> dict[str, Tensor]:
    return {name: piece.numbers(piece.flat).clone() for name, piece in optimizer.named_state()}


@functools.cache
def numbers_of(name: str, kind: str) -> Tensor:
    """All numbers of a format, ascending, in float64."""
    if name == "fp8" and kind == "exp_avg_sq":
        return torch.tensor([0.0, *(2.0 ** ((code - 255) / 8) for code in range(1, 256))], dtype=torch.float64)
    dtype = NARROW[name]
    codes = torch.arange(1 << 8 * dtype.itemsize).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    numbers = codes.view(dtype).to(torch.float64)
    return numbers[numbers.isfinite()].unique()


def round_by_definition(x: Tensor, name: str, kind: str, bits: Tensor) -> Tensor:
    """Each to one of the two numbers of the format around it, under the least power of two that fits the largest."""
    if name == "fp32":
        return x
    numbers, scale = numbers_of(name, kind), 1.0
    if name != "bf16" and x.any():
        scale = 2.0 ** math.ceil(math.log2(x.abs().max().item() / numbers[-1].item()))
    x = x / scale
    if kind == "exp_avg_sq":
        x = torch.where(x > 0, x.clamp(min=numbers[numbers > 0][0].item()), x)
    place = (torch.searchsorted(numbers, x, right=True) - 1).clamp(max=len(numbers) - 2)
    below, above = numbers[place], numbers[place + 1]
    up = (bits >> {"main": 0, "exp_avg": 17, "exp_avg_sq": 34}[kind] & (1 << 17) - 1) * 2.0**-17 * (above - below)
    return torch.where(up < x - below, above, below) * scale


def reference(model: GPTStage, mix: tuple[str, str, str], steps: int) -> Iterator[dict[str, Tensor]]:
    """Parameters and state in float64 after each step of AdamW on separate tensors."""
    formats = dict(zip(("main", "exp_avg", "exp_avg_sq"), mix, strict=True))
    main = {name: p.detach().double().flatten() for name, p, _ in named_specs(model)}
    treatments = {name: spec.treatment for name, _, spec in named_specs(model)}
    zeros = {name: torch.zeros_like(p) for name, p in main.items()}
    state = {"main": main, "exp_avg": dict(zeros), "exp_avg_sq": dict(zeros)}
    for name, p in main.items() if mix[0] == "fp16" else ():
        key = random.fold(random.fold(SEED, "update", name), 0)
        main[name] = round_by_definition(p, "fp16", "main", random.bits(key, torch.arange(len(p))))
    for step, (lr, decoupled, decay) in enumerate(STEPS[:steps], 1):
        for name, gradient in draw_gradients(model, step).items():
            g, treatment = gradient.flatten(), treatments[name]
            rate = decoupled if treatment.lr_group == "decoupled" else lr
            first = 0.9 * state["exp_avg"][name] + 0.1 * g
            second = 0.95 * state["exp_avg_sq"][name] + 0.05 * g * g
            p = main[name] * (1 - rate * decay * treatment.decays)
            p -= rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
            key = random.fold(random.fold(SEED, "update", name), step)
            bits = random.bits(key, torch.arange(len(g)))
            for kind, new in (("main", p), ("exp_avg", first), ("exp_avg_sq", second)):
                state[kind][name] = round_by_definition(new, formats[kind], kind, bits)
        yield {f"{kind}.{name}": each for kind, by_name in state.items() for name, each in by_name.items()}


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_an_update_is_adamws_rounded_as_the_formats_are_defined(mix: tuple[str, str, str]) -> None:
    precision = precision_of(mix, fp64=True)
    model = tiny_model(MESH, precision)
    optimizer = optimizer_of(model, precision, clip_grad=0.0, adam_beta2=0.95)
    for step, expected in enumerate(reference(model, mix, 4)):
        draw_gradients(model, step + 1, scale=8.0)
        take_step(optimizer, STEPS[step], loss_scale=8.0)
        held = state_of(optimizer)
        assert ({name.partition(".")[0] for name in held} == {"exp_avg", "exp_avg_sq"}) == (mix[0] != "fp16")
        held |= {f"main.{name}": p.detach().flatten() for name, p, _ in named_specs(model)}
        for name, numbers in held.items():
            assert torch.allclose(numbers.double(), expected[name], rtol=1e-11, atol=1e-15), (step, name)


def test_the_size_of_chunks_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (lean.CHUNK, 1000):
        monkeypatch.setattr(lean, "CHUNK", size)
        model = tiny_model(MESH, precision_of(("fp16", "fp8", "fp8"), bf16=True))
        optimizer = optimizer_of(model, precision_of(("fp16", "fp8", "fp8"), bf16=True))
        for step in range(2):
            draw_gradients(model, step)
            take_step(optimizer, STEPS[step])
        results.append(state_of(optimizer) | {name: p.detach() for name, p, _ in named_specs(model)})
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_a_second_moment_falls_at_its_rate_on_average(name: str) -> None:
    """Rounded to the nearest, 0.999 of a number in bf16 would be that number for ever."""
    precision = precision_of(("fp32", "fp32", name), bf16=True)
    model = tiny_model(MESH, precision, num_layers=1)
    optimizer = optimizer_of(model, precision, clip_grad=0.0, adam_beta2=0.999)
    draw_gradients(model, 0)
    take_step(optimizer, (0.0, 0.0, 0.0))
    before = torch.cat([v for kind, v in state_of(optimizer).items() if kind.startswith("exp_avg_sq")]).double()
    for _ in range(50):
        optimizer.begin_step(1)
        take_step(optimizer, (0.0, 0.0, 0.0))
    after = torch.cat([v for kind, v in state_of(optimizer).items() if kind.startswith("exp_avg_sq")]).double()
    spread = {"bf16": 2**-7, "fp16": 2**-10, "fp8": 2**-3}[name] * 0.5**0.5 * before.square().sum().sqrt()
    assert abs(after.sum() - 0.999**50 * before.sum()) < 3 * spread
    assert (after > 0).all()


def test_updates_far_below_the_spacing_of_bf16_add_up_on_average() -> None:
    """Steps of a 300th of the spacing below 1."""
    precision = precision_of(("bf16", "fp32", "fp32"), bf16=True)
    model = tiny_model(MESH, precision, num_layers=1, hidden_size=512, ffn_hidden_size=8, kv_channels=2, vocab_size=16)
    optimizer = optimizer_of(model, precision, clip_grad=0.0)
    weight = model.decoder.final_layernorm.weight  # type: ignore[union-attr]
    for _ in range(30):
        optimizer.begin_step(1)
        weight.gradient_sink.target().fill_(1.0)  # type: ignore[union-attr]
        take_step(optimizer, (2**-8 / 300, 0.0, 0.0))
    moved = 1.0 - weight.double()
    assert moved.mean().item() == pytest.approx(2**-8 / 10, rel=5 * (0.9 / 0.1 / 512) ** 0.5)
    assert set(moved.tolist()) <= {0.0, 2**-8, 2**-7}


def test_main_gradients_in_bf16_have_a_precise_norm() -> None:
    precision = Precision.from_config(PrecisionConfig(bf16=True, main_grads_dtype="bf16"))
    model = tiny_model(MESH, precision, **WIDE)
    optimizer = optimizer_of(model, precision)
    generator = torch.Generator().manual_seed(0)
    for bucket in optimizer.buckets:
        for slot in bucket.slots:
            slot.view(bucket.held_grads).normal_(generator=generator)
    gradients = torch.cat([bucket.held_grads for bucket in optimizer.buckets])
    assert gradients.dtype == torch.bfloat16
    norm = gradients.double().norm().item()
    assert optimizer.measure(4.0).grad_norm == pytest.approx(norm / 4, rel=2e-6)
    take_step(optimizer, STEPS[0])


def _last_losses(precision: Precision, steps: int = 60) -> float:
    """Mean loss of the last steps of learning how token ids go on, with a learning rate that falls to zero."""
    model = tiny_model(MESH, precision, num_layers=1)
    optimizer, losses = optimizer_of(model, precision), []
    starts = torch.randint(131, (steps, 8, 1), generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        text = (starts[step] + torch.arange(17) * (1 + step % 3)) % 131
        optimizer.begin_step(1)
        hidden = model(text[:, :-1], plain_tokens(text[:, :-1]))
        loss = model.loss(hidden, text[:, 1:], scale=1 / 128).total
        loss.backward()
        optimizer.backward_ended(0)
        optimizer.reduce_gradients()
        rate = 3e-3 * (1 - step / steps)
        take_step(optimizer, (rate, rate, 0.0))
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def test_without_wide_copies_training_is_as_good_only_if_rounding_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = _last_losses(BF16), precision_of(("bf16", "bf16", "bf16"), bf16=True)
    assert _last_losses(narrow) == pytest.approx(wide, rel=0.015)
    halves = sum(1 << 17 * kind + 16 for kind in range(3))  # half way up: to the nearest
    monkeypatch.setattr(random, "bits", lambda key, index: torch.full_like(index, halves))
    assert _last_losses(narrow) > 1.04 * wide
