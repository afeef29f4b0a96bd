"""Scales that make a matrix fit a narrow number format: which numbers share one, and how it follows from them.

Key idea: a recipe is data: the shape of the blocks that share a scale and the rule from a block's largest magnitude
(*amax*) to its scale. The functions here know no layer and no rank; they work in the dtype of the scales, which is
wide, so a proof in float64 runs the same code.

Delayed and current scaling: Micikevicius et al. 2022, section 4. Blocks of 1 x 128 and 128 x 128: DeepSeek-AI 2024
(DeepSeek-V3), section 3.3. Blocks of 32 with E8M0 scales: Open Compute Project, Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.precision.formats import FloatFormat, cast, exponent, power_of_two

Block = tuple[int, int]


def fit(amax: Tensor, target: FloatFormat) -> Tensor:
    """The scale with which `amax` becomes the format's largest number."""
    return (amax / target.largest).clamp(min=torch.finfo(amax.dtype).tiny)


def fit_power_of_two(amax: Tensor, target: FloatFormat) -> Tensor:
    """The smallest power of two with which `amax` is in range."""
    mantissa, above = torch.frexp(fit(amax, target))
    return power_of_two(above - (mantissa == 0.5).to(above.dtype), amax)


def shared_exponent(amax: Tensor, target: FloatFormat) -> Tensor:
    """The E8M0 scale of MX: the power of two of `amax` divided by that of the largest number. Where `amax` has a larger
    mantissa than this number, it is out of range and the cast saturates."""
    largest = math.frexp(target.largest)[1] - 1
    return power_of_two((exponent(amax) - largest).clamp(-127, 127), amax)


@dataclass(frozen=True)
class Recipe:
    """`rule`: from amax to scale. `block`: the numbers of an input or gradient that share a scale, as rows and as
    columns, over which a product sums; `weight_block`: those of a weight. None: the whole tensor. `delayed`: amax is
    that of earlier steps."""

    name: str
    rule: Callable[[Tensor, FloatFormat], Tensor]
    block: Block | None = None
    weight_block: Block | None = None
    delayed: bool = False


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("delayed", fit, delayed=True),
        Recipe("tensorwise", fit),
        Recipe("blockwise", fit_power_of_two, (1, 128), (128, 128)),
        Recipe("mxfp8", shared_exponent, (1, 32), (1, 32)),
    )
}
"""By the name in --fp8-recipe."""


@dataclass(frozen=True)
class Quantized:
    """A matrix in a narrow format: `data` [m, k] times `scale`, wide [blocks of m, blocks of k]. The blocks at the end
    may be smaller."""

    data: Tensor
    scale: Tensor
    block: Block

    def dequantize(self) -> Tensor:
        """Wide [m, k]."""
        return self.data.to(self.scale.dtype) * self.scales()

    def scales(self) -> Tensor:
        """The scale of each element, wide [m, k], or one for all."""
        return _spread(self.scale, self.block, self.data.shape)

    def transposed(self) -> Quantized:
        rows, columns = self.block
        return Quantized(self.data.t().contiguous(), self.scale.t(), (columns, rows))


def amax_of(x: Tensor, wide: torch.dtype) -> Tensor:
    """The largest magnitude in `x`, wide []; infinite where a number is infinite or none, also after a maximum over
    ranks, which may lose a NaN."""
    return torch.linalg.vector_norm(x, math.inf, dtype=wide).nan_to_num(nan=math.inf, posinf=math.inf)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """`amax_of` of each block of `x` [m, k]: [blocks of m, blocks of k]."""
    (m, k), (rows, columns) = x.shape, block
    padded = F.pad(x.abs(), (0, -k % columns, 0, -m % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amax((1, 3)).nan_to_num(nan=math.inf, posinf=math.inf)


def scale_of(amax: Tensor, recipe: Recipe, target: FloatFormat) -> Tensor:
    """The scale for `amax`, of any shape; 1 for zeros. Where `amax` isn't finite the scale is NaN, and so is the
    quantised tensor: a cast would hide an infinity."""
    return torch.where(amax == 0.0, 1.0, recipe.rule(amax, target)) + 0.0 * amax


def quantize(x: Tensor, scale: Tensor, target: FloatFormat, block: Block | None = None) -> Quantized:
    """`x` [m, k] divided by the scale of each block, wide [blocks of m, blocks of k], and cast. `block` None: one scale
    [] for all."""
    if block is None:
        block, scale = (x.shape[0], x.shape[1]), scale.view(1, 1)
    return Quantized(cast(x.to(scale.dtype) / _spread(scale, block, x.shape), target), scale, block)


def quantize_blocks(x: Tensor, recipe: Recipe, target: FloatFormat, block: Block, wide: torch.dtype) -> Quantized:
    """`x` [m, k], each block by its own amax."""
    x = x.to(wide)
    return quantize(x, scale_of(block_amax(x, block), recipe, target), target, block)


def _spread(scale: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """The scale of each element of a tensor [m, k], or one for all."""
    if scale.numel() == 1:
        return scale
    for dim in (0, 1):
        scale = scale.repeat_interleave(block[dim], dim) if block[dim] > 1 else scale
    return scale[: shape[0], : shape[1]]
