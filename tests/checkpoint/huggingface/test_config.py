"""`config.json` to the network and back: nothing of it is lost, and what isn't understood is refused by name.

`published_configs.json` holds those of public models of the six families: in small, each gives the logits of
`transformers`, or is refused for the reason that the file states.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.config import describe_network, network_settings, parse_config
from megalite.checkpoint.huggingface.families import ARCHITECTURES
from megalite.config.check import check
from megalite.config.resolve import resolve
from megalite.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.models.whole import build_whole, outputs
from tests.checkpoint.huggingface.folders import LLAMA3
from tests.helpers import LATENT, LLAMA, VOCABULARY, tiny_config
from tests.models import hf_models

EVERY: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
NAMES = ["gpt2", "HuggingFaceTB/SmolLM2-135M", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-7B"]
PUBLISHED = {name: EVERY[name]["config"] for name in NAMES}
TINY = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MISTRAL = {**TINY, "model_type": "mistral", "num_key_value_heads": 2}
QWEN2 = {**TINY, "model_type": "qwen2", "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.0, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.5, 4.0],
}


def network(values: dict[str, Any]) -> ModelConfig:
    return parse_config(values, "config.json").model


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_and_nothing_of_the_network_is_lost(name: str) -> None:
    found = parse_config(PUBLISHED[name], "config.json")
    architecture, written = describe_network(found.model, found.vocab_size)
    assert architecture is found.architecture
    unlike = {
        key: (value, written.get(key))
        for key, value in PUBLISHED[name].items()
        if key in written and written[key] != value
    }
    unlike.pop("sliding_window", None)  # without meaning where use_sliding_window is false
    unlike.pop("max_window_layers", None)
    assert unlike == {}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_read_is_a_sound_and_resolved_network(name: str) -> None:
    config = RunConfig(model=network(PUBLISHED[name]))
    config.data.seq_length, config.training.micro_batch_size = 64, 1
    config.learning_rate.lr, config.training.train_iters, config.data.mock_data = 1e-4, 1, True
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "NullTokenizer", 100
    assert check(config, 1) == []
    assert resolve(config, 1).model == config.model


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({"rope_scaling": None}, {"rope_type": "default"}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
        ),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_theta": 5e5, **LLAMA3}),
    ],
)
def test_old_and_new_rotary_keys_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert network({**TINY, **old}) == network({**TINY, "rope_parameters": new})


SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **hf_models.SCALINGS,
    "llama3, other numbers": ("Llama", {**LLAMA3, "low_freq_factor": 2.0, "original_max_position_embeddings": 16}),
}


@pytest.mark.parametrize("case", SCALINGS)
def test_scaling_goes_out_as_transformers_had_it(case: str) -> None:
    from transformers import AutoConfig

    kind, scaling = SCALINGS[case]
    # GLM rotates half of each head.
    values = {**TINY, "model_type": kind.lower(), "num_key_value_heads": 2, "head_dim": 32 if kind == "Glm" else 16}
    theirs = AutoConfig.for_model(**{**values, "rope_parameters": {**scaling, "rope_theta": 5e4}})
    found = parse_config(theirs.to_dict(), "config.json")
    architecture, written = describe_network(found.model, found.vocab_size)
    assert architecture.model_type == kind.lower()
    assert network(written) == found.model
    assert AutoConfig.for_model(**written).rope_parameters == theirs.rope_parameters


def test_what_transformers_derives_is_derived() -> None:
    rest = {
        name: value for name, value in LONGROPE.items() if name not in ("factor", "original_max_position_embeddings")
    }
    model = network({**TINY, "original_max_position_embeddings": 16, "rope_scaling": rest})
    assert (model.rope_scaling_factor, model.rope_original_max_position_embeddings) == (4.0, 16)
    model = network({**TINY, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert (model.rope_scaling_factor, model.rope_original_max_position_embeddings) == (4.0, 64)
    model = network({**TINY, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    assert (model.position_embedding_type, model.rope_original_max_position_embeddings) == ("dynamic", 64)


def test_part_of_a_head_is_rotated_as_either_key_says() -> None:
    glm = {**TINY, "model_type": "glm"}
    assert network(glm).rotary_percent == 0.5
    assert network({**glm, "partial_rotary_factor": 0.25}).rotary_percent == 0.25
    assert network({**glm, "rope_parameters": {"partial_rotary_factor": 0.25}}).rotary_percent == 0.25


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**TINY, "attn_logit_softcapping": 30.0}, "unknown fields: attn_logit_softcapping 30.0"),
        ({**TINY, "a": 1, "b": {}}, "unknown fields: a 1, b {}"),
        (
            {**TINY, "quantization_config": {"bits": 4, "quant_method": "awq"}},
            "quantization_config: the weights are quantized (awq), and megalite reads only plain ones",
        ),
        ({**TINY, "quantization": {"group_size": 64, "bits": 4}}, "quantization: the weights are quantized, and"),
        ({**TINY, "rope_interleaved": True}, "unknown fields: rope_interleaved True"),
        ({**TINY, "auto_map": {}}, "auto_map: the model needs its own code"),
        ({**TINY, "model_type": "glm4"}, "model_type 'glm4' is not supported; supported: gpt2, llama"),
        ({k: v for k, v in TINY.items() if k != "hidden_size"}, "config.json lacks hidden_size"),
        ({**TINY, "hidden_size": "32"}, "hidden_size '32' is not supported: it must be of type int"),
        ({**TINY, "num_hidden_layers": True}, "num_hidden_layers True is not supported"),
        ({**TINY, "num_attention_heads": 0}, "num_attention_heads 0 is not supported: it must be at least 1"),
        ({**TINY, "num_key_value_heads": 3}, "describes an impossible network: --num-query-groups 3 does not divide"),
        ({**TINY, "rms_norm_eps": -1.0}, "describes an impossible network: --norm-epsilon -1.0"),
        ({**TINY, "model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({**TINY, "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: supported: 'silu'"),
        ({**TINY, "mlp_bias": True}, "mlp_bias True is not supported: mlp_bias needs attention_bias"),
        ({**TINY, "rope_scaling": {"rope_type": "su", "factor": 4.0}}, "rope_scaling: rope_type 'su'"),
        (
            {**TINY, "rope_scaling": {**YARN, "factor": 0.5}},
            "--rope-scaling-factor 0.5: --position-embedding-type yarn",
        ),
        ({**TINY, "rope_scaling": {**YARN, "mscale": 0.5}}, "need each other"),
        (
            {**TINY, "rope_scaling": {**YARN, "mscale": 0.0, "mscale_all_dim": 1.0}},
            "--yarn-mscale 0.0: must be above 0",
        ),
        ({**TINY, "rope_scaling": {**YARN, "beta_fast": 0.5}}, "--yarn-beta-fast 0.5 is below --yarn-beta-slow 1.0"),
        ({**TINY, "rope_scaling": {**YARN, "short_factor": [1.0]}}, "unknown fields: short_factor [1.0]"),
        (
            {**TINY, "rope_scaling": {**YARN, "mscale": 0.5, "mscale_all_dim": 1.0, "attention_factor": 1.0}},
            "exclude each other: both decide the attention factor",
        ),
        ({**TINY, "original_max_position_embeddings": 8, "rope_scaling": YARN}, "original_max_position_embeddings 16"),
        ({**TINY, "rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling lacks factor"),
        (
            {**TINY, "head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "needs at least 4 rotated channels",
        ),
        ({**TINY, "rope_scaling": {**LONGROPE, "long_factor": ["a"]}}, "long_factor ['a'] is not supported"),
        ({**TINY, "rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "--longrope-long-factor has 1 numbers, but 4"),
        (
            {**TINY, "rope_scaling": {**LONGROPE, "long_factor": [0, 1, 1, 1]}},
            "--longrope-long-factor 0.0: must be above",
        ),
        ({**TINY, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_scaling lacks long_factor"),
        ({**TINY, "rope_scaling": {"type": "linear", "factor": 0.5}}, "factor 0.5 is not supported"),
        ({**TINY, "rope_scaling": {"type": "linear"}}, "rope_scaling lacks factor"),
        ({**TINY, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor 4.0 is not supported"),
        ({**TINY, "rope_parameters": {"rope_type": "default", "mscale": 1.0}}, "unknown fields: mscale 1.0"),
        ({**TINY, "rope_parameters": {"full_attention": {}}}, "must be the same in all layers"),
        ({**TINY, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta 500000.0 is not supported"),
        ({**TINY, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, "layer_types"),
        ({**QWEN2, "model_type": "qwen3", "attention_bias": True}, "attention_bias True is not supported"),
        (
            {**PUBLISHED["gpt2"], "embd_pdrop": 0.0},
            "embd_pdrop 0.0 is not supported: it must equal resid_pdrop, which is 0.1",
        ),
        ({**PUBLISHED["gpt2"], "activation_function": "relu"}, "activation_function 'relu' is not supported"),
        ({**PUBLISHED["gpt2"], "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({**PUBLISHED["gpt2"], "add_cross_attention": True}, "unknown fields: add_cross_attention True"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        network(values)
    assert message in str(raised.value)
    assert "config.json" in str(raised.value)


@pytest.mark.parametrize(
    "field",
    [
        {"use_mrope": False},
        {"gradient_checkpointing": True},
        {"max_sequence_length": 9},
        {"hidden_dropout": 0.1},
        {"a_field_of_tomorrow": None},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_field_that_does_not_change_the_function_is_noted(field: dict[str, Any]) -> None:
    found = parse_config({**TINY, **field}, "config.json")
    ((name, value),) = field.items()
    assert found.notes == [f"config.json: not used: {name} {value}"]
    assert found.model == network(TINY)


def test_fields_of_authors_and_of_other_programs_are_of_no_account() -> None:
    others = {"author": "A", "license": "mit", "_flash_attn_2_enabled": True, "badwordsids": [[0]], "eos_token": 2}
    assert parse_config({**TINY, **others}, "config.json") == parse_config(TINY, "config.json")


def test_an_unknown_field_is_left_unused_where_the_user_says_so_and_no_other_is() -> None:
    values = {**TINY, "a": 1, "b": {"c": 2}}
    with pytest.raises(CheckpointError, match="add --ignore-config-field a --ignore-config-field b$"):
        parse_config(values, "config.json")
    with pytest.raises(CheckpointError, match="unknown fields: b "):
        parse_config(values, "config.json", ["a"])
    found = parse_config(values, "config.json", ["b", "a"])
    assert found.notes == ["config.json: not used: a 1, b {'c': 2}"]
    for name, why in (
        ("hidden_size", "isn't an unknown field"),
        ("use_mrope", "changes what the network computes"),
    ):
        with pytest.raises(CheckpointError, match=f"--ignore-config-field {name}: in config.json it {why}"):
            parse_config({**values, "use_mrope": True}, "config.json", ["a", "b", name])


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "glm"])
def test_a_file_without_a_length_has_the_length_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    values = {name: value for name, value in TINY.items() if name not in ("max_position_embeddings", "model_type")}
    length = AutoConfig.for_model(kind).max_position_embeddings
    values |= {"num_key_value_heads": 2, "head_dim": 8}
    assert network({**values, "model_type": kind}).max_position_embeddings == length


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({**MISTRAL, "sliding_window": 5}, "4,0"),
        ({**MISTRAL, "sliding_window": None}, None),
        (MISTRAL, "4095,0"),  # its default
        ({**QWEN2, "sliding_window": 5}, None),
        ({**QWEN2, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}, "4,0"),
        ({**QWEN2, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2}, None),
        ({**QWEN2, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_windows(values: dict[str, Any], window: str | None) -> None:
    assert network(values).window_size == window


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ({}, "gpt2"),
        ({"squared_relu": True}, "gpt2"),
        (LLAMA, "llama"),
        ({**LLAMA, "add_bias_linear": True}, "llama"),
        ({**LLAMA, "window_size": "9,0"}, "mistral"),
        ({**LLAMA, "add_qkv_bias": True, "add_proj_bias": True}, "llama"),
        ({**LLAMA, "add_qkv_bias": True}, "qwen2"),
        ({**LLAMA, "qk_layernorm": True}, "qwen3"),
        ({**LLAMA, "rotary_interleaved": True, "rotary_percent": 0.5}, "glm"),
        ({**LATENT, "norm_epsilon": 1e-6}, "deepseek_v3"),
        ({**LATENT, "norm_epsilon": 1e-6, "rotary_interleaved": True, "q_lora_rank": None}, "deepseek_v3"),
        ({**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 12}, "mixtral"),
        ({**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 12, "moe_expert_capacity_factor": 1.0}, "mixtral"),
        ({**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 12, "qk_layernorm": True}, "qwen3_moe"),
    ],
)
def test_a_network_becomes_the_architecture_that_has_it(overrides: dict[str, Any], kind: str) -> None:
    model = tiny_config(**overrides)
    architecture, values = describe_network(model, 131)
    assert architecture is ARCHITECTURES[kind]
    assert network_settings(network(values)) == network_settings(model)


DEEPSEEK_EXPERTS = {
    **{**LATENT, "norm_epsilon": 1e-6, "num_experts": 4, "moe_ffn_hidden_size": 12},
    **{"moe_shared_expert_intermediate_size": 24, "moe_router_score_function": "sigmoid"},
    "moe_router_enable_expert_bias": True,
}


@pytest.mark.parametrize(
    ("overrides", "flags"),
    [
        ({"apply_layernorm_1p": True}, "gpt2, can't express --apply-layernorm-1p"),
        ({**LLAMA, "qk_layernorm": True, "add_qkv_bias": True}, "--qk-layernorm"),
        (
            {**LLAMA, "add_proj_bias": True},
            "can't express --add-proj-bias",
        ),
        (
            {**LLAMA, "add_qkv_bias": True, "rotary_percent": 0.5, "kv_channels": 8},
            "glm, can't express no --rotary-interleaved",
        ),
        ({**LATENT, "norm_epsilon": 1e-5}, "deepseek_v3, can't express --norm-epsilon 1e-05"),
        (
            {**DEEPSEEK_EXPERTS, "moe_shared_expert_gate": True},
            "deepseek_v3, can't express --moe-shared-expert-gate",
        ),
        (
            {**DEEPSEEK_EXPERTS, "moe_shared_expert_intermediate_size": None},
            "deepseek_v3, can't express no --moe-shared-expert-intermediate-size",
        ),
        (
            {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 12, "moe_router_load_balancing_type": ["sinkhorn"]},
            "mixtral, can't express --moe-router-load-balancing-type sinkhorn",
        ),
    ],
)
def test_a_network_that_no_architecture_has_is_refused_by_its_flags(overrides: dict[str, Any], flags: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        describe_network(tiny_config(**overrides), 131)
    assert flags in str(raised.value)


DEEPSEEK = {
    **{"model_type": "deepseek_v3", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2},
    **{"kv_lora_rank": 12, "q_lora_rank": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
    **{"auto_map": {}, "num_nextn_predict_layers": 1, "topk_method": "noaux_tc", "n_routed_experts": 8},
}
"""With fields of the published file that mean nothing where no layer has experts."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_k_dense_replace": 1, "norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"first_k_dense_replace": 1, "topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        (
            {"first_k_dense_replace": 1, "n_shared_experts": 0},
            "n_shared_experts 0 is not supported: it must be at least 1",
        ),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported: every head has keys of its own"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 is not supported: only 1e-06, as the latent vectors' norms have"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"qk_head_dim": 12}, "qk_head_dim 12 is not supported: supported: 10"),
    ],
)
def test_what_is_not_understood_of_a_deepseek_is_refused(change: dict[str, Any], message: str) -> None:
    assert network(DEEPSEEK).multi_latent_attention
    assert network({**DEEPSEEK, "n_routed_experts": None, "first_k_dense_replace": 0}) == network(DEEPSEEK)
    with pytest.raises(CheckpointError) as raised:
        network({**DEEPSEEK, **change})
    assert message in str(raised.value)


def test_the_original_file_is_kept_only_for_the_same_network() -> None:
    source = {**TINY, "transformers_version": "4.0", "eos_token_id": 3}
    model = network(source)
    assert describe_network(model, 131, source)[1] == source
    changed = replace(model, norm_epsilon=1e-3)
    assert describe_network(changed, 131, source)[1]["rms_norm_eps"] == 1e-3
    assert describe_network(model, 132, source)[1]["vocab_size"] == 132


LOADED = [name for name, entry in EVERY.items() if entry["refused"] is None]


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Two layers, narrow heads in the same groups, few ids; the length of positions stays where they are computed."""
    small = {**values, "vocab_size": VOCABULARY}
    small |= {name: 0 for name in values if name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if values["model_type"] == "gpt2":
        inner = {} if "n_inner" not in values else {"n_inner": 48}
        return {**small, **inner, "n_embd": 8 * values["n_head"], "n_layer": 2, "n_positions": 64}
    heads = values["num_attention_heads"]
    width = {"head_dim": 8} if "head_dim" in values else {}
    sizes = {"hidden_size": 8 * heads, "intermediate_size": 48, "num_hidden_layers": 2}
    return {**small, **sizes, **width}


@pytest.mark.parametrize("name", LOADED)
def test_a_published_model_gives_the_logits_of_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = shrunk(EVERY[name]["config"])
    kind = values["model_type"]
    given = {field: value for field, value in values.items() if field != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given), dtype=torch.float32).eval()
    hf_models.randomize(model)
    found = parse_config(values, "config.json")
    config = RunConfig(model=found.model, precision=PrecisionConfig())
    ours = build_whole(config, found.vocab_size, single_process_mesh()).eval()
    hf_models.fill(ours, hf_models.values(model, ours))
    tokens = torch.randint(VOCABULARY, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens).logits
        difference = (outputs(ours, tokens, torch.arange(48)) - expected).abs().max()
    assert difference <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", [name for name in EVERY if name not in LOADED])
def test_a_published_model_that_is_not_supported_is_refused_for_the_stated_reason(name: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        parse_config(EVERY[name]["config"], "config.json")
    assert EVERY[name]["refused"] in str(raised.value)
