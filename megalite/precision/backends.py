"""Who computes the product of two quantised matrices: an emulation, torch's FP8 GEMMs or Transformer Engine's.

Key idea: the operands are numbers and scales already (`precision.scaling`), and a back end adds no rounding but that of
its sums, which are float32, or in tensor cores a little less. So all of them compute one thing, and the emulation,
which runs on any device and in any wide dtype, is the proof of the others.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from megalite.config.errors import refuse
from megalite.config.schema import PrecisionConfig
from megalite.precision import scaling
from megalite.precision.formats import FloatFormat
from megalite.precision.scaling import RECIPES, Block, Quantized, Recipe, amax_of, fit_power_of_two

ROW, SQUARE, MX = (1, 128), (128, 128), (1, 32)
ALIGNMENT = 16
"""Rows and columns of FP8 GEMMs are multiples of this: NVIDIA, cuBLAS Library, "Tensor Core Usage"."""


class Backend(ABC):
    """The quantisers are `precision.scaling`'s where a back end has no own ones."""

    name: str

    def quantize(self, x: Tensor, scale: Tensor, target: FloatFormat) -> Quantized:
        """`x` [m, k] with one scale, wide []."""
        return scaling.quantize(x, scale, target)

    def quantize_blocks(
        self, x: Tensor, recipe: Recipe, target: FloatFormat, block: Block, wide: torch.dtype
    ) -> Quantized:
        """`x` [m, k], each block by its own amax."""
        return scaling.quantize_blocks(x, recipe, target, block, wide)

    @abstractmethod
    def product(self, a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        """a b^T [m, n] in `dtype`, for `a` [m, k] and `b` [n, k]. Blocks have one row each, or are square in one of the
        two."""


class Emulated(Backend):
    """Dequantises to the wide dtype of the scales and multiplies there."""

    name = "emulated"

    def product(self, a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        return (a.dequantize() @ b.dequantize().t()).to(dtype)


def fill_up(q: Quantized, whole: bool) -> Quantized:
    """`q` row-major, with zeros up to the next multiples of what GEMMs want; a product's other numbers stay the same.
    `whole`: one scale for all."""
    rows, columns = q.block
    m, k = q.data.shape
    more = (0, -k % ALIGNMENT, 0, -m % ALIGNMENT) if whole else (0, -k % columns, 0, -m % max(rows, ALIGNMENT))
    data, scale = q.data.contiguous(), q.scale
    if any(more):
        data = F.pad(data.view(torch.uint8), more).view(data.dtype)
    if not whole:
        blocks_of_m, blocks_of_k = scale.shape
        more = (0, -(-data.shape[1] // columns) - blocks_of_k, 0, -(-len(data) // rows) - blocks_of_m)
        scale = F.pad(scale, more, value=1.0)
    return Quantized(data, scale, q.block)


def in_mx_blocks(q: Quantized) -> Quantized:
    """The same numbers with a scale for each 1 x 32 of them; `q` is filled up."""
    rows, columns = q.block
    scale = q.scale.repeat_interleave(rows, 0)[: len(q.data)].repeat_interleave(columns // MX[1], 1)
    return Quantized(q.data, scale, MX)


def square_or_row_scales(q: Quantized) -> Tensor:
    """As cuBLAS reads the scales of blocks of 128: [blocks of k, m], or [blocks of n, blocks of k up to the next 4]."""
    return F.pad(q.scale, (0, -q.scale.shape[1] % 4)) if q.block == SQUARE else q.scale.t().contiguous()


def mx_scales(q: Quantized) -> Tensor:
    """E8M0 [m up to the next 128, blocks of k up to the next 4]."""
    m, blocks = q.scale.shape
    return F.pad(q.scale, (0, -blocks % 4, 0, -m % 128), value=1.0).to(torch.float8_e8m0fnu)


def interleave(scales: Tensor) -> Tensor:
    """Scales from `mx_scales` in the tensor cores' order, flat: tiles of 128 x 4, in which four rows that are 32 apart
    are neighbours. NVIDIA, cuBLAS Library, "1D Block Scaling Factors Layout"."""
    rows, columns = scales.shape
    tiles = scales.view(torch.uint8).view(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


class _Operand(NamedTuple):
    data: Tensor
    scale: Tensor
    scaling: ScalingType
    swizzle: SwizzleType = SwizzleType.NO_SWIZZLE


class TorchGemms(Backend):
    """torch.nn.functional.scaled_mm of torch 2.13."""

    name = "torch"

    def __init__(self, recipe: Recipe, device: torch.device):
        self._whole = recipe.block is None
        # Since compute capability 10.0 no kernel takes float32 scales of blocks; those here are powers of two.
        self._as_mx = recipe.block == MX or (recipe.block == ROW and torch.cuda.get_device_capability(device)[0] >= 10)

    def product(self, a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        x, y = self._operand(a), self._operand(b)
        scales = x.scale, x.scaling, y.scale, y.scaling
        full = F.scaled_mm(x.data, y.data.t(), *scales, x.swizzle, y.swizzle, output_dtype=dtype)
        return full[: len(a.data), : len(b.data)].contiguous()

    def _operand(self, q: Quantized) -> _Operand:
        q = fill_up(q, self._whole)
        if self._whole:
            return _Operand(q.data, q.scale, ScalingType.TensorWise)
        if self._as_mx:
            scales = interleave(mx_scales(in_mx_blocks(q)))
            return _Operand(q.data, scales, ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4)
        kind = ScalingType.BlockWise128x128 if q.block == SQUARE else ScalingType.BlockWise1x128
        return _Operand(q.data, square_or_row_scales(q).t(), kind)


OLDEST_TE = (2, 14)


def _import_te() -> SimpleNamespace:
    """What is used of Transformer Engine; written against the sources of 2.14 to 2.18."""
    package = importlib.import_module("transformer_engine")
    pytorch, tensor, extensions, constants = (
        importlib.import_module(f"transformer_engine.{name}")
        for name in ("pytorch", "pytorch.tensor", "pytorch.cpp_extensions", "pytorch.constants")
    )
    return SimpleNamespace(
        version=package.__version__,
        available={
            None: pytorch.is_fp8_available,
            ROW: pytorch.is_fp8_block_scaling_available,
            MX: pytorch.is_mxfp8_available,
        },
        dtypes=constants.TE_DType,
        gemm=extensions.general_gemm,
        quantizer=tensor.Float8Quantizer,
        block_quantizer=tensor.Float8BlockQuantizer,
        whole=tensor.Float8TensorStorage,
        blocks=tensor.Float8BlockwiseQTensorStorage,
        mx=tensor.MXFP8TensorStorage,
    )


class TransformerEngine(Backend):
    """Transformer Engine's GEMMs, and its quantisers where they compute what ours do; those of MX round a scale up, and
    the standard rounds it down. They give a block with an infinity the scale 1, with which it saturates. So the scales
    are made NaN here where the operand's amax isn't finite."""

    name = "te"

    def __init__(self, recipe: Recipe):
        self._whole, self._te = recipe.block is None, _import_te()

    def quantize(self, x: Tensor, scale: Tensor, target: FloatFormat) -> Quantized:
        inverse, amax = scale.reciprocal().view(1), torch.zeros_like(scale).view(1)
        quantizer = self._te.quantizer(inverse, amax, self._te.dtypes[target.dtype], rowwise=True, columnwise=False)
        quantizer.internal = True
        return Quantized(quantizer(x)._data.view(target.dtype), scale.view(1, 1), (x.shape[0], x.shape[1]))

    def quantize_blocks(
        self, x: Tensor, recipe: Recipe, target: FloatFormat, block: Block, wide: torch.dtype
    ) -> Quantized:
        kind = self._te.dtypes[target.dtype]
        quantizer = self._te.block_quantizer(
            kind, rowwise=True, columnwise=False, force_pow_2_scales=True, block_scaling_dim=2 if block == SQUARE else 1
        )
        quantizer.internal = True
        ours = recipe.rule is not fit_power_of_two or block not in (ROW, SQUARE)
        if ours or not quantizer.is_quantizable(x):
            return super().quantize_blocks(x, recipe, target, block, wide)
        found = quantizer(x)
        scale = found._rowwise_scale_inv
        scale = scale[:, : x.shape[1] // 128] if block == SQUARE else scale[:, : len(x)].t()
        return Quantized(found._rowwise_data.view(target.dtype), scale + 0.0 * amax_of(x, wide), block)

    def product(self, a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        options = {"out_dtype": dtype, "layout": "TN", "use_split_accumulator": True}
        full = self._te.gemm(self._operand(b), self._operand(a), **options)[0]
        return full[: len(a.data), : len(b.data)].contiguous()

    def _operand(self, q: Quantized) -> object:
        q = fill_up(q, self._whole)
        data, kind = q.data.view(torch.uint8), self._te.dtypes[q.data.dtype]
        if self._whole:
            return self._te.whole(data=data, fp8_scale_inv=q.scale.view(1), fp8_dtype=kind)
        one_way = {"columnwise_data": None, "columnwise_scale_inv": None, "fp8_dtype": kind, "quantizer": None}
        if q.block == MX:
            scale = mx_scales(q).view(torch.uint8)
            return self._te.mx(rowwise_data=data, rowwise_scale_inv=scale, with_gemm_swizzled_scales=False, **one_way)
        scale = square_or_row_scales(q)
        return self._te.blocks(rowwise_data=data, rowwise_scale_inv=scale, is_2D_scaled=q.block == SQUARE, **one_way)


def _torch_problem(recipe: Recipe, hybrid: bool, device: torch.device) -> str | None:
    if device.type == "cpu":
        return "has no scales of blocks on a CPU" if recipe.block else None
    if device.type != "cuda" or torch.version.cuda is None:
        return "needs a CPU or an NVIDIA GPU"
    capability, cuda = torch.cuda.get_device_capability(device), tuple(map(int, torch.version.cuda.split(".")))
    needed = {None: (8, 9), ROW: (9, 0), MX: (10, 0)}[recipe.block]
    if capability < needed:
        return f"needs compute capability {needed[0]}.{needed[1]}, and this GPU has {capability[0]}.{capability[1]}"
    if recipe.block and cuda < (12, 9):
        return f"needs CUDA 12.9, and this torch has {torch.version.cuda}"
    return "takes E4M3 alone where blocks have scales; use --fp8-format e4m3" if recipe.block and hybrid else None


def _te_problem(recipe: Recipe, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"needs a GPU, but this run is on {device.type}"
    try:
        te = _import_te()
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # or built for another machine
        return f"can't be imported ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    if tuple(map(int, te.version.split(".")[:2])) < OLDEST_TE:
        return f"must be {OLDEST_TE[0]}.{OLDEST_TE[1]} or newer, and {te.version} is installed"
    possible, reason = te.available[recipe.block](return_reason=True)
    return None if possible else f"can't: {reason}"


def problem(name: str, config: PrecisionConfig, device: torch.device) -> str | None:
    """What stands against a back end on this rank's device."""
    if name == "emulated":
        return None
    if config.fp64:
        return "has no float64"
    recipe = RECIPES[config.fp8_recipe]
    return (
        _te_problem(recipe, device) if name == "te" else _torch_problem(recipe, config.fp8_format == "hybrid", device)
    )


def check_fp8_backend(config: PrecisionConfig, device: torch.device) -> list[str]:
    """What stands against --fp8-backend on this rank's device."""
    name = config.fp8_backend
    why = None if config.fp8_format is None or name == "auto" else problem(name, config, device)
    return [f"--fp8-backend {name} {why}; use auto"] if why else []


def choose(config: PrecisionConfig, device: torch.device) -> tuple[Backend, str]:
    """The back end that --fp8-backend names, or with `auto` the first that can of te, torch and emulated, and one line
    that says which and why. Raises FlagError where a named one can't."""
    refuse(check_fp8_backend(config, device))
    names = ["te", "torch", "emulated"] if config.fp8_backend == "auto" else [config.fp8_backend]
    found = {name: problem(name, config, device) for name in names}
    name, recipe = next(name for name in names if found[name] is None), RECIPES[config.fp8_recipe]
    passed = "; ".join(f"{other} {found[other]}" for other in names[: names.index(name)])
    why = f"{name}, since {passed}" if passed else name
    if name == "te":
        return TransformerEngine(recipe), why
    return (TorchGemms(recipe, device) if name == "torch" else Emulated()), why
