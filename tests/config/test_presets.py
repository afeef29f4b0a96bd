"""Presets have as many parameters as the published models."""

from __future__ import annotations

import pytest

from megalite.config.errors import FlagError
from megalite.config.presets import PRESETS, preset_fields
from megalite.config.resolve import resolve
from megalite.config.schema import ModelConfig, RunConfig

# Parameters of the published weights, counted in their files (GPT-3: the paper's "n_params", rounded), and ids.
PUBLISHED = {
    "gpt2-124m": (124_439_808, 50257, 0.0),
    "gpt2-345m": (354_823_168, 50257, 0.0),
    "gpt2-355m": (354_823_168, 50257, 0.0),
    "gpt2-774m": (774_030_080, 50257, 0.0),
    "gpt2-1.5b": (1_557_611_200, 50257, 0.0),
    "gpt3-350m": (356e6, 50257, 0.01),
    "gpt3-1.3b": (1.3e9, 50257, 0.02),
    "gpt3-2.7b": (2.7e9, 50257, 0.02),
    "gpt3-6.7b": (6.7e9, 50257, 0.02),
    "gpt3-13b": (13.0e9, 50257, 0.02),
    "gpt3-175b": (175.0e9, 50257, 0.01),
    "llama-1b": (1_100_048_384, 32000, 0.0),
    "llama-7b": (6_738_415_616, 32000, 0.0),
    "llama-13b": (13_015_864_320, 32000, 0.0),
    "llama-70b": (68_976_648_192, 32000, 0.0),
    "llama3-8b": (8_030_261_248, 128256, 0.0),
    "llama3-70b": (70_553_706_496, 128256, 0.0),
    "llama3.1-8b": (8_030_261_248, 128256, 0.0),
    "llama3.2-1b": (1_235_814_400, 128256, 0.0),
}


def model_of(name: str) -> ModelConfig:
    return resolve(RunConfig(model=ModelConfig(**preset_fields(name))), 1).model


def parameters(model: ModelConfig, vocabulary: int) -> int:
    """Counted by hand from the description of the two families."""
    assert model.num_layers and model.hidden_size and model.num_attention_heads and model.kv_channels
    assert model.ffn_hidden_size and model.max_position_embeddings
    h, f = model.hidden_size, model.ffn_hidden_size
    queries, keys = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    norm = h if model.normalization == "RMSNorm" else 2 * h
    layer = 2 * norm + h * queries + 2 * h * keys + queries * h + h * f * (3 if model.swiglu else 2)
    if model.add_bias_linear:
        layer += queries + 2 * keys + h + f + h
    embeddings = vocabulary * h * (2 if model.untie_embeddings_and_output_weights else 1)
    if model.position_embedding_type == "learned_absolute":
        embeddings += model.max_position_embeddings * h
    return embeddings + model.num_layers * layer + norm


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    published, vocabulary, tolerance = PUBLISHED[name]
    assert abs(parameters(model_of(name), vocabulary) - published) <= tolerance * published


def test_every_preset_is_compared_with_a_published_model_or_is_our_own() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"llama-tiny", "llama-125m"}
    assert 120e6 < parameters(model_of("llama-125m"), 32000) < 140e6


def test_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    with pytest.raises(FlagError, match="--preset gpt5: no such preset; valid: gpt2-124m, .*llama-7b"):
        preset_fields("gpt5")


@pytest.mark.parametrize(("name", "meant"), [("llama-tinny", "llama-tiny"), ("GPT3-175B", "gpt3-175b")])
def test_a_preset_that_is_nearly_spelt_right_is_suggested(name: str, meant: str) -> None:
    with pytest.raises(FlagError, match=f"did you mean {meant}\\?"):
        preset_fields(name)


def test_a_preset_taken_is_a_copy() -> None:
    preset_fields("llama-7b")["num_layers"] = 0
    assert preset_fields("llama-7b")["num_layers"] == 32
