"""Self-attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023), cut by heads over ranks.

Key idea: the fused projection is laid out as [groups, queries of a group + key + value, head], an order that knows no
layout, so any cut by groups is a plain slice. With more ranks than groups each group's key and value are copied to the
ranks that share its queries.
"""

from __future__ import annotations

import contextlib
import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from megalite.config.schema import RunConfig
from megalite.distributed import random
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.param_spec import Init, grouped_qkv
from megalite.nn.attention_backend import AttentionBackend, bounded_window
from megalite.nn.dropout import dropout
from megalite.nn.linear import ColumnParallelLinear, RowParallelLinear
from megalite.nn.module import Build, SequenceInfo, ShardedModule
from megalite.nn.norm import Norm
from megalite.nn.rotary import rotate
from megalite.precision.policy import Precision

_TRIED_TOKENS = 128


def visibility(info: SequenceInfo, queries: int, window: int | None) -> Tensor | None:
    """Bool [b or 1, 1, s, s]: which keys each query sees. None where the plain causal rule is all."""
    if info.visible is not None:
        return info.visible
    if info.document_ids is None and window is None:
        return None
    index = torch.arange(queries, device=info.position_ids.device)
    distance = index[:, None] - index[None, :]
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance <= window)
    visible = visible[None, None]
    if info.document_ids is not None:
        same = info.document_ids[:, None, :, None] == info.document_ids[:, None, None, :]
        visible = visible & same
    return visible


def unfused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    *,
    wide: torch.dtype,
    drop: float,
    keys: Tensor | None,
    head: int,
) -> Tensor:
    """Plain attention on [b, heads, s, d] queries and [b, groups, keys, d] keys and values: [b, heads, s, d].

    `keys` int64 [b]: dropout keys, None in evaluation. `head`: global number of the first head here.
    """
    batch, heads, queries, width = q.shape
    groups, length = k.shape[1], k.shape[2]
    scale = 1.0 / math.sqrt(width)
    q = q.reshape(batch, groups, heads // groups, queries, width)
    # Scaled before the product, which could overflow in half precision.
    scores = ((q * scale) @ k.unsqueeze(2).transpose(-1, -2)).to(wide)
    if visible is None:
        visible = torch.ones(queries, length, dtype=torch.bool, device=q.device).tril(length - queries)[None, None]
    scores = scores.masked_fill(~visible.unsqueeze(2), float("-inf"))
    weights = scores.softmax(dim=-1).to(q.dtype)
    if drop and keys is not None:
        device = q.device
        head_index = (head + torch.arange(heads, device=device)).view(groups, -1, 1, 1) << 40
        index = head_index + (torch.arange(queries, device=device)[:, None] << 20) + torch.arange(length, device=device)
        weights = dropout(weights, drop, keys.view(-1, 1, 1, 1, 1), index)
    return (weights @ v.unsqueeze(2)).reshape(batch, heads, queries, width)


def cumulative_lengths(document_ids: Tensor) -> Tensor:
    """int32 [documents + 1] borders of the documents of `document_ids` [b, s] laid end to end, from 0 to b·s."""
    batch, length = document_ids.shape
    starts = torch.ones(batch, length, dtype=torch.bool, device=document_ids.device)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    borders = starts.view(-1).nonzero().view(-1)
    return F.pad(borders, (0, 1), value=batch * length).to(torch.int32)


class CoreAttention:
    """Softmax attention over the local heads, by the chosen kernel. Holds no parameters."""

    def __init__(self, build: Build, backend: AttentionBackend, layer: int):
        self.backend = backend
        self.layer = layer
        self.window = bounded_window(build.config)
        self.drop = build.config.attention_dropout
        self.wide = build.precision.wide
        self.first_head = build.mesh.tp.rank * build.config.num_attention_heads // build.mesh.tp.size

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, info: SequenceInfo) -> Tensor:
        """[s, b, heads, d] queries, [keys, b, groups, d] keys and values → [s, b, heads · d]."""
        if self.backend.kernel == "varlen" and info.visible is None:
            return self._varlen(q, k, v, info)
        visible = visibility(info, q.shape[0], self.window)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        if self.backend.kernel == "unfused":
            keys = None
            if info.dropout_keys is not None and self.drop:
                keys = random.fold(info.dropout_keys, self.layer, "attention")
            out = unfused_attention(q, k, v, visible, wide=self.wide, drop=self.drop, keys=keys, head=self.first_head)
        else:
            out = self._sdpa(q, k, v, visible, training=info.dropout_keys is not None)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, training: bool) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        half = q.dtype in (torch.bfloat16, torch.float16)
        if grouped and q.is_cuda and not (half and self.backend.shares_keys):
            # Few half-precision kernels share keys there; without copies the slow one with an s² matrix would run.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            grouped = False
        chosen = sdpa_kernel(list(self.backend.sdpa)) if self.backend.sdpa else contextlib.nullcontext()
        with chosen:
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=visible,
                is_causal=visible is None,
                dropout_p=self.drop if training else 0.0,
                enable_gqa=grouped,
            )

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, info: SequenceInfo) -> Tensor:
        """Flash attention over documents laid end to end; no mask in memory."""
        from torch.nn.attention.varlen import varlen_attn  # here, since importing it loads torch's compiler

        length, batch = q.shape[:2]
        borders = info.document_borders
        if borders is None:
            borders = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q.device)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
        left = -1 if self.window is None else self.window
        out = varlen_attn(
            q, k, v, borders, borders, length, length, window_size=(left, 0), enable_gqa=q.shape[1] != k.shape[1]
        )
        assert isinstance(out, Tensor)
        return out.view(batch, length, -1).transpose(0, 1)


def try_kernel(config: RunConfig, backend: AttentionBackend, device: torch.device) -> None:
    """Run the kernel that was asked for once on a few tokens, forward and backward. A ValueError says that it can't do
    what the configuration asks for on this device. Where torch may fall back on plain products nothing can fail."""
    if backend.kernel == "unfused" or not (backend.kernel == "varlen" or backend.sdpa):
        return
    model = config.model
    length, queries = min(config.data.seq_length, _TRIED_TOKENS), model.num_attention_heads // model.num_query_groups
    precision = Precision.from_config(config.precision)
    q, k, v = (
        torch.zeros(length, 1, heads, model.kv_channels, dtype=precision.compute, device=device, requires_grad=True)
        for heads in (queries, 1, 1)
    )
    index = torch.arange(length, device=device)
    apart = config.data.reset_attention_mask or config.finetune.sft_packing
    documents = torch.zeros(1, length, dtype=torch.int32, device=device) if apart else None
    info = SequenceInfo(index[None], index, documents, dropout_keys=torch.zeros(1, dtype=torch.int64, device=device))
    attention = CoreAttention(Build(model, single_process_mesh(device), precision), backend, 0)
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            attention(q, k, v, info).sum().backward()
        except RuntimeError as error:
            first = [str(reason.message).partition(" (Triggered")[0] for reason in reasons]
            said = "; ".join([str(error).partition("\n")[0], *first])
            raise ValueError(
                f"--attention-backend {model.attention_backend} can't run this network on {device.type}: {said}. Use "
                "--attention-backend auto or unfused"
            ) from None


class SelfAttention(ShardedModule):
    """Projection to queries, keys and values; norm and rotation of heads; attention; projection back.

    `prefix`: puts keys and values before those of the tokens.
    """

    def __init__(self, build: Build, backend: AttentionBackend, layer: int):
        super().__init__()
        config, place = build.config, build.place()
        heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
        queries = heads // groups
        self.layer, self.width, self.recompute = layer, width, build.recompute
        self.interleaved = config.rotary_interleaved
        self.local_groups = max(1, groups // place.tp)
        self.local_queries = heads // place.tp // self.local_groups
        shape = (groups, queries + 2, width, config.hidden_size)
        local = (self.local_groups, self.local_queries + 2, width, config.hidden_size)
        bias_boxes = None
        if config.add_bias_linear or config.add_qkv_bias:
            bias_boxes = grouped_qkv(groups, queries, (width,), place)
        boxes = grouped_qkv(groups, queries, shape[2:], place)
        init = Init(std=config.init_method_std)
        self.linear_qkv = ColumnParallelLinear(build, shape, local, boxes, bias_boxes, init)
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            self.q_layernorm = Norm(build, width, partial=True)
            self.k_layernorm = Norm(build, width, partial=True)
        self.core = CoreAttention(build, backend, layer)
        self.prefix: nn.Module | None = None
        scaled = Init(std=config.init_method_std / math.sqrt(2.0 * config.num_layers))
        bias = config.add_bias_linear or config.add_proj_bias
        self.linear_proj = RowParallelLinear(build, heads * width, config.hidden_size, bias=bias, init=scaled)

    def forward(self, x: Tensor, info: SequenceInfo, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """`x` [s, b, h] → [s, b, h], with sequence parallelism this rank's part of s.

        `rotary`: cosines and sines of the whole sequence.
        """
        fused = self.linear_qkv(x, info)
        fused = fused.view(*fused.shape[:2], self.local_groups, self.local_queries + 2, self.width)
        q = fused[..., : self.local_queries, :].flatten(2, 3)
        k, v = fused[..., self.local_queries, :], fused[..., self.local_queries + 1, :]
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if rotary is not None:
            q = rotate(q, rotary, interleaved=self.interleaved)
            k = rotate(k, rotary, interleaved=self.interleaved)
        if self.prefix is not None and info.begins:  # later a cache has it
            k, v = self.prefix(k, v)
        if info.cache is not None:
            k, v = info.cache.update(self.layer, k, v)
        return self.linear_proj(self.recompute.run("core_attn", self.core, q, k, v, info), info)
