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
from megalite.models.gpt import GPTStage, units_of
from megalite.nn.module import named_specs
from megalite.optimizer.optimizer import Optimizer
from megalite.precision.policy import Precision
from tests.helpers import tiny_model
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
