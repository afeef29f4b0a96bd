"""Logits against transformers with the same weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.checkpoint.huggingface.config import parse_config
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage, plain_tokens
from megalite.precision.policy import Precision
from tests.helpers import FP32, FP64, LLAMA, tiny_model, tiny_tokens
from tests.models import hf_models

TOKENS = tiny_tokens(2, 48)[:, :-1]
# What one process computes in fp32 differs from transformers by rounding; the logits are of order 1.
TOLERANCE = {"fp32": 2e-5, "fp64": 1e-10}


def our_logits(model: GPTStage, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model.logits(model(tokens, plain_tokens(tokens))).transpose(0, 1)


def their_logits(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits


def compare(ours: GPTStage, theirs: nn.Module, precision: Precision, tokens: Tensor = TOKENS) -> None:
    a, b = our_logits(ours, tokens), their_logits(theirs, tokens)
    assert a.shape == b.shape
    assert b.std() > 0.15
    assert (a - b).abs().max() < TOLERANCE[precision.name]


GPT2 = {"openai_gelu": True}


@pytest.mark.parametrize("precision", [FP32, FP64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("divisor", [1, 128])
def test_gpt2(precision: Precision, backend: str, divisor: int) -> None:
    theirs = hf_models.gpt2().to(precision.compute)
    overrides = {**GPT2, "attention_backend": backend, "make_vocab_size_divisible_by": divisor}
    ours = tiny_model(single_process_mesh(), precision, **overrides)
    hf_models.fill(ours, hf_models.values(theirs, ours))
    compare(ours, theirs, precision)


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        ({"openai_gelu": False}, {"activation_function": "gelu"}),
        ({"norm_epsilon": 0.1}, {"layer_norm_epsilon": 0.1}),
    ],
    ids=["exact gelu", "epsilon"],
)
def test_gpt2_variants(overrides: dict[str, Any], fields: dict[str, Any]) -> None:
    theirs = hf_models.gpt2(**fields).double()
    ours = tiny_model(single_process_mesh(), FP64, **{**GPT2, **overrides})
    hf_models.fill(ours, hf_models.values(theirs, ours))
    compare(ours, theirs, FP64)


def test_without_position_embeddings_it_is_gpt2_with_a_table_of_zeros() -> None:
    theirs = hf_models.gpt2().double()
    with torch.no_grad():
        theirs.transformer.wpe.weight.zero_()
    ours = tiny_model(single_process_mesh(), FP64, position_embedding_type="none", **GPT2)
    hf_models.fill(ours, hf_models.values(theirs, ours))
    compare(ours, theirs, FP64)


def test_layernorm_1p_stores_the_weight_minus_one() -> None:
    theirs = hf_models.gpt2().double()
    ours = tiny_model(single_process_mesh(), FP64, apply_layernorm_1p=True, **GPT2)
    values = hf_models.values(theirs, ours)
    values = {k: v - 1 if "layernorm.weight" in k else v for k, v in values.items()}
    hf_models.fill(ours, values)
    compare(ours, theirs, FP64)


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **fields}}


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TIED = {"untie_embeddings_and_output_weights": False}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "every head its own key": ("Llama", {"num_query_groups": 4}, {}),
    "grouped queries": ("Llama", {}, {"num_key_value_heads": 2}),
    "one key for all": ("Llama", {"num_query_groups": 1}, {"num_key_value_heads": 1}),
    "tied": ("Llama", TIED, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "epsilon": ("Llama", {"norm_epsilon": 0.1}, {"num_key_value_heads": 2, "rms_norm_eps": 0.1}),
    "theta": ("Llama", {"rotary_base": 5e5}, {"num_key_value_heads": 2, **rope(rope_theta=5e5)}),
    "wide heads": ("Llama", {"kv_channels": 16}, {"num_key_value_heads": 2, "head_dim": 16}),
    "llama 3 scaling": (
        "Llama",
        {"use_rope_scaling": True, "rotary_base": 5e4, "kv_channels": 16},  # one pair is blended, three are stretched
        {"num_key_value_heads": 2, "head_dim": 16, **rope(**LLAMA3_SCALING, rope_theta=5e4)},
    ),
    "linear scaling": (
        "Llama",
        {"rotary_seq_len_interpolation_factor": 4},
        {"num_key_value_heads": 2, **rope(rope_type="linear", factor=4.0)},
    ),
    # transformers counts the token itself into its window, Megatron-LM does not.
    "sliding window": ("Mistral", {"window_size": "4,0"}, {"num_key_value_heads": 2, "sliding_window": 5}),
    "biases of queries, keys and values": ("Qwen2", {"add_qkv_bias": True}, {"num_key_value_heads": 2}),
    "biases in the attention alone": (
        "Llama",
        {"add_qkv_bias": True, "add_proj_bias": True},
        {"num_key_value_heads": 2, "attention_bias": True},
    ),
    "norm of queries and keys": (
        "Qwen3",
        {"qk_layernorm": True, "kv_channels": 16},
        {"num_key_value_heads": 2, "head_dim": 16},
    ),
    "half of each head turned, in neighbouring pairs": (
        "Glm",
        {"rotary_interleaved": True, "rotary_percent": 0.5, "add_qkv_bias": True, "kv_channels": 8},
        {"num_key_value_heads": 2, "head_dim": 8},
    ),
}
SAME_EPSILON = {"rms_norm_eps": 1e-5}


def yarn(**fields: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, **fields}


LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0],
    "long_factor": [1.5, 2.0, 2.5, 3.5, 5.0, 6.0, 7.0, 8.0],
}
SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("Llama", yarn()),
    "yarn, other borders, not rounded": ("Mistral", yarn(beta_fast=3.0, beta_slow=0.5, truncate=False)),
    "yarn, an attention factor": ("Qwen2", yarn(attention_factor=1.3)),
    "yarn, other weights": ("Qwen3", yarn(mscale=0.7, mscale_all_dim=0.3)),
    "yarn, half of each head": ("Glm", yarn()),
    "dynamic": ("Llama", {"rope_type": "dynamic", "factor": 3.0}),
    "dynamic, half of each head": ("Glm", {"rope_type": "dynamic", "factor": 3.0}),
    "longrope": ("Llama", LONGROPE),
    "longrope, an attention factor": ("Qwen3", {**LONGROPE, "attention_factor": 1.3}),
    "longrope, half of each head": ("Glm", LONGROPE),
}


@pytest.mark.parametrize(
    ("precision", "length"),
    [(FP64, 24), (FP64, 25), (FP64, 47), (FP32, 47)],
    ids=lambda value: f"{value} tokens" if isinstance(value, int) else value.name,
)
@pytest.mark.parametrize("case", SCALINGS)
def test_scaled_rotary_positions_up_to_the_original_length_and_beyond(
    case: str, precision: Precision, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, scaling = SCALINGS[case]
    head_dim = 32 if kind == "Glm" else 16  # of which it rotates a half
    # With this base yarn's ramp goes over several pairs.
    fields = {"head_dim": head_dim, "max_position_embeddings": 24, **rope(**scaling, rope_theta=100.0)}
    theirs = hf_models.llama_like(kind, num_key_value_heads=2, **SAME_EPSILON, **fields)
    described = parse_config(theirs.config.to_dict(), "config.json").model
    if precision is FP64:
        theirs = hf_models.in_float64(theirs, monkeypatch)
    ours = tiny_model(single_process_mesh(), precision, **asdict(described))
    hf_models.fill(ours, hf_models.values(theirs, ours))
    compare(ours, theirs, precision, TOKENS[:, :length])


@pytest.mark.parametrize(
    ("case", "precision"),
    # transformers computes the frequencies of its scaling in fp32 even in a double model: no truth in fp64.
    [(case, p) for case in CASES for p in (FP32, FP64) if (case, p) != ("llama 3 scaling", FP64)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_the_llama_family(case: str, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, overrides, fields = CASES[case]
    theirs = hf_models.llama_like(kind, **{**SAME_EPSILON, **fields})
    if precision is FP64:
        theirs = hf_models.in_float64(theirs, monkeypatch)
    ours = tiny_model(single_process_mesh(), precision, **{**LLAMA, **overrides})
    hf_models.fill(ours, hf_models.values(theirs, ours))
    compare(ours, theirs, precision)
