"""Tiny random models of `transformers`, and their weights in megalite's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.models.gpt import GPTStage
from megalite.nn.module import named_specs

HIDDEN, HEADS, LAYERS, VOCABULARY = 32, 4, 2, 131


def randomize(model: nn.Module, seed: int = 5) -> None:
    """Weights large enough that every part of the model shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            is_norm = "norm" in name or ".ln_" in name
            parameter.copy_(1 + noise if is_norm and name.endswith("weight") else noise)


def fill(model: GPTStage, values: dict[str, Tensor]) -> None:
    """Set every parameter; both sides must name the same ones. Padding rows stay."""
    parameters = {name: (parameter, spec) for name, parameter, spec in named_specs(model)}
    assert parameters.keys() == values.keys()
    with torch.no_grad():
        for name, (parameter, spec) in parameters.items():
            assert values[name].shape == spec.shape, name
            (box,) = spec.boxes
            parameter[box.local_slices] = values[name].to(parameter.dtype)


def gpt2(**overrides: Any) -> nn.Module:
    """A GPT-2 of transformers in evaluation."""
    from transformers import GPT2Config, GPT2LMHeadModel

    fields = {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 64, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(**{**fields, **overrides}))
    randomize(model)
    return model.eval()


def gpt2_values(model: nn.Module) -> dict[str, Tensor]:
    """Its weights under megalite's names. transformers' Conv1D holds [in, out], and c_attn's outputs are all queries,
    all keys, all values."""
    state = model.state_dict()
    values = {
        "embedding.word_embeddings.weight": state["transformer.wte.weight"],
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": state["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": state["transformer.ln_f.bias"],
    }
    names = {
        "input_layernorm": "ln_1",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    for layer in range(LAYERS):
        here, there = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        for ours, theirs in names.items():
            weight = state[f"{there}.{theirs}.weight"]
            values[f"{here}.{ours}.weight"] = weight if "norm" in ours else weight.t()
            values[f"{here}.{ours}.bias"] = state[f"{there}.{theirs}.bias"]
        qkv = state[f"{there}.attn.c_attn.weight"].t().reshape(3, HEADS, -1, HIDDEN)
        values[f"{here}.self_attention.linear_qkv.weight"] = qkv.transpose(0, 1)
        values[f"{here}.self_attention.linear_qkv.bias"] = (
            state[f"{there}.attn.c_attn.bias"].reshape(3, HEADS, -1).transpose(0, 1)
        )
    return values


def llama_like(kind: str, **overrides: Any) -> nn.Module:
    """A model of transformers' Llama family (Llama, Mistral, Qwen2, Qwen3, Glm) in evaluation."""
    import transformers

    fields = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    }
    config = getattr(transformers, f"{kind}Config")(**{**fields, **overrides})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    randomize(model)
    return model.eval()


def llama_values(model: nn.Module, groups: int) -> dict[str, Tensor]:
    """Its weights under megalite's names; heads are gathered by group as queries, key, value."""
    state = model.state_dict()
    values = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if not model.config.tie_word_embeddings:
        values["output_layer.weight"] = state["lm_head.weight"]
    for layer in range(LAYERS):
        here, there = f"decoder.layers.{layer}", f"model.layers.{layer}"
        values[f"{here}.input_layernorm.weight"] = state[f"{there}.input_layernorm.weight"]
        values[f"{here}.pre_mlp_layernorm.weight"] = state[f"{there}.post_attention_layernorm.weight"]
        values[f"{here}.mlp.linear_fc2.weight"] = state[f"{there}.mlp.down_proj.weight"]
        values[f"{here}.mlp.linear_fc1.weight"] = _gate_and_up(state, f"{there}.mlp")
        values[f"{here}.self_attention.linear_proj.weight"] = state[f"{there}.self_attn.o_proj.weight"]
        for part in ("weight", "bias"):
            if f"{there}.self_attn.q_proj.{part}" in state:
                pieces = [state[f"{there}.self_attn.{name}_proj.{part}"] for name in "qkv"]
                values[f"{here}.self_attention.linear_qkv.{part}"] = _by_group(pieces, groups)
        for name in ("q", "k"):
            if f"{there}.self_attn.{name}_norm.weight" in state:
                values[f"{here}.self_attention.{name}_layernorm.weight"] = state[
                    f"{there}.self_attn.{name}_norm.weight"
                ]
    return values


def _gate_and_up(state: dict[str, Tensor], prefix: str) -> Tensor:
    if f"{prefix}.gate_up_proj.weight" in state:
        return torch.stack(state[f"{prefix}.gate_up_proj.weight"].chunk(2))
    return torch.stack((state[f"{prefix}.gate_proj.weight"], state[f"{prefix}.up_proj.weight"]))


def _by_group(pieces: list[Tensor], groups: int) -> Tensor:
    """Rows of q, k and v → [groups, queries + 2, head width, ...]."""
    width = pieces[1].shape[0] // groups
    split = [piece.reshape(groups, -1, width, *piece.shape[1:]) for piece in pieces]
    return torch.cat(split, dim=1)


def in_float64(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The model in float64 throughout: transformers' norms and rotary tables compute in fp32 even in a double model."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt())

    def rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        parameters = self.config.rope_parameters
        assert parameters["rope_type"] in ("default", "linear")
        head_dim = getattr(self.config, "head_dim", None) or HIDDEN // HEADS
        width = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        positions = position_ids.double() / parameters.get("factor", 1.0)
        angles = positions[..., None] / parameters["rope_theta"] ** exponents
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    patches: list[tuple[type, Callable[..., Any]]] = [
        (type(model.model.norm), norm),
        (type(model.model.rotary_emb), rotary),
    ]
    for kind, forward in patches:
        monkeypatch.setattr(kind, "forward", forward)
    return model.double()
