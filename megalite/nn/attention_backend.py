"""The kernels of attention, and which of them runs: decided once, and printed.

Key idea: the choice is a function of configuration and device, so a request that can't be honoured is refused before
any process group exists. `unfused` and `local` are plain matrix products whose dropout is a function of its place;
the kernels of `scaled_dot_product_attention` drop out from torch's own stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.nn.attention import SDPBackend

from megalite.config.resolve import context_exchange, heads_exchanged, parse_window
from megalite.config.schema import ModelConfig, RunConfig


@dataclass(frozen=True)
class AttentionBackend:
    """`kernel`: unfused, sdpa or varlen. `sdpa`: the kernels that scaled_dot_product_attention may use; empty: any.
    `gathers_keys`: of context-parallel ranks, all at once; else they go round in a ring."""

    kernel: str
    sdpa: tuple[SDPBackend, ...]
    reason: str
    gathers_keys: bool = False

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
    return replace(_choose(config, device_type), gathers_keys=context_exchange(config.layout) == "all_gather")


def _choose(config: RunConfig, device_type: str) -> AttentionBackend:
    model, asked = config.model, config.model.attention_backend
    half = config.precision.bf16 or config.precision.fp16
    apart = config.data.reset_attention_mask or config.finetune.sft_packing
    masked = apart or bounded_window(model) is not None
    drops = model.attention_dropout > 0.0
    if asked in ("unfused", "local"):
        return AttentionBackend("unfused", (), f"--attention-backend {asked}")
    by_blocks = config.layout.context_parallel_size > heads_exchanged(config.layout)
    if device_type == "cuda" and by_blocks and (masked or drops):
        # The fused kernels that return sums of exponentials take no mask, and drop out from torch's own stream.
        if asked != "auto":
            raise ValueError(
                f"--attention-backend {asked} on CUDA has neither masks nor dropout with --cp-comm-type "
                f"{context_exchange(config.layout)}: use --attention-backend unfused, or --cp-comm-type a2a"
            )
        return AttentionBackend("unfused", (), "blocks of keys with masks or dropout need plain matrix products")
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
