"""Logits against transformers with the same weights."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

from megalite.checkpoint.huggingface.config import parse_config
from megalite.distributed.mesh import single_process_mesh
from megalite.models.gpt import GPTStage, plain_tokens
from megalite.precision.policy import Precision
from tests.checkpoint.huggingface.folders import CASES, model_of
from tests.helpers import FP32, FP64, tiny_model, tiny_tokens
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


IN_FP32 = ("llama 3 scaling", "deepseek v2", "deepseek v3, experts", "mixtral", "qwen2 moe", "qwen3 moe")
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


def described(theirs: nn.Module, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> tuple[GPTStage, nn.Module]:
    """Our model of their configuration with their weights, and theirs in the precision."""
    network = parse_config(theirs.config.to_dict(), "config.json").model
    if precision is FP64:
        theirs = theirs.double() if theirs.config.model_type == "gpt2" else hf_models.in_float64(theirs, monkeypatch)
    ours = tiny_model(single_process_mesh(), precision, **asdict(network))
    hf_models.fill(ours, hf_models.values(theirs, ours))
    return ours, theirs


@pytest.mark.parametrize(
    ("case", "precision"),
    # transformers computes these frequencies, DeepSeek-V2's rotation and routers' scores in fp32 even in a double
    # model: no truth in fp64.
    [(case, p) for case in CASES for p in (FP32, FP64) if p is FP32 or not case.startswith(IN_FP32)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_architecture(case: str, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(*described(model_of(case), precision, monkeypatch), precision)


@pytest.mark.parametrize(
    ("precision", "length"),
    [(FP64, 24), (FP64, 25), (FP64, 47), (FP32, 47)],
    ids=lambda value: f"{value} tokens" if isinstance(value, int) else value.name,
)
@pytest.mark.parametrize("case", hf_models.SCALINGS)
def test_scaled_rotary_positions_up_to_the_original_length_and_beyond(
    case: str, precision: Precision, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, scaling = hf_models.SCALINGS[case]
    head_dim = 32 if kind == "Glm" else 16  # of which it rotates a half
    # With this base yarn's ramp goes over several pairs.
    rope = {"rope_parameters": {"rope_theta": 100.0, **scaling}}
    theirs = hf_models.llama_like(kind, num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=24, **rope)
    compare(*described(theirs, precision, monkeypatch), precision, TOKENS[:, :length])
