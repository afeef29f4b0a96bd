"""Named model sizes: `--preset llama-7b` fills the network flags that weren't given.

A preset is a dictionary of `ModelConfig` fields and says nothing about data, optimizer or layout. The numbers are those
of the published models, so `tests/config/test_presets.py` can check each against its published parameter count; only
`llama-tiny` and `llama-125m` are shapes of our own, for tests and small runs.
"""

from __future__ import annotations

import difflib
from typing import Any

from megalite.config.errors import FlagError


def _gpt2(layers: int, hidden: int, heads: int, positions: int = 1024) -> dict[str, Any]:
    """Radford et al. 2019 and Brown et al. 2020: learned positions, tanh GELU, biases, tied embeddings, dropout 0.1."""
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "position_embedding_type": "learned_absolute",
        "openai_gelu": True,
        "norm_epsilon": 1e-5,
        "init_method_std": 0.02,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    }


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    positions: int,
    *,
    groups: int | None = None,
    epsilon: float = 1e-5,
    base: float = 10000.0,
    scaling: float | None = None,
    tied: bool = False,
) -> dict[str, Any]:
    """Touvron et al. 2023 and later: rotary positions, RMSNorm, SwiGLU, no biases, no dropout, mostly untied.

    `groups`: key/value heads, where fewer than `heads`. `scaling`: Llama 3.1's factor of rotary scaling.
    """
    preset = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "position_embedding_type": "rope",
        "rotary_base": base,
        "normalization": "RMSNorm",
        "norm_epsilon": epsilon,
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not tied,
        "init_method_std": 0.02,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if groups is not None:
        preset |= {"group_query_attention": True, "num_query_groups": groups}
    if scaling is not None:
        preset |= {"use_rope_scaling": True, "rope_scaling_factor": scaling}
    return preset


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-345m": _gpt2(24, 1024, 16),  # the paper counts 345M, the weights are 355M: the same model
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    "gpt3-350m": _gpt2(24, 1024, 16, 2048),
    "gpt3-1.3b": _gpt2(24, 2048, 16, 2048),  # the paper's 24 heads of 128 don't make its 2048 wide and 1.3B
    "gpt3-2.7b": _gpt2(32, 2560, 32, 2048),
    "gpt3-6.7b": _gpt2(32, 4096, 32, 2048),
    "gpt3-13b": _gpt2(40, 5120, 40, 2048),  # likewise, the paper's 5140 isn't 40 heads of 128
    "gpt3-175b": _gpt2(96, 12288, 96, 2048),
    "llama-tiny": _llama(2, 64, 4, 192, 128, groups=2),
    "llama-125m": _llama(12, 768, 12, 2048, 2048),
    "llama-1b": _llama(22, 2048, 32, 5632, 2048, groups=4),  # TinyLlama 1.1B
    "llama-7b": _llama(32, 4096, 32, 11008, 4096),  # Llama 2
    "llama-13b": _llama(40, 5120, 40, 13824, 4096),  # Llama 2
    "llama-70b": _llama(80, 8192, 64, 28672, 4096, groups=8),  # Llama 2
    "llama3-8b": _llama(32, 4096, 32, 14336, 8192, groups=8, base=500000.0),
    "llama3-70b": _llama(80, 8192, 64, 28672, 8192, groups=8, base=500000.0),
    "llama3.1-8b": _llama(32, 4096, 32, 14336, 131072, groups=8, base=500000.0, scaling=8.0),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, 131072, groups=8, base=500000.0, scaling=32.0, tied=True),
}


def preset_fields(name: str) -> dict[str, Any]:
    """The `ModelConfig` fields of a preset. A FlagError lists the valid names."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}? " if near else ""
        raise FlagError(f"--preset {name}: no such preset; {hint}valid: {', '.join(PRESETS)}")
    return dict(PRESETS[name])
