"""What the products of linear layers get and keep in eight bits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.schema import PrecisionConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.precision.backends import Emulated
from megalite.precision.fp8 import ROLES, Fp8, Fp8Products, Fp8Scaling
from megalite.precision.scaling import RECIPES
from megalite.verify.configs import resolved
from megalite.verify.layouts import Variant
from megalite.verify.trace import trace
from tests.peft.runs import run_of
from tests.verify.networks import network

DOUBLE = torch.float64
ONE = torch.tensor(1.0, dtype=DOUBLE)
GRIDS = {  # every magnitude of E5M2 and E4M3, by their definition; the coarser first
    57344.0: [m / 4 * 2.0**-14 for m in range(4)] + [(1 + m / 4) * 2.0**e for e in range(-14, 16) for m in range(4)],
    448.0: [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1],
}


def _on_grid(x: Tensor) -> float | None:
    """The largest number of the format on whose grid `x` lies with some scale; None: on neither."""
    for largest, grid in GRIDS.items():
        numbers = torch.tensor(grid, dtype=DOUBLE)
        for number in reversed(grid[-40:]):  # that the largest magnitude may be: a rank's part may lack the largest
            magnitudes = x.abs().flatten() / x.abs().max() * number
            above = torch.searchsorted(numbers, magnitudes).clamp(1, len(numbers) - 1)
            distance = torch.minimum((numbers[above] - magnitudes).abs(), (numbers[above - 1] - magnitudes).abs())
            if (distance <= 1e-12 * magnitudes).all():
                return largest
    return None


def _on_grid_by_blocks(x: Tensor, block: int) -> float | None:
    """As `_on_grid`, where each `block` numbers of a row have a power of two as their scale."""
    blocks = F.pad(x, (0, -x.shape[1] % block)).view(len(x), -1, block).abs()
    top = blocks.amax(dim=-1, keepdim=True).clamp_min(1e-300)
    for largest, grid in GRIDS.items():
        scales = torch.exp2((top / largest).log2().ceil())
        if torch.isin(blocks / scales, torch.tensor(grid, dtype=DOUBLE)).all():
            return largest
    return None


class _Watch(TorchDispatchMode):
    """Notes on which grids both factors of each matrix product lie, but for those of the vocabulary."""

    def __init__(self, block: int | None) -> None:
        super().__init__()
        self.on_grid = _on_grid if block is None else partial(_on_grid_by_blocks, block=block)
        self.seen: list[tuple[float | None, float | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = args[-2:]
            if not {131, 66, 65} & {*a.shape, *b.shape}:  # the vocabulary's columns, on one rank and on two
                self.seen.append((self.on_grid(a), self.on_grid(b.t())))
        return func(*args, **(kwargs or {}))


def _watched(
    mesh: Mesh, values: dict[str, dict[str, Any]], block: int | None
) -> list[tuple[float | None, float | None]]:
    with _Watch(block) as watch:
        trace(mesh, values, 1)
    return watch.seen


@pytest.mark.parametrize(
    ("recipe", "block", "variant"),
    [
        ("tensorwise", None, Variant()),
        ("tensorwise", None, Variant(tp=2, sequence_parallel=True)),
        ("mxfp8", 32, Variant(tp=2, sequence_parallel=True)),
        ("blockwise", 128, Variant()),
    ],
)
def test_both_factors_of_every_product_lie_on_the_grid(
    pool: ProcessPool, recipe: str, block: int | None, variant: Variant
) -> None:
    precision = PrecisionConfig(fp8_format="hybrid", fp8_recipe=recipe)
    config = resolved(variant.apply(network(variant, tied=False, precision=precision)), variant.processes)
    layout = Layout.from_config(config.layout, variant.processes)
    for seen in pool.run(_watched, variant.processes, config.to_dict(), block, layout=layout):
        count = 2 * 2 * 4  # microbatches, layers, linear layers in one
        assert seen.count((448.0, 448.0)) == count
        assert seen.count((57344.0, 448.0)) == 2 * count
        assert len(seen) == 3 * count


def fp8(recipe: str, **fields: Any) -> Fp8:
    config = PrecisionConfig(fp8_format="hybrid", fp8_recipe=recipe, fp8_backend="emulated", **fields)
    made = Fp8.from_config(config, torch.device("cpu"))
    assert made is not None
    return made


def products(recipe: str, **fields: Any) -> Fp8Products:
    mesh = single_process_mesh()
    return Fp8Products(fp8(recipe, **fields), DOUBLE, mesh, ())


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_near_the_exact_ones_and_what_is_kept_gives_the_same(recipe: str) -> None:
    ours = products(recipe)
    x, weight, grad = torch.randn(3, 50, 70, dtype=DOUBLE), torch.randn(90, 70, dtype=DOUBLE), torch.randn(3, 50, 90)
    grad = grad.to(DOUBLE)
    a, g = ours.factor("input", x), ours.factor("gradient", grad)
    for got, exact in (
        (ours.output(a, weight), x @ weight.t()),
        (ours.input_gradient(g, weight), grad @ weight),
        (ours.weight_gradient(g, a), grad.flatten(0, 1).t() @ x.flatten(0, 1)),
    ):
        assert got.shape == exact.shape
        error = (got - exact).norm() / exact.norm()
        assert 1e-3 < error < 0.1
    restored = ours.restore("input", *ours.keep(a, x))
    assert torch.equal(ours.weight_gradient(g, restored), ours.weight_gradient(g, a))
    kept = ours.keep(a, x)[0]
    assert kept.element_size() == (1 if ours.fp8.recipe.block is None else 8)


def test_a_delayed_scale_is_that_of_the_history_and_constant_within_a_step() -> None:
    ours = products("delayed", fp8_amax_history_len=2, fp8_amax_compute_algo="max", fp8_margin=1)
    scaling = Fp8Scaling({"layer.weight": ours}, single_process_mesh())

    def scale(largest: float) -> float:
        return ours.factor("input", torch.tensor([[largest, 1.0]], dtype=DOUBLE)).over_columns.scale.item()

    assert scale(3.0) == 3.0 / 448  # nothing is known yet
    for largest, known in ((7.0, None), (5.0, 7.0), (2.0, 7.0), (1.0, 5.0), (1.0, 2.0)):
        scaling.begin_step(ONE)
        for each in (1.0, largest):
            if known is not None:
                assert scale(each) == known * 2 / 448
            else:
                scale(each)
        scaling.end_step()
    assert ours.history.shape == (len(ROLES), 2)


def test_a_delayed_scale_of_gradients_follows_what_the_loss_is_multiplied_by() -> None:
    """The tokens of a batch and the loss scale change from step to step."""
    ours = products("delayed")
    scaling = Fp8Scaling({"layer.weight": ours}, single_process_mesh())
    for tokens, loss_scale in ((100, 1.0), (25, 1.0), (25, 2.0)):
        grad = torch.full((2, 3), 5.0 * loss_scale / tokens, dtype=DOUBLE)
        scaling.begin_step(loss_scale * ONE / tokens)
        assert ours.factor("gradient", grad).over_columns.scale.item() == pytest.approx(grad.max() / 57344.0)
        scaling.end_step()


def test_an_evaluation_between_two_steps_leaves_nothing_in_the_history() -> None:
    ours = products("delayed", fp8_amax_history_len=2)
    scaling = Fp8Scaling({"layer.weight": ours}, single_process_mesh())
    weight = torch.full((2, 3), 5.0, dtype=DOUBLE)

    def forward(largest: float) -> None:
        ours.output(ours.factor("input", torch.full((4, 3), largest, dtype=DOUBLE)), weight)

    forward(9.0)
    scaling.begin_step(ONE)
    forward(2.0)  # with the weight as the evaluation quantised it
    scaling.end_step()
    assert ours.history[:, 0].tolist() == [2.0, 5.0, 0.0]
    scaling.begin_step(ONE)
    forward(3.0)  # a step that is skipped
    scaling.begin_step(ONE)
    forward(1.0)
    scaling.end_step()
    assert ours.history.tolist() == [[1.0, 2.0], [5.0, 5.0], [0.0, 0.0]]


def test_a_step_without_gradients_doesnt_round_the_next_ones_to_zero() -> None:
    ours = products("delayed")
    for amax in (3e-6, 0.0):
        ours.append(torch.tensor([1.0, 1.0, amax], dtype=DOUBLE))
    grad = torch.full((2, 3), 2e-6, dtype=DOUBLE)
    assert ours.factor("gradient", grad).over_columns.dequantize().allclose(grad, rtol=0.13, atol=0.0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_infinity_isnt_hidden_by_the_cast(recipe: str, bad: float) -> None:
    ours = products(recipe)
    if recipe == "delayed":
        ours.append(torch.ones(3, dtype=DOUBLE))
    x = torch.ones(4, 8, dtype=DOUBLE)
    x[1, 2] = bad
    assert not ours.output(ours.factor("input", x), torch.ones(5, 8, dtype=DOUBLE)).isfinite().all()


def test_a_weight_is_quantised_once_until_it_changes() -> None:
    ours = products("blockwise")
    weight, x = torch.randn(16, 8, dtype=DOUBLE), torch.randn(4, 8, dtype=DOUBLE)
    first = ours.output(ours.factor("input", x), weight)
    weight.mul_(-1)
    assert torch.equal(ours.output(ours.factor("input", x), weight), first)
    ours.forget_weight()
    assert torch.equal(ours.output(ours.factor("input", x), weight), -first)


def test_edges_of_the_model_stay_in_the_compute_dtype() -> None:
    at = fp8("tensorwise", first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    assert [at.covers(layer, 5) for layer in range(5)] == [False, False, True, True, False]
    assert isinstance(at.backend, Emulated)


def _statistics(mesh: Mesh, values: dict[str, dict[str, Any]]) -> dict[str, float]:
    run = run_of(mesh, values)
    run.trainer.step()
    told = run.trainer.step().fp8
    run.close()
    assert told is not None
    return dict(told)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "delayed"])
def test_statistics_are_those_of_one_process(pool: ProcessPool, recipe: str) -> None:
    """Those of a weight too, though it is quantised once, and before the step."""
    precision = PrecisionConfig(fp8_format="hybrid", fp8_recipe=recipe, fp8_param_gather=recipe == "delayed")
    variant = Variant(tp=2, pp=2, sequence_parallel=True, schedule="1f1b", dp=1)
    told = []
    for each in (Variant(dp=2, sharding="optim"), variant):
        config = each.apply(network(variant, tied=False, precision=precision))
        config.logging.log_fp8_stats = True
        if each is variant:
            config.precision.fp8_param_gather = False
        config = resolved(config, each.processes)
        layout = Layout.from_config(config.layout, each.processes)
        told.append(pool.run(_statistics, each.processes, config.to_dict(), layout=layout)[0])
    assert len(told[0]) == 2 * 4 * 3 * 4  # layers, linear layers, factors, measures
    assert told[0] == pytest.approx(told[1], rel=1e-10, abs=0.01)  # a gradient may be 0 in one layout, 1e-20 in another
    assert told[0]["decoder.layers.0.self_attention.linear_qkv/gradient/underflow"] > 0
    assert told[0]["decoder.layers.1.mlp.linear_fc2/weight/amax"] > 0
    saturates = {"tensorwise": False, "mxfp8": True, "delayed": True}[recipe]
    assert any(value > 0 for name, value in told[0].items() if name.endswith("saturated")) == saturates
