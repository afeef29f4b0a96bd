"""Combinations of flags that can't work: multi-latent attention, and multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.check_precision import FP8_BLOCKS
from megalite.config.fields import given, needs
from megalite.config.resolve import head_widths
from megalite.config.schema import RunConfig
from megalite.config.schema_model import ROTARY

_OF_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_OF_GROUPS = ("model.group_query_attention", "model.num_query_groups", "model.add_qkv_bias")


def latent_problems(config: RunConfig) -> Iterator[str]:
    """Problems of multi-latent attention alone. `config`: given or resolved."""
    model, flag = config.model, "--multi-latent-attention"
    yield from needs(config, model.multi_latent_attention, flag, *(f"model.{name}" for name in _OF_LATENT))
    if not model.multi_latent_attention:
        return
    if model.position_embedding_type not in ROTARY:
        yield (
            f"{flag} needs a --position-embedding-type that rotates, not {model.position_embedding_type}: "
            f"{', '.join(ROTARY)}"
        )
    if model.kv_channels not in (None, head_widths(model)[0]):
        yield (
            f"--kv-channels {model.kv_channels} can't be used with {flag}, whose heads have the widths --qk-head-dim "
            f"{model.qk_head_dim} + --qk-pos-emb-head-dim {model.qk_pos_emb_head_dim} and --v-head-dim "
            f"{model.v_head_dim}: leave it out"
        )
    groups = () if model.num_query_groups == model.num_attention_heads else _OF_GROUPS[1:2]
    for shown in given(config, _OF_GROUPS[0], *groups, _OF_GROUPS[2]):
        yield f"{shown} can't be used with {flag}, where every head has keys of its own without a bias: leave it out"
    recipe = config.precision.fp8_recipe
    if config.precision.fp8_format is not None and recipe in FP8_BLOCKS:
        yield (
            f"--fp8-recipe {recipe} can't be used with {flag}, whose ranks would cut its blocks: use tensorwise or "
            "delayed"
        )
    if config.peft.peft == "prefix":
        yield f"--peft prefix can't be used with {flag}, which makes keys from latent vectors: use lora or prompt"


def multi_token_problems(config: RunConfig) -> Iterator[str]:
    """Problems of multi-token prediction."""
    model, depths, length = config.model, config.model.mtp_num_layers, config.data.seq_length
    yield from needs(config, bool(depths), "--mtp-num-layers", "model.mtp_loss_scaling_factor")
    if not depths:
        return
    flag = f"--mtp-num-layers {depths}"
    if model.position_embedding_type == "learned_absolute":
        yield (
            f"{flag} can't be used with --position-embedding-type learned_absolute, whose table the last stage lacks: "
            f"use {', '.join(ROTARY)} or none"
        )
    if length is not None and length <= depths:
        yield f"{flag} must be below --seq-length {length}: no token is so far ahead"
    if config.peft.peft != "none":
        yield f"{flag} can't be used with --peft {config.peft.peft}, which trains what generation uses: leave it out"
    if config.finetune.task == "classification":
        yield f"{flag} can't be used with --task classification, which predicts no tokens: leave it out"
    if config.finetune.load_hf is not None:
        yield f"{flag} can't be used with --load-hf {config.finetune.load_hf}, which has no such layers: leave it out"
