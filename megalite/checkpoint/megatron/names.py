"""The names of Megatron-LM's tensors, of all versions, as those of megatron-core, which are ours too."""

from __future__ import annotations

import re

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXTRA = "_extra_state"  # of Transformer Engine; ends a name, or a number follows

_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Transformer Engine's layers hold the norm before them."""
_OLD_WORDS = {
    "encoder": "decoder",
    "transformer": "decoder",
    "attention": "self_attention",
    "query_key_value": "linear_qkv",
    "dense": "linear_proj",
    "dense_h_to_4h": "linear_fc1",
    "dense_4h_to_h": "linear_fc2",
    "input_norm": "input_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "final_norm": "final_layernorm",
}
_OLD = "language_model."
_OLD_COPY = "word_embeddings_for_head."  # of the embedding, on the last stage
_CUTS = {
    0: (
        *("word_embeddings.weight", "output_layer.weight"),
        *("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias"),
    ),
    1: ("linear_proj.weight", "linear_fc2.weight"),
}


def our_name(name: str) -> str:
    """The name in megatron-core, with norms apart. Names that GPT doesn't have stay as they are."""
    if name.startswith(_OLD_COPY):
        name = f"output_layer.{name.removeprefix(_OLD_COPY)}"
    if name.startswith(_OLD):
        name = ".".join(_OLD_WORDS.get(word, word) for word in name.removeprefix(_OLD).split("."))
    for fused, apart in _FUSED.items():
        name = name.replace(fused, apart)
    return name


def cut_dim(name: str) -> int | None:
    """The dimension along which tensor-parallel ranks cut a tensor; None where each has all of it."""
    return next((dim for dim, ends in _CUTS.items() if name.endswith(ends)), None)


def is_gated(name: str, swiglu: bool) -> bool:
    """Whether a tensor is gate and up of an MLP."""
    return swiglu and ".linear_fc1." in name
