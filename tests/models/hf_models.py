"""Tiny random models of `transformers`, and their weights in megalite's layout."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megalite.checkpoint.huggingface.families import ARCHITECTURES
from megalite.checkpoint.huggingface.files import Stored
from megalite.checkpoint.huggingface.weights import LogicalWeights
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
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)


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


class StateDict:
    """A model's weights as `Tensors` to read from, under the names of its files."""

    def __init__(self, model: nn.Module):
        self.tensors = model.state_dict()
        if any(".experts." in name for name in self.tensors):  # in memory those of all experts are one tensor
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)  # type: ignore[operator]
                self.tensors = load_file(Path(folder, "model.safetensors"))

    @property
    def stored(self) -> dict[str, Stored]:
        return {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        return self.tensors[name][slices]


def values(model: nn.Module, ours: GPTStage) -> dict[str, Tensor]:
    """The weights of transformers' `model` under the names of `ours`, whole."""
    architecture = ARCHITECTURES[model.config.model_type]
    shapes = {name: spec.shape for name, _, spec in named_specs(ours)}
    weights = LogicalWeights(architecture, StateDict(model), shapes, model.config.model_type)
    return {name: weights.read_whole(name) for name in shapes}


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
    model.set_experts_implementation("eager")  # the grouped kernels know no float64
    randomize(model)
    return model.eval()


def _yarn(**fields: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, **fields}


_LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0],
    "long_factor": [1.5, 2.0, 2.5, 3.5, 5.0, 6.0, 7.0, 8.0],
}
SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("Llama", {"rope_type": "linear", "factor": 4.0}),
    "yarn": ("Llama", _yarn()),
    "yarn, other borders, not rounded": ("Mistral", _yarn(beta_fast=3.0, beta_slow=0.5, truncate=False)),
    "yarn, an attention factor": ("Qwen2", _yarn(attention_factor=1.3)),
    "yarn, other weights": ("Qwen3", _yarn(mscale=0.7, mscale_all_dim=0.3)),
    "yarn, half of each head": ("Glm", _yarn()),
    "dynamic": ("Llama", {"rope_type": "dynamic", "factor": 3.0}),
    "dynamic, half of each head": ("Glm", {"rope_type": "dynamic", "factor": 3.0}),
    "longrope": ("Llama", _LONGROPE),
    "longrope, an attention factor": ("Qwen3", {**_LONGROPE, "attention_factor": 1.3}),
    "longrope, half of each head": ("Glm", _LONGROPE),
}
"""Kind of model and `rope_parameters` for an original length of 24 and heads of which 16 channels are rotated."""


def rotary_speed(pair: int, width: int, length: int, longest: int, parameters: dict[str, Any]) -> float:
    """Radians per position of one pair in a sequence of so many tokens, by the papers' formulas."""
    kind, factor = parameters["rope_type"], parameters.get("factor", 1.0)
    base, share = parameters["rope_theta"], 2 * pair / width
    original = parameters.get("original_max_position_embeddings", longest)
    if kind == "dynamic":  # Peng et al. 2023: the base grows with the length
        base *= (factor * max(length, original) / original - (factor - 1)) ** (width / (width - 2))
    speed: float = base**-share
    if kind == "linear":
        return speed / factor
    if kind == "longrope":  # Ding et al. 2024: a factor for each pair
        return speed / parameters["long_factor" if length > original else "short_factor"][pair]
    if kind == "yarn":  # Peng et al. 2023: the ramp is linear in the number of the pair

        def border(turns: float) -> float:  # the pair that makes so many turns in the original length
            return width / 2 * math.log(original / math.tau / turns, base)

        low, high = border(parameters.get("beta_fast", 32)), border(parameters.get("beta_slow", 1))
        if parameters.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        ramp = min(max((pair - low) / (high - low), 0), 1)
        return (1 - ramp) * speed + ramp * speed / factor
    assert kind in ("default", "dynamic")
    return speed


def rotary_amplitude(parameters: dict[str, Any]) -> float:
    """What multiplies cosines and sines."""
    kind, factor = parameters["rope_type"], parameters.get("factor", 1.0)
    if kind not in ("yarn", "longrope") or "attention_factor" in parameters:
        return float(parameters.get("attention_factor", 1.0))
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor, parameters["original_max_position_embeddings"]))
    above, below = parameters.get("mscale", 1.0), parameters.get("mscale_all_dim", 0.0)
    return (1 + above * math.log(factor) / 10) / (1 + below * math.log(factor) / 10)


def in_float64(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The model in float64 throughout: transformers' norms and rotary tables compute in fp32 even in a double model."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt())

    def rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        parameters = self.config.rope_parameters
        head_dim = getattr(self.config, "head_dim", None) or HIDDEN // HEADS
        width = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        length, longest = int(position_ids.max()) + 1, self.config.max_position_embeddings
        speeds = [rotary_speed(pair, width, length, longest, parameters) for pair in range(width // 2)]
        angles = position_ids.double()[..., None] * torch.tensor(speeds, dtype=torch.float64)
        angles = torch.cat((angles, angles), dim=-1)
        factor = rotary_amplitude(parameters)
        return angles.cos() * factor, angles.sin() * factor

    patches: list[tuple[type, Callable[..., Any]]] = [
        (type(model.model.norm), norm),
        (type(model.model.rotary_emb), rotary),
    ]
    for kind, forward in patches:
        monkeypatch.setattr(kind, "forward", forward)
    return model.double()
