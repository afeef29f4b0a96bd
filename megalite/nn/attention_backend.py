"""The kernels of attention, and which of them runs: decided once, and printed.

Key idea: the choice is a function of configuration and device, so a request that can't be honoured is refused before
any process group exists. `unfused` and `local` are plain matrix products whose dropout is a function of its place;
the kernels of `scaled_dot_product_attention` drop out from torch's own stream.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.config.resolve import head_widths, parse_window
from megalite.config.schema import ModelConfig, RunConfig
from megalite.distributed import random
from megalite.distributed.mesh import single_process_mesh
from megalite.nn.dropout import dropout
from megalite.nn.module import Build
from megalite.nn.rotary import score_scale
from megalite.nn.tokens import Tokens, cumulative_lengths, visibility
from megalite.precision.policy import Precision

_TRIED_TOKENS = 128
_PLACE_BITS = 20  # of a token in the index of a dropped weight: from 2^20 tokens on, numbers would be used again


@dataclass(frozen=True)
class AttentionBackend:
    """`kernel`: unfused, sdpa or varlen. `sdpa`: the kernels that scaled_dot_product_attention may use; empty: any."""

    kernel: str
    sdpa: tuple[SDPBackend, ...]
    reason: str

    @property
    def shares_keys(self) -> bool:
        """Whether one of the kernels reads grouped keys and values without copies, in half precision on CUDA."""
        return not self.sdpa or not {SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION}.isdisjoint(self.sdpa)


def bounded_window(config: ModelConfig) -> int | None:
    """How many earlier tokens a query sees besides its own. None: all. (The causal rule bounds the other side.)"""
    left = -1 if config.window_size is None else parse_window(config.window_size)[0]
    return None if left < 0 else left


def choose_backend(config: RunConfig, device_type: str) -> AttentionBackend:
    """The kernel for a resolved configuration. A ValueError says why a request can't be honoured."""
    model, asked = config.model, config.model.attention_backend
    half = config.precision.bf16 or config.precision.fp16
    apart = config.data.reset_attention_mask or config.finetune.sft_packing
    masked = apart or bounded_window(model) is not None
    drops = model.attention_dropout > 0.0
    if asked in ("unfused", "local"):
        return AttentionBackend("unfused", (), f"--attention-backend {asked}")
    if device_type == "cuda":
        backend = _cuda_backend(asked, half=half, masked=masked, drops=drops)
        return _in_fixed_order(backend) if config.training.deterministic_mode else backend
    if drops:
        if asked != "auto":
            raise ValueError(
                f"--attention-backend {asked} has no dropout on a CPU: use --attention-dropout 0 or "
                "--attention-backend unfused"
            )
        return AttentionBackend("unfused", (), "--attention-dropout on a CPU needs plain matrix products")
    # A CPU has one fused kernel, by the name of flash attention.
    sdpa = () if asked == "auto" else (SDPBackend.FLASH_ATTENTION,)
    return AttentionBackend("sdpa", sdpa, "the CPU kernel of scaled_dot_product_attention")


def _in_fixed_order(backend: AttentionBackend) -> AttentionBackend:
    """Without cuDNN's kernel, whose backward sums in any order; the others' have a fixed one when torch asks for it."""
    if backend.kernel != "sdpa":
        return backend
    every = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    kernels = tuple(kernel for kernel in backend.sdpa or every if kernel != SDPBackend.CUDNN_ATTENTION)
    return replace(backend, sdpa=kernels, reason=f"{backend.reason}; deterministic")


def _cuda_backend(asked: str, *, half: bool, masked: bool, drops: bool) -> AttentionBackend:
    if masked:
        if half and not drops and asked in ("auto", "flash"):
            return AttentionBackend("varlen", (), "document masks and windows need the variable-length flash kernel")
        if asked == "auto":
            return AttentionBackend(
                "unfused", (), "the variable-length kernel needs bf16 or fp16 and no attention dropout"
            )
        raise ValueError(
            f"--attention-backend {asked} on CUDA can't do --reset-attention-mask, --sft-packing or --window-size "
            "here: flash does with --bf16 or --fp16 and --attention-dropout 0; unfused always does"
        )
    if asked == "flash":
        if not half:
            raise ValueError("--attention-backend flash on CUDA needs --bf16 or --fp16; use auto, fused or unfused")
        return AttentionBackend("sdpa", (SDPBackend.FLASH_ATTENTION,), "--attention-backend flash")
    if asked == "fused":
        kernels = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        return AttentionBackend("sdpa", kernels, "--attention-backend fused: cuDNN, else memory-efficient")
    note = "; its dropout uses torch's own random generator" if drops else ""
    return AttentionBackend("sdpa", (), "the fastest kernel of scaled_dot_product_attention that fits" + note)


class CoreAttention(ABC):
    """Softmax attention over this rank's heads, by one kernel: [s, b, heads, d] queries, [keys, b, groups, d] keys and
    [keys, b, groups, e] values → [s, b, heads · e]. Holds no parameters; one serves all layers. `tokens` has the mask
    that `mask` made. `layer`: global number, for dropout."""

    def __init__(self, build: Build, backend: AttentionBackend):
        self.backend = backend
        self.window = bounded_window(build.config)
        self.drop = build.config.attention_dropout
        self.wide = build.precision.wide
        self.scale = score_scale(build.config)
        self.first_head = build.mesh.tp.rank * build.config.num_attention_heads // build.mesh.tp.size

    def mask(self, tokens: Tokens) -> Tensor | None:
        """The mask that this kernel needs, for all layers: as `visibility`; None: it needs none."""
        return visibility(tokens.queries, tokens.keys or tokens.queries, self.window)

    def scale_of(self, width: int) -> float:
        """What multiplies the products of queries of this width and keys."""
        return 1.0 / math.sqrt(width) if self.scale is None else self.scale

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, layer: int) -> Tensor: ...


class UnfusedAttention(CoreAttention):
    """Plain products, with a softmax in the wide dtype."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, layer: int) -> Tensor:
        assert tokens.mask is not None
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        batch, heads, length, width = q.shape
        groups = k.shape[1]
        q = q.reshape(batch, groups, heads // groups, length, width)
        # Scaled before the product, which could overflow in half precision.
        scores = ((q * self.scale_of(width)) @ k.unsqueeze(2).transpose(-1, -2)).to(self.wide)
        scores = scores.masked_fill(~tokens.mask.unsqueeze(2), float("-inf"))
        weights = scores.softmax(dim=-1).to(q.dtype)  # [b, groups, heads of a group, s, keys]
        if self.drop and tokens.dropout_keys is not None:
            sample = random.fold(tokens.dropout_keys, layer, "attention").view(-1, 1, 1, 1, 1)
            head = (self.first_head + torch.arange(heads, device=q.device)).view(groups, -1, 1, 1)
            query, key = tokens.queries.index[:, None], (tokens.keys or tokens.queries).index
            index = (head << 2 * _PLACE_BITS) + (query << _PLACE_BITS) + key
            weights = dropout(weights, self.drop, sample, index)
        out = (weights @ v.unsqueeze(2)).reshape(batch, heads, length, -1)
        return out.permute(2, 0, 1, 3).flatten(2)


class ScaledDotProductAttention(CoreAttention):
    """The kernels behind torch's function of that name."""

    def mask(self, tokens: Tokens) -> Tensor | None:
        return None if tokens.causal_alone and self.window is None else super().mask(tokens)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, layer: int) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        scale, (width, values) = self.scale_of(q.shape[-1]), (q.shape[-1], v.shape[-1])
        if width != values and (not q.is_cuda or self.backend.sdpa == (SDPBackend.FLASH_ATTENTION,)):
            q, k, v = _as_wide(q, k, v)
        grouped = q.shape[1] != k.shape[1]
        half = q.dtype in (torch.bfloat16, torch.float16)
        if grouped and q.is_cuda and not (half and self.backend.shares_keys):
            # Few half-precision kernels share keys there; without copies the slow one with an s² matrix would run.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            grouped = False
        with sdpa_kernel(list(self.backend.sdpa)) if self.backend.sdpa else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=tokens.mask,
                is_causal=tokens.mask is None,
                dropout_p=0.0 if tokens.dropout_keys is None else self.drop,
                scale=scale,
                enable_gqa=grouped,
            )
        return out[..., :values].permute(2, 0, 1, 3).flatten(2)


def _as_wide(*heads: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values [..., width], zeros added up to the widest: flash kernels want all widths alike."""
    most = max(x.shape[-1] for x in heads)
    return tuple(x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in heads)


class VariableLengthAttention(ScaledDotProductAttention):
    """Flash attention over documents laid end to end, without a mask in memory; with a cache, as its base."""

    def mask(self, tokens: Tokens) -> Tensor | None:
        known = tokens.causal_alone or tokens.borders is not None
        return None if tokens.keys is None and known else super().mask(tokens)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, layer: int) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # here, since importing it loads torch's compiler

        if tokens.mask is not None:
            return super().__call__(q, k, v, tokens, layer)
        length, batch = q.shape[:2]
        borders = tokens.borders
        if borders is None:
            borders = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q.device)
        scale, values = self.scale_of(q.shape[-1]), v.shape[-1]
        q, k, v = _as_wide(*(x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)))
        left = -1 if self.window is None else self.window
        grouped = q.shape[1] != k.shape[1]
        out = varlen_attn(
            q, k, v, borders, borders, length, length, scale=scale, window_size=(left, 0), enable_gqa=grouped
        )
        assert isinstance(out, Tensor)
        return out[..., :values].reshape(batch, length, -1).transpose(0, 1)


_CORES: dict[str, type[CoreAttention]] = {
    "unfused": UnfusedAttention,
    "sdpa": ScaledDotProductAttention,
    "varlen": VariableLengthAttention,
}


def core_attention(build: Build, backend: AttentionBackend) -> CoreAttention:
    """The kernel that was chosen."""
    return _CORES[backend.kernel](build, backend)


def try_kernel(config: RunConfig, backend: AttentionBackend, device: torch.device) -> None:
    """Run the kernel that was asked for once on a few tokens, forward and backward. A ValueError says that it can't do
    what the configuration asks for on this device. Where torch may fall back on plain products nothing can fail."""
    if backend.kernel == "unfused" or not (backend.kernel == "varlen" or backend.sdpa):
        return
    model = config.model
    length, queries = min(config.data.seq_length, _TRIED_TOKENS), model.num_attention_heads // model.num_query_groups
    precision = Precision.from_config(config.precision)
    width, values = head_widths(model)
    q, k, v = (
        torch.zeros(length, 1, *shape, dtype=precision.compute, device=device, requires_grad=True)
        for shape in ((queries, width), (1, width), (1, values))
    )
    apart = config.data.reset_attention_mask or config.finetune.sft_packing
    documents = torch.zeros(1, length, dtype=torch.int32, device=device) if apart else None
    tokens = replace(
        Tokens.whole(torch.arange(length, device=device)[None], documents),
        dropout_keys=torch.zeros(1, dtype=torch.int64, device=device),
        borders=None if documents is None else cumulative_lengths(documents),
    )
    core = core_attention(Build(model, single_process_mesh(device), precision), backend)
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            core(q, k, v, replace(tokens, mask=core.mask(tokens)), 0).sum().backward()
        except RuntimeError as error:
            first = [str(reason.message).partition(" (Triggered")[0] for reason in reasons]
            said = "; ".join([str(error).partition("\n")[0], *first])
            raise ValueError(
                f"--attention-backend {model.attention_backend} can't run this network on {device.type}: {said}. Use "
                "--attention-backend auto or unfused"
            ) from None
