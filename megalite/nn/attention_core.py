"""The kernels of attention over all keys of this rank: softmax of scaled products, behind a causal rule or a mask.

Key idea: one core serves all layers and holds no parameters. `UnfusedAttention` is plain matrix products whose dropout
is a function of its place; the kernels of `scaled_dot_product_attention` drop out from torch's own stream.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.distributed import random
from megalite.nn.attention_backend import AttentionBackend, bounded_window
from megalite.nn.dropout import dropout
from megalite.nn.module import Build
from megalite.nn.rotary import score_scale
from megalite.nn.tokens import Tokens, visibility

_PLACE_BITS = 20  # of a token in the index of a dropped weight: from 2^20 tokens on, numbers would be used again


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
        tp, exchanged = build.mesh.tp, build.mesh.heads
        share = tp.rank * exchanged.size + exchanged.rank
        self.first_head = share * build.config.num_attention_heads // (tp.size * exchanged.size)

    def mask(self, tokens: Tokens) -> Tensor | None:
        """The mask that this kernel needs, for all layers: as `visibility`; None: it needs none."""
        return visibility(tokens.queries, tokens.keys or tokens.queries, self.window)

    def scale_of(self, width: int) -> float:
        """What multiplies the products of queries of this width and keys."""
        return 1.0 / math.sqrt(width) if self.scale is None else self.scale

    def dropped(self, weights: Tensor, tokens: Tokens, layer: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Dropout of `weights` [b, groups, heads of a group, queries, keys] as a function of the places of queries and
        keys, int64 [n]; none in evaluation."""
        if not self.drop or tokens.dropout_keys is None:
            return weights
        groups, heads = weights.shape[1:3]
        sample = random.fold(tokens.dropout_keys, layer, "attention").view(-1, 1, 1, 1, 1)
        head = (self.first_head + torch.arange(groups * heads, device=weights.device)).view(groups, heads, 1, 1)
        index = (head << 2 * _PLACE_BITS) + (queries[:, None] << _PLACE_BITS) + keys
        return dropout(weights, self.drop, sample, index)

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
        weights = self.dropped(weights, tokens, layer, tokens.queries.index, (tokens.keys or tokens.queries).index)
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
            q, k, v = of_equal_width(q, k, v)
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


def of_equal_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., width], zeros added up to the widest, which change no product: flash kernels want all widths alike."""
    most = max(query.shape[-1], value.shape[-1])
    if query.shape[-1] == value.shape[-1]:
        return query, key, value
    query, key, value = (F.pad(x, (0, most - x.shape[-1])) for x in (query, key, value))
    return query, key, value


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
        q, k, v = of_equal_width(*(x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)))
        grouped = q.shape[1] != k.shape[1]
        left = -1 if self.window is None else self.window
        out = varlen_attn(
            q, k, v, borders, borders, length, length, scale=scale, window_size=(left, 0), enable_gqa=grouped
        )
        assert isinstance(out, Tensor)
        return out[..., :values].reshape(batch, length, -1).transpose(0, 1)
