"""The choice of the attention kernel: honoured, replaced with a reason, or refused with what would be valid."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from megalite.config.schema import ModelConfig, RunConfig
from megalite.nn.attention_backend import AttentionBackend, bounded_window, choose_backend
from megalite.nn.attention_kernels import try_kernel
from tests.helpers import tiny_config


def run_config(asked: str, features: str) -> RunConfig:
    """`features`: words among bf16, fp16, fp64, dropout, documents, window, deterministic."""
    config = RunConfig()
    config.model.attention_backend = asked
    config.model.attention_dropout = 0.1 if "dropout" in features else 0.0
    config.model.window_size = "8,0" if "window" in features else None
    config.data.reset_attention_mask = "documents" in features
    config.training.deterministic_mode = "deterministic" in features
    for name in ("bf16", "fp16", "fp64"):
        setattr(config.precision, name, name in features)
    return config


FLASH = (SDPBackend.FLASH_ATTENTION,)
FUSED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@pytest.mark.parametrize(
    ("device", "asked", "features", "kernel", "sdpa"),
    [
        ("cpu", "auto", "", "sdpa", ()),
        ("cpu", "auto", "documents window bf16", "sdpa", ()),
        ("cpu", "auto", "dropout", "unfused", ()),
        ("cpu", "flash", "bf16 documents", "sdpa", FLASH),
        ("cpu", "unfused", "dropout documents", "unfused", ()),
        ("cpu", "local", "", "unfused", ()),
        ("cuda", "auto", "", "sdpa", ()),
        ("cuda", "auto", "bf16 dropout", "sdpa", ()),
        ("cuda", "auto", "bf16 documents", "varlen", ()),
        ("cuda", "auto", "fp16 window", "varlen", ()),
        ("cuda", "auto", "documents", "unfused", ()),
        ("cuda", "auto", "bf16 documents dropout", "unfused", ()),
        ("cuda", "flash", "bf16", "sdpa", FLASH),
        ("cuda", "flash", "bf16 window", "varlen", ()),
        ("cuda", "fused", "bf16", "sdpa", FUSED),
        ("cuda", "fused", "", "sdpa", FUSED),
        ("cuda", "unfused", "documents window dropout fp64", "unfused", ()),
        # cuDNN's kernel sums in any order
        ("cuda", "fused", "bf16 deterministic", "sdpa", (SDPBackend.EFFICIENT_ATTENTION,)),
        ("cuda", "flash", "bf16 deterministic", "sdpa", FLASH),
        ("cuda", "flash", "bf16 window deterministic", "varlen", ()),
        ("cuda", "auto", "deterministic", "sdpa", (*FLASH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)),
    ],
)
def test_the_choice_is_honoured(
    device: str, asked: str, features: str, kernel: str, sdpa: tuple[SDPBackend, ...]
) -> None:
    backend = choose_backend(run_config(asked, features), device)
    assert (backend.kernel, backend.sdpa) == (kernel, sdpa)
    assert backend.reason


@pytest.mark.parametrize(
    ("device", "asked", "features", "advice"),
    [
        ("cpu", "flash", "dropout", "--attention-dropout 0"),
        ("cpu", "fused", "dropout", "unfused"),
        ("cuda", "flash", "", "--bf16"),
        ("cuda", "flash", "fp64", "--bf16"),
        ("cuda", "flash", "documents", "unfused"),
        ("cuda", "flash", "bf16 documents dropout", "--attention-dropout 0"),
        ("cuda", "fused", "bf16 documents", "unfused"),
        ("cuda", "fused", "bf16 window", "unfused"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_what_would_be_valid(
    device: str, asked: str, features: str, advice: str
) -> None:
    with pytest.raises(ValueError, match=f"--attention-backend {asked}") as caught:
        choose_backend(run_config(asked, features), device)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("text", "window"), [(None, None), ("8,0", 8), ("(8, 0)", 8), ("-1,0", None), ("-1,-1", None), ("0,0", 0)]
)
def test_a_window_is_bounded_by_the_first_of_megatrons_two_numbers(text: str | None, window: int | None) -> None:
    assert bounded_window(ModelConfig(window_size=text)) == window


@pytest.mark.parametrize(
    "sdpa", [(SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION), FLASH], ids=["fused", "flash"]
)
@pytest.mark.parametrize("network", [{}, {"num_query_groups": 2, "window_size": "8,0"}], ids=["plain", "grouped"])
def test_a_kernel_that_cannot_run_here_is_refused_with_the_flags(
    sdpa: tuple[SDPBackend, ...], network: dict[str, object]
) -> None:
    """A CPU has none of the kernels of `fused` on CUDA, and has flash."""
    config = RunConfig(model=tiny_config(attention_backend="fused", **network))
    config.data.seq_length = 16
    backend = AttentionBackend("sdpa", sdpa, "")
    if sdpa == FLASH:
        try_kernel(config, backend, torch.device("cpu"))
        return
    with pytest.raises(ValueError, match="--attention-backend fused can't run this network on cpu: No .*auto or unf"):
        try_kernel(config, backend, torch.device("cpu"))
