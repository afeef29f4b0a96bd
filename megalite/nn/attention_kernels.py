"""From the choice of a kernel to the core that runs it, tried once before a run.

Key idea: context parallelism is put around a kernel. Where ranks exchange heads, the core inside sees whole sequences;
where they exchange keys, blocks of them are attended one after another.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from megalite.config.resolve import head_widths
from megalite.config.schema import RunConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.nn.attention_backend import AttentionBackend
from megalite.nn.attention_core import (
    CoreAttention,
    ScaledDotProductAttention,
    UnfusedAttention,
    VariableLengthAttention,
)
from megalite.nn.context_attention import BlockwiseAttention, HeadExchange
from megalite.nn.module import Build
from megalite.nn.tokens import Tokens, cumulative_lengths
from megalite.precision.policy import Precision

_TRIED_TOKENS = 128

_CORES: dict[str, type[CoreAttention]] = {
    "unfused": UnfusedAttention,
    "sdpa": ScaledDotProductAttention,
    "varlen": VariableLengthAttention,
}


def core_attention(build: Build, backend: AttentionBackend) -> CoreAttention:
    """The kernel that was chosen, for this rank's part of the sequences."""
    core: CoreAttention
    if build.mesh.ring.size > 1:
        core = BlockwiseAttention(build, backend)
    else:
        core = _CORES[backend.kernel](build, backend)
    return core if build.mesh.heads.size == 1 else HeadExchange(build, backend, core)


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
