"""Adapters between megalite's parameters and PEFT's tensors.

Key idea: both sides are dictionaries of whole tensors, ours by global names in logical shapes; so nothing here knows of
layouts. An adapter beside a part of a fused weight is stored as adapters beside the Hugging Face layers that it covers:
where one covers several, each gets its own copy of A; where several share one, their ranks add up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.architecture import HEAD, Architecture
from megalite.checkpoint.huggingface.config import describe_network
from megalite.config.errors import listed
from megalite.config.schema import ModelConfig
from megalite.config.schema_finetune import PeftConfig
from megalite.distributed.param_spec import Shape
from megalite.peft.apply import Scale
from megalite.peft.files import EMBEDDINGS, PREFIX, SCORE, WEIGHTS_FILE, Adapter
from megalite.peft.modules import (
    EXPERT_LINEAR_OF,
    HFLinear,
    hf_linears,
    layers_with,
    linear_shapes,
    linears_of,
    output_slices,
    overlap,
    part_of,
)
from megalite.peft.virtual import prefix_from_network

PROMPT = "embedding.prompt.weight"

Values = dict[str, Tensor]


def architecture_of(model: ModelConfig, vocab_size: int) -> Architecture:
    """The Hugging Face architecture that names this network's layers. A `CheckpointError` where there is none."""
    return describe_network(model, vocab_size)[0]


def lora_name(layer: int, part: str, matrix: str, model: ModelConfig) -> str:
    """Global name of a LoRA matrix, `a` or `b`."""
    return f"decoder.layers.{layer}.{linears_of(model, layer)[part]}.lora.{part}.{matrix}"


def prefix_name(layer: int, name: str = "weight") -> str:
    """Global name of a parameter of a layer's prefix."""
    return f"decoder.layers.{layer}.self_attention.prefix.{name}"


def to_peft(
    values: Mapping[str, Tensor],
    model: ModelConfig,
    peft: PeftConfig,
    scales: Mapping[str, Scale],
    vocab_size: int,
    base: str | None,
) -> tuple[dict[str, Any], Values]:
    """PEFT's configuration and tensors from whole parameters by global name. `base`: the model's folder, if known."""
    head = {SCORE: values[HEAD]} if HEAD in values else {}
    common: dict[str, Any] = {
        "task_type": "SEQ_CLS" if head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    if head:
        common["modules_to_save"] = ["score"]
    if peft.peft == "lora":
        config, tensors = _lora_to_peft(values, model, peft, scales, vocab_size)
    elif peft.peft == "prefix":
        config, tensors = _prefix_to_peft(values, model, peft)
    else:
        tensors = {EMBEDDINGS: values[PROMPT]}
        config = {"peft_type": "PROMPT_TUNING", "token_dim": model.hidden_size}
        config |= {"num_attention_heads": model.num_attention_heads, "prompt_tuning_init": "RANDOM"}
    if peft.peft != "lora":
        config |= {"num_virtual_tokens": peft.num_virtual_tokens, "num_layers": model.num_layers}
        config["num_transformer_submodules"] = 1
    return {**config, **common}, {**tensors, **head}


def _lora_to_peft(
    values: Mapping[str, Tensor], model: ModelConfig, peft: PeftConfig, scales: Mapping[str, Scale], vocab_size: int
) -> tuple[dict[str, Any], Values]:
    layers = hf_linears(architecture_of(model, vocab_size), model)
    if set(EXPERT_LINEAR_OF) & set(scales):
        raise CheckpointError("adapters of routed experts can't be written in PEFT's format")
    tensors: Values = {}
    written: dict[str, Scale] = {}
    for layer in layers:
        parts = [part for part in scales if overlap(part, layer, model)]
        if not parts:
            continue
        factors = {scales[part].factor for part in parts}
        if len(factors) > 1:
            raise CheckpointError(f"{layer.suffix} can't have adapters of different scales: {sorted(factors)}")
        written[layer.suffix] = Scale(sum(scales[part].rank for part in parts), factors.pop())
        for number in layers_with(layer.linear, model):
            name = PREFIX + layer.name.replace("{n}", str(number))
            rows = [values[lora_name(number, part, "a", model)] for part in parts]
            tensors[f"{name}.lora_A.weight"] = torch.cat(rows)
            columns = [_stored_b(values[lora_name(number, part, "b", model)], part, layer, model) for part in parts]
            tensors[f"{name}.lora_B.weight"] = torch.cat(columns, dim=1)
    config = {
        "peft_type": "LORA",
        "lora_dropout": peft.lora_dropout,
        "use_rslora": peft.use_rslora,
        "bias": "none",
        "fan_in_fan_out": any(layer.transposed for layer in layers),
        "target_modules": _short_names(written, layers),
        **_ranks(written, peft),
    }
    return config, tensors


def _stored_b(b: Tensor, part: str, layer: HFLinear, model: ModelConfig) -> Tensor:
    """The rows [out, rank] of a Hugging Face layer from a target's B; zeros where it has none."""
    shape = linear_shapes(model)[layer.linear]
    whole = b.new_zeros(*shape[:-1], b.shape[-1])
    whole[output_slices(part, layer.linear, model)] = b
    return layer.matrix(b.shape[-1]).extract(whole)


def _short_names(written: Mapping[str, Scale], layers: list[HFLinear]) -> list[str]:
    """Names for `target_modules`: the last word where it means these layers and no others."""
    others = {layer.suffix.rpartition(".")[2] for layer in layers if layer.suffix not in written}
    return sorted({word if (word := s.rpartition(".")[2]) not in others else s for s in written})


def _ranks(written: Mapping[str, Scale], peft: PeftConfig) -> dict[str, Any]:
    """`r` and `lora_alpha`, and the layers where they are others."""

    def alpha(scale: Scale) -> float:
        value = scale.factor * (math.sqrt(scale.rank) if peft.use_rslora else scale.rank)
        return round(value) if math.isclose(value, round(value), rel_tol=1e-12) else value

    usual = min(written.values(), key=lambda scale: scale.rank)
    others = {name: scale for name, scale in written.items() if scale != usual}
    return {
        "r": usual.rank,
        "lora_alpha": alpha(usual),
        "rank_pattern": {name: scale.rank for name, scale in others.items()},
        "alpha_pattern": {name: alpha(scale) for name, scale in others.items()},
    }


def _prefix_to_peft(
    values: Mapping[str, Tensor], model: ModelConfig, peft: PeftConfig
) -> tuple[dict[str, Any], Values]:
    assert model.num_layers is not None and model.kv_channels is not None
    vectors = torch.stack([_prefix_vectors(values, number) for number in range(model.num_layers)])
    flat = vectors.permute(3, 0, 2, 1, 4).reshape(peft.num_virtual_tokens, -1)  # [n, layers, 2, groups, d]
    config = {
        "peft_type": "PREFIX_TUNING",
        "token_dim": model.num_query_groups * model.kv_channels,
        "num_attention_heads": model.num_query_groups,
        "prefix_projection": False,  # the vectors themselves are stored
    }
    return config, {EMBEDDINGS: flat}


def _prefix_vectors(values: Mapping[str, Tensor], number: int) -> Tensor:
    """Keys and values [groups, 2, n, d] of one layer."""
    if prefix_name(number) in values:
        return values[prefix_name(number)]
    names = ("embedding", "inner_weight", "inner_bias", "outer_weight", "outer_bias")
    embedding, *layers = (values[prefix_name(number, name)] for name in names)
    return prefix_from_network(embedding, (layers[0], layers[1]), (layers[2], layers[3]))


def from_peft(
    adapter: Adapter, model: ModelConfig, vocab_size: int, classes: int | None = None
) -> tuple[Values, dict[str, Scale]]:
    """Whole parameters by global name, and LoRA's targets. A `CheckpointError` where it is of another model.

    `classes`: of a model that classifies, 0 where their number isn't known yet; None: the model writes text.
    """
    _check_head(adapter, model, classes)
    if adapter.kind == "lora":
        values, scales = _lora_from_peft(adapter, model, vocab_size)
    else:
        values, scales = _virtual_from_peft(adapter, model), {}
    if SCORE in adapter.tensors:
        values[HEAD] = adapter.tensors[SCORE]
    return values, scales


def _lora_from_peft(adapter: Adapter, model: ModelConfig, vocab_size: int) -> tuple[Values, dict[str, Scale]]:
    layers = {layer.name: layer for layer in hf_linears(architecture_of(model, vocab_size), model)}
    values: Values = {}
    scales: dict[str, Scale] = {}
    problems: list[str] = []
    pairs = adapter.pairs()
    for module, (a, b) in pairs.items():
        number = re.search(r"\.(\d+)\.", module)
        layer = layers.get(re.sub(r"\.(\d+)\.", ".{n}.", module, count=1))
        if layer is None or number is None or int(number[1]) not in layers_with(layer.linear, model):
            problems.append(f"{module}: this model has no such linear layer")
            continue
        out, inputs = layer.rows.shape[0], linear_shapes(model)[layer.linear][-1]
        if (b.shape[0], a.shape[1]) != (out, inputs):
            problems.append(f"{module}: made for a layer [{b.shape[0]}, {a.shape[1]}], not [{out}, {inputs}]")
            continue
        part, rank = part_of(layer, model), a.shape[0]
        scale = Scale(rank, adapter.factor(module, rank))
        if scales.setdefault(part, scale) != scale:
            problems.append(f"{module}: its rank or scale differs from that in other layers")
        values[lora_name(int(number[1]), part, "a", model)] = a
        values[lora_name(int(number[1]), part, "b", model)] = layer.matrix(rank).read_all(b.__getitem__)
    there = [linears_of(model, number) for number in range(model.num_layers)]
    names = [lora_name(n, part, "a", model) for part in scales for n, parts in enumerate(there) if part in parts]
    if not problems and not names:
        problems.append("it has no LoRA matrices")
    _refuse(adapter, problems)
    if set(names) - values.keys():
        what = "is not supported: it covers only some of the layers"
        _refuse(adapter, ["layers_to_transform, or targets in single layers"], what)
    _refuse(adapter, _mismatches(adapter, pairs, layers, model), "doesn't match its adapter_config.json")
    ordered = {part: scales[part] for parts in there for part in parts if part in scales}
    return values, ordered


def _mismatches(
    adapter: Adapter, pairs: Mapping[str, Any], layers: Mapping[str, HFLinear], model: ModelConfig
) -> list[str]:
    """Where the matrices that are there aren't those that `target_modules` means for this model."""
    names = [
        name.replace("{n}", str(number))
        for name, layer in layers.items()
        for number in layers_with(layer.linear, model)
    ]
    without = [name for name in names if name not in pairs and adapter.targets(name)]
    others = [name for name in pairs if adapter.targets(name) is False]
    return [
        *(f"{name}: in target_modules, but it has no matrices" for name in without),
        *(f"{name}: it has matrices, but isn't in target_modules" for name in others),
    ]


def _check_head(adapter: Adapter, model: ModelConfig, classes: int | None) -> None:
    head, where = adapter.tensors.get(SCORE), adapter.where / WEIGHTS_FILE
    if head is None:
        return
    if classes is None:
        raise CheckpointError(f"{where} is of a classifier (it has a head for labels), but this model isn't one")
    if head.ndim != 2 or head.shape[1] != model.hidden_size or head.shape[0] != (classes or head.shape[0]):
        raise CheckpointError(
            f"{where}: its head is of shape {list(head.shape)}, this model's "
            f"[{classes or 'classes'}, {model.hidden_size}]"
        )


def _virtual_from_peft(adapter: Adapter, model: ModelConfig) -> Values:
    vectors = adapter.embeddings()
    assert model.num_layers is not None and model.kv_channels is not None and model.hidden_size is not None
    if adapter.kind == "prefix" and model.multi_latent_attention:
        _refuse(adapter, ["keys and values themselves, where the model makes them from latent vectors"])
    groups, width, count = model.num_query_groups, model.kv_channels, vectors.shape[0]
    wanted = model.hidden_size if adapter.kind == "prompt" else model.num_layers * 2 * groups * width
    if vectors.shape[1] != wanted:
        _refuse(adapter, [f"its vectors have width {vectors.shape[1]}, this model's {wanted}"])
    if adapter.kind == "prompt":
        return {PROMPT: vectors}
    split: Shape = (count, model.num_layers, 2, groups, width)
    layers = vectors.view(split).permute(1, 3, 2, 0, 4)
    return {prefix_name(number): layers[number] for number in range(model.num_layers)}


def _refuse(adapter: Adapter, problems: list[str], what: str = "is an adapter for another model") -> None:
    if problems:
        raise CheckpointError(f"{adapter.where / WEIGHTS_FILE} {what}:{listed(problems, shown=4)}")
