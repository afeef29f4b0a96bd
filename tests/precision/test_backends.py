"""Products of quantised matrices: each back end against float64, and the layouts in which scales reach kernels.

Most kernels need a GPU. Here stand-ins take their place: they take only the calls and shapes that the real ones take,
and read scales where the vendors' documents say they lie. Tests marked `cuda` call the real ones.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from megalite.config.errors import FlagError
from megalite.config.schema import PrecisionConfig
from megalite.precision.backends import Emulated, TorchGemms, TransformerEngine, choose, problem
from megalite.precision.formats import E4M3, E5M2, FloatFormat
from megalite.precision.scaling import RECIPES, Block, Quantized, Recipe, amax_of, quantize, quantize_blocks, scale_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = [(16, 32, 128), (128, 256, 384), (5, 7, 11), (33, 129, 130), (130, 1, 640), (1, 50, 1)]
PAIRS = [pytest.param(E4M3, E4M3, id="E4M3xE4M3"), pytest.param(E5M2, E4M3, id="E5M2xE4M3")]
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
FP32 = torch.float32
SCALED_MM = F.scaled_mm


def precision(backend: str, recipe: str, *, hybrid: bool = False, fp64: bool = False) -> PrecisionConfig:
    format_ = "hybrid" if hybrid else "e4m3"
    return PrecisionConfig(fp64=fp64, fp8_format=format_, fp8_recipe=recipe, fp8_backend=backend)


def quantized(
    recipe: Recipe, shape: tuple[int, int], target: FloatFormat, block: Block | None, device: torch.device = CPU
) -> Quantized:
    """Random numbers of many magnitudes."""
    x = (torch.randn(shape) * torch.exp(torch.randn(shape[0], 1))).to(device)
    if block is None:
        return quantize(x, scale_of(amax_of(x, FP32), recipe, target), target)
    return quantize_blocks(x, recipe, target, block, FP32)


def operands(
    recipe: Recipe, size: tuple[int, int, int], left: FloatFormat, right: FloatFormat, device: torch.device = CPU
) -> list[tuple[Quantized, Quantized]]:
    """The pairs that a linear layer multiplies: with a weight, and for a weight's gradient."""
    m, n, k = size
    a = quantized(recipe, (m, k), left, recipe.block, device)
    blocks = dict.fromkeys([recipe.block, recipe.weight_block])
    return [(a, quantized(recipe, (n, k), right, block, device)) for block in blocks]


def assert_product(found: Tensor, a: Quantized, b: Quantized) -> None:
    """Within the error of float32 sums over k terms, each rounded, and of the rounding to the result's dtype."""
    x, y = (Quantized(q.data, q.scale.double(), q.block).dequantize() for q in (a, b))
    exact, k = x @ y.t(), x.shape[1]
    bound = (k + 3) * 2.0**-24 * (x.abs() @ y.abs().t()) + torch.finfo(found.dtype).eps / 2 * exact.abs() + 2.0**-25
    assert found.shape == exact.shape and found.is_contiguous()
    assert bool(((found.double() - exact).abs() <= 1.01 * bound).all())


def by_scaled_mm(a: Quantized, b: Quantized) -> Tensor:
    """The product by torch._scaled_mm on a CPU, which knows scales of rows: one product for each block of k."""
    if a.scale.numel() == 1 and b.scale.numel() == 1 and a.block[1] >= a.data.shape[1]:
        return torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale, out_dtype=FP32)
    width = a.block[1]
    (m, k), n = a.data.shape, len(b.data)
    total = torch.zeros(m, n)
    for block, start in enumerate(range(0, k, width)):
        rows, columns = (q.scale[:, block].repeat_interleave(q.block[0])[: len(q.data)].contiguous() for q in (a, b))
        x, y = (q.data[:, start : start + width].contiguous() for q in (a, b))
        total += torch._scaled_mm(x, y.t(), rows[:, None], columns[None, :], out_dtype=FP32)
    return total


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("left, right", PAIRS)
@ALL_RECIPES
def test_the_emulation_computes_what_scaled_mm_does(
    recipe: Recipe, left: FloatFormat, right: FloatFormat, size: tuple[int, int, int]
) -> None:
    for a, b in operands(recipe, size, left, right):
        for dtype in (FP32, torch.bfloat16, torch.float16):
            assert_product(Emulated().product(a, b, dtype), a, b)
        assert_product(by_scaled_mm(a, b), a, b)


@ALL_RECIPES
def test_the_emulation_is_exact_on_doubles(recipe: Recipe) -> None:
    a, b = operands(recipe, (20, 30, 200), E5M2, E4M3)[0]
    a, b = (Quantized(q.data, q.scale.double(), q.block) for q in (a, b))
    found = Emulated().product(a, b, torch.float64)
    torch.testing.assert_close(found, a.dequantize() @ b.dequantize().t(), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("left, right", PAIRS)
@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_torch_on_a_cpu_computes_products_of_one_scale(
    name: str, left: FloatFormat, right: FloatFormat, size: tuple[int, int, int]
) -> None:
    recipe = RECIPES[name]
    for a, b in operands(recipe, size, left, right):
        for dtype in (FP32, torch.bfloat16, torch.float16):
            assert_product(TorchGemms(recipe, CPU).product(a, b, dtype), a, b)


# ---- scales as kernels read them ----


def read_row_scales(scale: Tensor, m: int, blocks: int) -> Tensor:
    """cuBLAS, 1D blocks of 128: [blocks of k, m] in memory."""
    return scale.flatten()[: blocks * m].view(blocks, m).t()


def read_square_scales(scale: Tensor, blocks_of_n: int, blocks: int) -> Tensor:
    """cuBLAS, 2D blocks of 128: [blocks of n, blocks of k] in memory, its rows a multiple of four apart."""
    return scale.flatten().view(blocks_of_n, -(-blocks // 4) * 4)[:, :blocks]


def read_interleaved_scales(scale: Tensor, m: int, blocks: int) -> Tensor:
    """cuBLAS, blocks of 32, the place of the scale of row r and block c: tiles of 128 x 4 one after another along k; in
    a tile (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4."""
    flat, tiles = scale.flatten().float(), -(-blocks // 4)
    places = [
        [(r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4 for c in range(blocks)]
        for r in range(m)
    ]
    return flat[torch.tensor(places)]


def dequantize(data: Tensor, scale: Tensor, kind: ScalingType) -> Tensor:
    """[m, k] in float64 from data and a scale in memory, as a GEMM takes them."""
    m, k = data.shape
    if kind == ScalingType.TensorWise:
        return data.double() * scale.double()
    width = {ScalingType.BlockWise1x32: 32}.get(kind, 128)
    blocks = -(-k // width)
    if kind == ScalingType.BlockWise1x32:
        scale = read_interleaved_scales(scale, m, blocks)
    elif kind == ScalingType.BlockWise1x128:
        scale = read_row_scales(scale, m, blocks)
    else:
        scale = read_square_scales(scale, -(-m // 128), blocks).repeat_interleave(128, 0)[:m]
    return data.double() * scale.double().repeat_interleave(width, 1)[:, :k]


def as_on_gpu(
    a: Tensor, b: Tensor, scale_a: Tensor, type_a: ScalingType, scale_b: Tensor, type_b: ScalingType,
    swizzle_a: SwizzleType, swizzle_b: SwizzleType, *, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """scaled_mm for what only GPUs compute. Torch's own checks of shapes and strides run on tensors without data."""
    x, y, scale_x, scale_y = (
        torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        for each in (a, b, scale_a, scale_b)
    )
    SCALED_MM(x, y, scale_x, type_a, scale_y, type_b, swizzle_a, swizzle_b, output_dtype=output_dtype)
    swizzled = SwizzleType.SWIZZLE_32_4_4 if type_a == ScalingType.BlockWise1x32 else SwizzleType.NO_SWIZZLE
    assert swizzle_a == swizzle_b == swizzled
    memory = [x.t() if x.stride(0) == 1 and x.dim() == 2 else x for x in (scale_a, scale_b)]
    assert all(x.is_contiguous() for x in memory)
    return (dequantize(a, memory[0], type_a) @ dequantize(b.t(), memory[1], type_b).t()).to(output_dtype)


def capability(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], cuda: str = "13.0") -> None:
    """A GPU of this compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: version)
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "name, version", [("delayed", (8, 9)), ("blockwise", (9, 0)), ("blockwise", (10, 0)), ("mxfp8", (10, 0))]
)
def test_torch_on_a_gpu_is_given_operands_as_its_kernels_read_them(
    name: str, version: tuple[int, int], size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    capability(monkeypatch, version)
    monkeypatch.setattr(F, "scaled_mm", as_on_gpu)
    recipe = RECIPES[name]
    for a, b in operands(recipe, size, E4M3, E4M3):
        for x, y in ((a, b), (b, a)):
            assert_product(TorchGemms(recipe, CUDA).product(x, y, torch.bfloat16), x, y)


def transformer_engine_stand_in(version: str = "2.18.0") -> dict[str, ModuleType]:
    """Modules with what the adapter uses of Transformer Engine, with the signatures of 2.18. The GEMM checks shapes as
    its sources do: `CheckScaleTensorShape` and `CanonicalizeGemmInput`."""

    class Float8TensorStorage:
        def __init__(
            self, *, data: Any, fp8_scale_inv: Any, fp8_dtype: Any, fake_dtype: Any = None, data_transpose: Any = None,
            quantizer: Any = None,
        ):  # fmt: skip
            self._data, self._scale_inv, self._fp8_dtype = data, fp8_scale_inv, fp8_dtype
            assert fp8_scale_inv.shape == (1,) and fp8_scale_inv.dtype == FP32

        def rows(self) -> Tensor:
            assert self._data.shape[1] % 16 == 0
            return dequantize(self._data.view(self._fp8_dtype), self._scale_inv, ScalingType.TensorWise)

    class Float8BlockwiseQTensorStorage:
        def __init__(
            self, rowwise_data: Any, rowwise_scale_inv: Any, columnwise_data: Any, columnwise_scale_inv: Any,
            fp8_dtype: Any, quantizer: Any, is_2D_scaled: bool, *, fake_dtype: Any = None,
        ):  # fmt: skip
            self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
            self._fp8_dtype, self._is_2D_scaled = fp8_dtype, is_2D_scaled

        def rows(self) -> Tensor:
            (m, k), scale = self._rowwise_data.shape, self._rowwise_scale_inv
            blocks = -(-k // 128)
            expected = (-(-m // 128), -(-blocks // 4) * 4) if self._is_2D_scaled else (blocks, -(-m // 4) * 4)
            assert scale.shape == expected and scale.is_contiguous() and scale.dtype == FP32
            assert k % 16 == 0 and m % 8 == 0
            kind = ScalingType.BlockWise128x128 if self._is_2D_scaled else ScalingType.BlockWise1x128
            return dequantize(self._rowwise_data.view(self._fp8_dtype), scale, kind)

    class MXFP8TensorStorage:
        def __init__(
            self, rowwise_data: Any, rowwise_scale_inv: Any, columnwise_data: Any, columnwise_scale_inv: Any,
            fp8_dtype: Any, quantizer: Any, with_gemm_swizzled_scales: bool, *, fake_dtype: Any = None,
        ):  # fmt: skip
            self._data, self._scale_inv, self._fp8_dtype = rowwise_data, rowwise_scale_inv, fp8_dtype
            assert not with_gemm_swizzled_scales

        def rows(self) -> Tensor:
            (m, k), scale = self._data.shape, self._scale_inv
            assert scale.shape == (-(-m // 128) * 128, -(-k // 32 // 4) * 4) and scale.dtype == torch.uint8
            wide = 2.0 ** (scale[:m, : -(-k // 32)].double() - 127)
            wide[scale[:m, : -(-k // 32)] == 255] = torch.nan
            return self._data.view(self._fp8_dtype).double() * wide.repeat_interleave(32, 1)[:, :k]

    class Float8Quantizer:
        internal = False

        def __init__(self, scale: Any, amax: Any, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True):
            self.scale, self.dtype = scale, fp8_dtype
            assert scale.shape == amax.shape == (1,) and scale.dtype == amax.dtype == FP32
            assert rowwise and not columnwise

        def __call__(self, x: Tensor) -> Float8TensorStorage:
            largest = torch.finfo(self.dtype).max
            data = (x.float() * self.scale).clamp(-largest, largest).to(self.dtype).view(torch.uint8)
            return Float8TensorStorage(data=data, fp8_scale_inv=1 / self.scale, fp8_dtype=self.dtype, quantizer=self)

    class Float8BlockQuantizer:
        internal = False

        def __init__(
            self, fp8_dtype: Any, *, rowwise: bool, columnwise: bool, amax_epsilon: float = 0.0,
            force_pow_2_scales: bool = True, block_scaling_dim: int = 2,
        ):  # fmt: skip
            self.dtype, self.square = fp8_dtype, block_scaling_dim == 2
            assert rowwise and not columnwise and force_pow_2_scales

        def is_quantizable(self, x: Tensor) -> bool:
            return x.shape[0] % 128 == 0 and x.shape[1] % 128 == 0

        def __call__(self, x: Tensor) -> Float8BlockwiseQTensorStorage:
            (m, k), height, largest = x.shape, 128 if self.square else 1, torch.finfo(self.dtype).max
            amax = x.float().abs().view(m // height, height, k // 128, 128).amax((1, 3))
            exponent = torch.frexp(largest / amax).exponent - 1
            scale = torch.where(amax.isfinite() & (amax > 0), torch.ldexp(torch.ones_like(amax), exponent), 1.0)
            spread = scale.repeat_interleave(height, 0).repeat_interleave(128, 1)
            data = (x.float() * spread).clamp(-largest, largest).to(self.dtype).view(torch.uint8)
            inverse = F.pad(1 / scale, (0, -scale.shape[1] % 4)) if self.square else (1 / scale).t().contiguous()
            return Float8BlockwiseQTensorStorage(data, inverse, None, None, self.dtype, self, self.square)

    def general_gemm(
        A: Any, B: Any, out_dtype: Any = None, quantization_params: Any = None, gelu: bool = False, gelu_in: Any = None,
        alpha: float = 1.0, beta: Any = None, accumulate: bool = False, layout: str = "TN", out: Any = None,
        bias: Any = None, use_split_accumulator: bool = False, grad: bool = False, ub: Any = None, ub_type: Any = None,
        extra_output: Any = None, bulk_overlap: bool = False,
    ) -> tuple[Tensor, None, None, None]:  # fmt: skip
        assert layout == "TN" and use_split_accumulator
        a, b = A.rows(), B.rows()
        assert len(a) % 8 == 0  # rows of the result of 16 bytes
        return (b @ a.t()).to(out_dtype), None, None, None

    def available(return_reason: bool = False) -> tuple[bool, str] | bool:
        return (True, "") if return_reason else True

    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {"__version__": version},
        "transformer_engine.pytorch": {
            "is_fp8_available": available,
            "is_fp8_block_scaling_available": available,
            "is_mxfp8_available": lambda return_reason: (False, "Device compute capability 10.0 or higher required."),
        },
        "transformer_engine.pytorch.tensor": {
            each.__name__: each
            for each in (
                Float8TensorStorage, Float8BlockwiseQTensorStorage, MXFP8TensorStorage, Float8Quantizer,
                Float8BlockQuantizer,
            )
        },
        "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
        "transformer_engine.pytorch.constants": {"TE_DType": {each: each for each in (E4M3.dtype, E5M2.dtype)}},
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
    return modules


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    modules = transformer_engine_stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("left, right", PAIRS)
@ALL_RECIPES
def test_transformer_engine_is_given_operands_as_its_gemms_read_them(
    recipe: Recipe, left: FloatFormat, right: FloatFormat, size: tuple[int, int, int], stand_in: dict[str, ModuleType]
) -> None:
    for a, b in operands(recipe, size, left, right):
        assert_product(TransformerEngine(recipe).product(a, b, torch.bfloat16), a, b)


@pytest.mark.parametrize("name", ["emulated", "torch", "te"])
@ALL_RECIPES
def test_a_spoiled_block_spoils_its_row_of_the_product_and_no_other(
    recipe: Recipe, name: str, stand_in: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    capability(monkeypatch, (9, 0) if recipe.name == "blockwise" else (10, 0))
    monkeypatch.setattr(F, "scaled_mm", as_on_gpu)
    a, b = operands(recipe, (20, 40, 300), E4M3, E4M3)[0]
    a.scale[a.scale.shape[0] // 2, 0] = torch.nan
    backend = {"emulated": Emulated, "torch": lambda: TorchGemms(recipe, CUDA), "te": lambda: TransformerEngine(recipe)}
    spoiled = backend[name]().product(a, b, FP32).isnan()
    row = a.scale.shape[0] // 2
    assert spoiled.all(1).tolist() == spoiled.any(1).tolist() == [recipe.block is None or i == row for i in range(20)]


@pytest.mark.parametrize("target", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(256, 384), (128, 1152), (100, 70)])
def test_quantisers_of_transformer_engine_give_the_numbers_of_ours(
    target: FloatFormat, shape: tuple[int, int], stand_in: dict[str, ModuleType]
) -> None:
    for name, recipe in RECIPES.items():
        engine, plain = TransformerEngine(recipe), Emulated()
        for block in dict.fromkeys([recipe.block, recipe.weight_block]):
            x = torch.randn(shape).to(torch.bfloat16)
            if block is None:
                scale = scale_of(amax_of(x, FP32), recipe, target)
                found, expected = (each.quantize(x, scale, target) for each in (engine, plain))
            else:
                found, expected = (each.quantize_blocks(x, recipe, target, block, FP32) for each in (engine, plain))
                assert torch.equal(found.scale, expected.scale), name
            assert found.block == expected.block and found.data.dtype == target.dtype
            # A product with the inverse scale may round a tie of a quotient to the other side.
            wrong = (found.dequantize() != expected.dequantize()).float().mean()
            assert wrong == 0 if block else wrong < 0.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_isn_t_hidden_by_the_quantisers_of_transformer_engine(
    bad: float, stand_in: dict[str, ModuleType]
) -> None:
    x = torch.randn(128, 256)
    x[3, 200] = bad
    for block in ((1, 128), (128, 128)):
        found = TransformerEngine(RECIPES["blockwise"]).quantize_blocks(x, RECIPES["blockwise"], E4M3, block, FP32)
        assert found.dequantize()[3, 200].isnan()


# ---- what is possible where ----


@pytest.mark.parametrize(
    "recipe, hybrid, version, cuda, expected",
    [
        ("delayed", True, (8, 9), "12.4", None),
        ("tensorwise", True, (12, 0), "13.0", None),
        ("tensorwise", False, (8, 6), "12.4", "needs compute capability 8.9, and this GPU has 8.6"),
        ("blockwise", False, (8, 9), "12.9", "needs compute capability 9.0, and this GPU has 8.9"),
        ("blockwise", False, (9, 0), "12.9", None),
        ("blockwise", False, (10, 0), "13.0", None),
        ("blockwise", True, (9, 0), "12.9", "takes E4M3 alone where blocks have scales; use --fp8-format e4m3"),
        ("blockwise", False, (9, 0), "12.8", "needs CUDA 12.9, and this torch has 12.8"),
        ("mxfp8", False, (9, 0), "13.0", "needs compute capability 10.0, and this GPU has 9.0"),
        ("mxfp8", False, (10, 3), "13.0", None),
    ],
)
def test_what_torch_can_on_a_gpu_is_known_before_the_run(
    recipe: str, hybrid: bool, version: tuple[int, int], cuda: str, expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    capability(monkeypatch, version, cuda)
    assert problem("torch", precision("torch", recipe, hybrid=hybrid), CUDA) == expected


@pytest.mark.parametrize(
    "recipe, fp64, expected",
    [
        ("delayed", False, "torch, since te needs a GPU, but this run is on cpu"),
        (
            "blockwise",
            False,
            "emulated, since te needs a GPU, but this run is on cpu; torch has no scales of blocks on a CPU",
        ),
        ("tensorwise", True, "emulated, since te has no float64; torch has no float64"),
    ],
)
def test_auto_takes_the_first_that_can_and_says_why(recipe: str, fp64: bool, expected: str) -> None:
    backend, why = choose(precision("auto", recipe, hybrid=True, fp64=fp64), CPU)
    assert (backend.name, why) == (expected.split(",")[0], expected)
    assert choose(precision("emulated", recipe, hybrid=True, fp64=fp64), CPU)[1] == "emulated"


def test_a_named_backend_that_cannot_is_refused_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, device, fp64, message in (
        ("te", CPU, False, "--fp8-backend te needs a GPU, but this run is on cpu; use auto"),
        ("torch", CPU, True, "--fp8-backend torch has no float64; use auto"),
        ("torch", torch.device("mps"), False, "--fp8-backend torch needs a CPU or an NVIDIA GPU; use auto"),
    ):
        with pytest.raises(FlagError) as error:
            choose(precision(name, "tensorwise", fp64=fp64), device)
        assert str(error.value) == message


def test_without_transformer_engine_the_message_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(FlagError, match=r"^--fp8-backend te can't be imported \(.*transformer_engine.*\); use auto$"):
        choose(precision("te", "mxfp8"), CUDA)


def test_transformer_engine_says_itself_what_a_gpu_can(
    stand_in: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def te(recipe: str) -> str | None:
        return problem("te", precision("te", recipe, hybrid=True), CUDA)

    assert te("blockwise") is te("delayed") is None
    assert te("mxfp8") == "can't: Device compute capability 10.0 or higher required."
    assert choose(precision("auto", "blockwise", hybrid=True), CUDA)[1] == "te"
    monkeypatch.setattr(stand_in["transformer_engine"], "__version__", "2.9.0.post1")
    assert te("delayed") == "must be 2.14 or newer, and 2.9.0.post1 is installed"
    monkeypatch.setattr(stand_in["transformer_engine.pytorch.tensor"], "Float8Quantizer", None, raising=True)
    monkeypatch.delattr(stand_in["transformer_engine.pytorch.tensor"], "Float8Quantizer")
    assert (
        te("delayed")
        == "can't be imported (module 'transformer_engine.pytorch.tensor' has no attribute 'Float8Quantizer')"
    )


# ---- on a GPU ----


@pytest.mark.cuda
@pytest.mark.parametrize("left, right", PAIRS)
@pytest.mark.parametrize("name", ["torch", "te"])
@ALL_RECIPES
def test_on_a_gpu_kernels_compute_what_the_emulation_does(
    recipe: Recipe, name: str, left: FloatFormat, right: FloatFormat
) -> None:
    """Tensor cores sum with fewer bits than float32 has: NVIDIA promises none, DeepSeek-V3 (section 3.3.2) saw 14."""
    if name == "te":
        pytest.importorskip("transformer_engine.pytorch")
    device = torch.device("cuda", torch.cuda.current_device())
    config = precision(name, recipe.name, hybrid=left is E5M2)
    if why := problem(name, config, device):
        pytest.skip(f"{name} {why}")
    backend, _ = choose(config, device)
    for a, b in (pair for size in SIZES for pair in operands(recipe, size, left, right, device)):
        found = backend.product(a, b, FP32)
        expected = Emulated().product(a, b, FP32)
        error, bound = (found - expected).abs(), a.dequantize().abs() @ b.dequantize().abs().t()
        assert bool((error <= 2.0**-12 * bound).all())


@pytest.mark.cuda
@pytest.mark.parametrize("target", [E4M3, E5M2])
@ALL_RECIPES
def test_on_a_gpu_quantisers_of_transformer_engine_give_the_numbers_of_ours(
    recipe: Recipe, target: FloatFormat
) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    device = torch.device("cuda", torch.cuda.current_device())
    if why := problem("te", precision("te", recipe.name), device):
        pytest.skip(f"te {why}")
    engine, plain = TransformerEngine(recipe), Emulated()
    x = torch.randn(256, 384, device=device).to(torch.bfloat16)
    for block in dict.fromkeys([recipe.block, recipe.weight_block]):
        if block is None:
            scale = scale_of(amax_of(x, FP32), recipe, target)
            found, expected = (each.quantize(x, scale, target) for each in (engine, plain))
        else:
            found, expected = (each.quantize_blocks(x, recipe, target, block, FP32) for each in (engine, plain))
        assert (found.dequantize() != expected.dequantize()).float().mean() < 0.01
