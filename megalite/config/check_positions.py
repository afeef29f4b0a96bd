"""Positions: which settings go together, and which matter.

Key idea: rotary positions are scaled for longer sequences in one way or in none, and one table says which settings each
way reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import all_fields, needs
from megalite.config.schema import ROTARY, ModelConfig, RunConfig

_ALL = ("rope_scaling_factor", "rope_original_max_position_embeddings")
_YARN = ("yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int", "yarn_mscale", "yarn_mscale_all_dim")
_LISTS = ("longrope_short_factor", "longrope_long_factor")
_READS = {
    "--use-rope-scaling": (*_ALL, "rope_low_freq_factor", "rope_high_freq_factor"),
    "--position-embedding-type yarn": (*_ALL, "rope_attention_factor", *_YARN),
    "--position-embedding-type dynamic": _ALL,
    "--position-embedding-type longrope": (*_ALL, "rope_attention_factor", *_LISTS),
}
_PLAIN = (
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "use_rope_scaling",
    "rotary_seq_len_interpolation_factor",
)


def idle_scaling(model: ModelConfig) -> dict[str, list[str]]:
    """The settings of scaling that this network doesn't read, each with the flags of which one would make it matter."""
    kind = model.position_embedding_type
    flag = "--use-rope-scaling" if kind == "rope" and model.use_rope_scaling else f"--position-embedding-type {kind}"
    users = {name: [each for each in _READS if name in _READS[each]] for names in _READS.values() for name in names}
    return {name: flags for name, flags in users.items() if flag not in flags}


def position_problems(config: RunConfig) -> Iterator[str]:
    """Problems of the network's positions."""
    model, length = config.model, config.data.seq_length
    kind, rows = model.position_embedding_type, model.max_position_embeddings
    if rows is None and kind == "learned_absolute":
        yield "--max-position-embeddings is missing: learned positions need the longest sequence"
    if rows is not None and length is not None and length > rows:
        yield f"--seq-length {length} is longer than --max-position-embeddings {rows}"
    if kind not in ROTARY:
        reason = f"--position-embedding-type rope, not {kind}"
        yield from needs(config, False, reason, *(f"model.{name}" for name in _PLAIN))
        return
    if model.rope_high_freq_factor <= model.rope_low_freq_factor:
        yield (
            f"--rope-high-freq-factor {model.rope_high_freq_factor} must be above --rope-low-freq-factor "
            f"{model.rope_low_freq_factor}"
        )
    rotated = None if (width := _head_width(model)) is None else int(width * model.rotary_percent)
    if rotated is not None and (rotated < 2 or rotated % 2):
        yield (
            f"--rotary-percent {model.rotary_percent} of a head's {width} channels (--kv-channels) is {rotated}: "
            "rotary positions rotate pairs of channels, so it must be even and at least 2"
        )
    elif kind != "rope":
        yield from _scaling_problems(model, rotated)


def _head_width(model: ModelConfig) -> int | None:
    if model.kv_channels is None and model.hidden_size is not None and model.num_attention_heads:
        return model.hidden_size // model.num_attention_heads
    return model.kv_channels


def _scaling_problems(model: ModelConfig, rotated: int | None) -> Iterator[str]:
    """Problems of yarn, dynamic and longrope. `rotated`: channels of a head."""
    kind = model.position_embedding_type
    chosen = f"--position-embedding-type {kind}"
    for name in ("use_rope_scaling", "rotary_seq_len_interpolation_factor"):
        if getattr(model, name):
            yield f"{all_fields()[f'model.{name}'].option} and {chosen} exclude each other: choose one scaling"
    if model.rope_scaling_factor < 1:
        yield f"--rope-scaling-factor {model.rope_scaling_factor}: {chosen} takes a number of at least 1"
    if kind == "yarn":
        yield from _yarn_problems(model)
    elif kind == "dynamic" and rotated == 2:
        yield f"{chosen} needs at least 4 rotated channels of a head (--kv-channels, --rotary-percent), not 2"
    elif kind == "longrope":
        yield from _longrope_problems(model, rotated)


def _yarn_problems(model: ModelConfig) -> Iterator[str]:
    if model.rotary_base <= 1:
        yield f"--rotary-base {model.rotary_base}: --position-embedding-type yarn takes a number above 1"
    fast, slow = yarn_turns(model)
    if fast < slow:
        yield f"--yarn-beta-fast {fast} is below --yarn-beta-slow {slow}"
    if (model.yarn_mscale is None) != (model.yarn_mscale_all_dim is None):
        yield "--yarn-mscale and --yarn-mscale-all-dim need each other: give both or neither"
    if model.yarn_mscale is not None and model.rope_attention_factor is not None:
        yield "--rope-attention-factor and --yarn-mscale exclude each other: both decide the attention factor"


def yarn_turns(model: ModelConfig) -> tuple[float, float]:
    """Rotations in the original length above which a pair isn't scaled, and below which it is scaled by the whole
    factor (Peng et al. 2023)."""
    return (
        32.0 if model.yarn_beta_fast is None else model.yarn_beta_fast,
        1.0 if model.yarn_beta_slow is None else model.yarn_beta_slow,
    )


def _longrope_problems(model: ModelConfig, rotated: int | None) -> Iterator[str]:
    if model.rope_original_max_position_embeddings < 2:
        yield "--rope-original-max-position-embeddings 1: --position-embedding-type longrope takes at least 2"
    for name in _LISTS:
        option, values = all_fields()[f"model.{name}"].option, getattr(model, name)
        if values is None:
            yield f"{option} is missing: --position-embedding-type longrope has one number for each rotated pair"
        elif rotated is not None and len(values) != rotated // 2:
            yield f"{option} has {len(values)} numbers, but {rotated // 2} pairs of a head's channels are rotated"
