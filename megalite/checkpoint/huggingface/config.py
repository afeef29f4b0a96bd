"""`config.json` to a `ModelConfig` and back.

Key idea: what is written is read back and must give the same network. So no list says which networks can be expressed;
where none of the architectures can, the message names the settings that were lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.architecture import Architecture
from megalite.checkpoint.huggingface.classes import read_classes
from megalite.checkpoint.huggingface.families import ARCHITECTURES
from megalite.checkpoint.huggingface.fields import Fields, UnsupportedField
from megalite.checkpoint.storage import CONFIG_FILE, read_json, refuse_other_kind
from megalite.config.check_network import idle_scaling, model_problems
from megalite.config.fields import all_fields, value_problems
from megalite.config.resolve import balancing, expert_layers
from megalite.config.schema import ROTARY, ModelConfig, RunConfig
from megalite.config.schema_experts import ONLY_TRAINING
from megalite.nn.attention_backend import bounded_window

INERT = {
    "preset",
    "model_vocab_size",  # compared apart
    "make_vocab_size_divisible_by",
    "attention_backend",
    "init_method_std",
    "hidden_dropout",
    "attention_dropout",
    "attention_softmax_in_fp32",
    "label_smoothing",
    "group_query_attention",  # the number of groups says it
    *ONLY_TRAINING,  # but sinkhorn, below
}
"""Fields of `ModelConfig` that don't decide what the network computes in evaluation."""
_FLAG_OF = {"sinkhorn": "moe_router_load_balancing_type"}
_KINDS = {
    *("multi_latent_attention", "qk_layernorm", "normalization", "swiglu", "position_embedding_type", "num_experts"),
    *("add_bias_linear", "add_qkv_bias", "add_proj_bias", "moe_router_enable_expert_bias", "moe_shared_expert_gate"),
    "moe_shared_expert_intermediate_size",
}
"""Fields that decide which parameters there are: an architecture without one of these is further away than one that
differs in sizes and numbers."""
_ROTARY = {
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "use_rope_scaling",
    "rotary_seq_len_interpolation_factor",
}


@dataclass(frozen=True)
class HuggingFaceModel:
    """What a folder's `config.json` describes: `model` is resolved, `vocab_size` counts the embedding's rows.
    `classes`: the names of a classifier's classes in order; None for a language model. `notes`: for the user, on fields
    that aren't used."""

    architecture: Architecture
    model: ModelConfig
    vocab_size: int
    classes: tuple[str, ...] | None
    notes: list[str]


def read_huggingface_config(directory: str | Path, ignored: Collection[str] | None = ()) -> HuggingFaceModel:
    """The network of a Hugging Face folder. A `CheckpointError` names what is missing, unknown or unsupported.

    `ignored`: unknown fields that the user says don't matter; None, for a folder that was read before: all.
    """
    path = Path(directory, CONFIG_FILE)
    if not path.parent.is_dir():
        raise CheckpointError(
            f"{directory} is not a folder: give the folder of a model; `hf download NAME --local-dir FOLDER` makes one"
        )
    refuse_other_kind(path.parent, "--load-hf")
    return parse_config(read_json(path), str(path), ignored)


def parse_config(values: Mapping[str, Any], where: str, ignored: Collection[str] | None = ()) -> HuggingFaceModel:
    """As `read_huggingface_config`, from the file's object; `where` names it."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise CheckpointError(f"{where}: model_type {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    architecture, fields = ARCHITECTURES[kind], Fields(values, where)
    vocab_size = fields.take("vocab_size", int)
    model = ModelConfig(**architecture.read(fields))
    notes = fields.finish(ignored)
    described = RunConfig(model=model)
    problems = [*value_problems(described)] or [*model_problems(described)]
    if problems:
        raise CheckpointError(f"{where} describes an impossible network: {'; '.join(problems)}")
    return HuggingFaceModel(architecture, model, vocab_size, read_classes(values, where), notes)


def network_settings(model: ModelConfig) -> dict[str, Any]:
    """The settings that decide what the network computes, so that equal networks have equal ones."""
    values = dataclasses.asdict(model).items()
    result = {name: value for name, value in values if name not in INERT and not name.startswith("mtp_")}
    result["window_size"] = bounded_window(model)
    for name in ("add_qkv_bias", "add_proj_bias"):
        result[name] = result[name] or model.add_bias_linear
    if model.num_experts is None:
        result = {name: value for name, value in result.items() if not name.startswith("moe_")}
    else:
        layers = expert_layers(model)
        result |= {"moe_layer_freq": layers, "sinkhorn": "sinkhorn" in balancing(model)}
        if all(layers):
            result.pop("ffn_hidden_size")  # of no layer
    without = set(idle_scaling(model)) | (set() if model.position_embedding_type in ROTARY else _ROTARY)
    return {name: value for name, value in result.items() if name not in without}


def describe_network(
    model: ModelConfig, vocab_size: int, source: Mapping[str, Any] | None = None
) -> tuple[Architecture, dict[str, Any]]:
    """An architecture that can express a resolved `model`, and its `config.json`.

    `source`: the `config.json` that the model came from, if it did. It is kept as it is where it describes this very
    network. A `CheckpointError` names the settings that no architecture has.
    """
    there = None if source is None else _read_back(source)
    same = there is not None and (there.vocab_size, network_settings(there.model)) == (
        vocab_size,
        network_settings(model),
    )
    if source is not None and there is not None and same:
        return there.architecture, dict(source)
    lost: dict[str, tuple[list[str], bool]] = {}
    for architecture in ARCHITECTURES.values():
        values = {
            "architectures": [architecture.class_name],
            "model_type": architecture.model_type,
            "vocab_size": vocab_size,
            **architecture.write(model),
        }
        back, nearest = _read_back(values), _nearest(values)
        if back is not None and not _differences(model, back.model):
            return architecture, values
        if nearest is not None:
            lost[architecture.model_type] = _differences(model, nearest.model), back is None
    closest = min(lost, key=lambda kind: _distance(*lost[kind]))
    raise CheckpointError(
        f"no supported Hugging Face architecture can express this network; the closest, {closest}, can't express "
        f"{', '.join(_shown(model, name) for name in lost[closest][0])}"
    )


def _distance(lost: list[str], refused: bool) -> tuple[int, int, bool]:
    """Sorts the architecture first that is closest. `refused`: it has a field for this, but not for such a value."""
    return len(_KINDS.intersection(lost)), len(lost), refused


def _nearest(values: Mapping[str, Any]) -> HuggingFaceModel | None:
    """What these values describe without those that aren't supported; None where that can't be read either."""
    left = dict(values)
    while True:
        try:
            return parse_config(left, "", None)
        except UnsupportedField as error:
            if left.pop(error.name, None) is None:
                return None
        except CheckpointError:
            return None


def _read_back(values: Mapping[str, Any]) -> HuggingFaceModel | None:
    """What these values describe; None where that isn't supported."""
    try:
        return parse_config(values, "", None)
    except CheckpointError:
        return None


def _differences(model: ModelConfig, other: ModelConfig) -> list[str]:
    """The fields of `model` that `other` doesn't have."""
    mine, theirs = network_settings(model), network_settings(other)
    missing = object()
    return [_FLAG_OF.get(name, name) for name, value in mine.items() if theirs.get(name, missing) != value]


def _shown(model: ModelConfig, name: str) -> str:
    """A field as a flag."""
    field, value = all_fields()[f"model.{name}"], getattr(model, name)
    return f"no {field.option}" if value is None else field.show(value)
