"""Small random models of `transformers` as folders, and what the room needs of a model of ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models import hf_models
from tests.models.hf_models import LAYERS

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

LATENT = {
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "first_k_dense_replace": 2,
}
"""Fields of DeepSeek's attention, and no experts."""
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {}),
    "gpt2, exact gelu, own width, untied": (
        "GPT2",
        {"activation_function": "gelu", "n_inner": 40, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-4},
    ),
    "llama, grouped, tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama, wide heads, all biases": (
        "Llama",
        {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
    ),
    "llama, biases in the attention alone": ("Llama", {"num_key_value_heads": 2, "attention_bias": True}),
    "llama 3 scaling": (
        "Llama",
        {"num_key_value_heads": 2, "head_dim": 16, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ),
    "llama, yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "truncate": False,
            }
        },
    ),
    "qwen3, longrope": (
        "Qwen3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0, 1.1, 1.5, 2.0],
                "long_factor": [1.5, 2.0, 3.5, 8.0],
            },
            "head_dim": 8,
        },
    ),
    "llama, dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "mistral, window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2, window": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "deepseek v3": ("DeepseekV3", {**LATENT, "q_lora_rank": 20}),
    "deepseek v3, yarn, halves, no latent queries": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
            },
        },
    ),
    "deepseek v2": ("DeepseekV2", {**LATENT, "q_lora_rank": 20}),
    "deepseek v2, yarn, no latent queries": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek v3, experts": (
        "DeepseekV3",
        {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": 20,
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek v2, experts": (
        "DeepseekV2",
        {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek v2, experts, best of groups": (
        "DeepseekV2",
        {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": 20,
            "n_routed_experts": 8,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
    ),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 6, "rms_norm_eps": 1e-5}),
    "qwen2 moe": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "num_key_value_heads": 2,
            "num_experts": 6,
            "shared_expert_intermediate_size": 24,
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {**EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "norm_topk_prob": True},
    ),
    "qwen3 moe, a dense layer, weights as they are": (
        "Qwen3Moe",
        {**EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "mlp_only_layers": [1]},
    ),
    "qwen2 moe, window": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "num_experts": 6,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention"] * LAYERS,
        },
    ),
    "qwen3 moe, window": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 16, "num_experts": 6, "use_sliding_window": True, "sliding_window": 5},
    ),
    "glm": ("Glm", {"num_key_value_heads": 2, "head_dim": 8}),
    "glm, a quarter turned, no bias": (
        "Glm",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
}


def model_of(case: str) -> nn.Module:
    kind, fields = CASES[case]
    return hf_models.gpt2(**fields) if kind == "GPT2" else hf_models.llama_like(kind, **fields)


def save(case: str, folder: Path, *, dtype: torch.dtype = torch.float32, shard_size: str = "1GB") -> Path:
    """The folder that transformers makes of a case."""
    model = model_of(case).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard_size)  # type: ignore[operator]
    return folder


def save_classifier(case: str, folder: Path, names: Sequence[str], **fields: Any) -> Path:
    """A random classifier of transformers with a case's network; `fields` of `config.json` besides."""
    from transformers import AutoModelForSequenceClassification

    config = model_of(case).config
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    for name, value in (labels | fields).items():
        setattr(config, name, value)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    hf_models.randomize(model)
    model.save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder."""
    result: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        result |= load_file(file)
    return result


def change_tensors(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a folder of one file."""
    content: dict[str, Any] = {**tensors(folder), **change}
    kept = {name: tensor for name, tensor in content.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, change: dict[str, Any], remove: tuple[str, ...] = ()) -> None:
    """Replace, add or remove fields of a folder's `config.json`."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text("utf-8")), **change}
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in remove}), encoding="utf-8")


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same names, number formats and bits."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
