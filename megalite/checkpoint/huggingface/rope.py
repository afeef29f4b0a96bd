"""Rotary positions in `config.json`: the old keys (`rope_theta`, `rope_scaling`, `partial_rotary_factor`) and the new
one (`rope_parameters`), to and from the fields of `ModelConfig`.

Key idea: both are merged into one dictionary, in which they must not contradict each other; unknown keys are
refused. The old keys are written: every version of transformers reads them.
"""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.huggingface.fields import REQUIRED, Fields
from megalite.config.schema import ModelConfig

DEFAULT_BASE = 10000.0
_Keys = dict[str, tuple[str, type]]
_FACTOR: _Keys = {"factor": ("rope_scaling_factor", float)}
_ORIGINAL: _Keys = {"original_max_position_embeddings": ("rope_original_max_position_embeddings", int)}
_ATTENTION: _Keys = {"attention_factor": ("rope_attention_factor", float)}
_KEYS: dict[str, _Keys] = {
    "default": {},
    "linear": {"factor": ("rotary_seq_len_interpolation_factor", float)},
    "dynamic": _FACTOR,
    "llama3": {
        **_FACTOR,
        "low_freq_factor": ("rope_low_freq_factor", float),
        "high_freq_factor": ("rope_high_freq_factor", float),
        **_ORIGINAL,
    },
    "yarn": {
        **_FACTOR,
        **_ORIGINAL,
        **_ATTENTION,
        "beta_fast": ("yarn_beta_fast", float),
        "beta_slow": ("yarn_beta_slow", float),
        "mscale": ("yarn_mscale", float),
        "mscale_all_dim": ("yarn_mscale_all_dim", float),
        "truncate": ("yarn_correction_range_round_to_int", bool),
    },
    "longrope": {
        **_FACTOR,
        **_ORIGINAL,
        **_ATTENTION,
        "short_factor": ("longrope_short_factor", list),
        "long_factor": ("longrope_long_factor", list),
    },
}
"""For each kind its keys, the field of `ModelConfig` that each is, and the type of its value."""
_OPTIONAL = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
"""Keys that may be absent, and are where the field has its default."""


def read_rope(fields: Fields, *, positions: int, partial: float | None = None) -> dict[str, Any]:
    """Fields of `ModelConfig`. `positions`: `max_position_embeddings`. `partial`: the default share of a head that is
    rotated, of an architecture that rotates a part; None for one that rotates all."""
    rope = _merged(fields)
    result: dict[str, Any] = {"position_embedding_type": "rope"}
    result["rotary_base"] = rope.take("rope_theta", float, DEFAULT_BASE)
    if partial is None:
        rope.choose("partial_rotary_factor", (1.0,), 1.0)
    else:
        result["rotary_percent"] = rope.take("partial_rotary_factor", float, partial)
    kind = rope.choose("rope_type", _KEYS, "default")
    if kind in ("dynamic", "yarn", "longrope"):
        result["position_embedding_type"] = kind
    if kind == "llama3":
        result["use_rope_scaling"] = True
    _derive(rope, kind, positions)
    default = ModelConfig()
    for key, (name, of) in _KEYS[kind].items():
        result[name] = rope.take(key, of, getattr(default, name) if key in _OPTIONAL else REQUIRED)
        if of is list:
            result[name] = _numbers(rope, key, result[name])
    if kind == "linear" and result["rotary_seq_len_interpolation_factor"] < 1:
        rope.refuse(
            "factor", result["rotary_seq_len_interpolation_factor"], "linear scaling takes a number of at least 1"
        )
    if kind == "llama3" and result["rope_high_freq_factor"] <= result["rope_low_freq_factor"]:
        rope.refuse("high_freq_factor", result["rope_high_freq_factor"], "it must be above low_freq_factor")
    if kind == "dynamic":  # the one length that its formula knows
        result["rope_original_max_position_embeddings"] = positions
    rope.finish()
    return result


def _derive(rope: Fields, kind: str, positions: int) -> None:
    """Fill in what transformers derives, and drop what has no meaning."""
    original = "original_max_position_embeddings"
    if original not in _KEYS[kind]:  # written beside other kinds by some versions, and without meaning there
        rope.drop(original)
        return
    rope.values.setdefault(original, positions)
    length = rope.values[original]
    if kind in ("yarn", "longrope") and isinstance(length, int) and length > 0:
        rope.values.setdefault("factor", positions / length)


def _numbers(rope: Fields, key: str, values: list[Any]) -> list[float]:
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        rope.refuse(key, values, "it must be a list of numbers")
    return [float(value) for value in values]


_ABOVE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def _merged(fields: Fields) -> Fields:
    """All rotary parameters, from wherever they are."""
    new = fields.take("rope_parameters", dict, {})
    old = fields.take("rope_scaling", dict, {})
    above = {name: fields.values.pop(name, None) for name in _ABOVE}
    name = "rope_parameters" if new else "rope_scaling"
    merged = Fields({}, f"{fields.where}, {name}", nested=True)
    for source in (new, old, above):
        for name, value in source.items():
            name = "rope_type" if name == "type" else name
            if value is None:
                continue
            if isinstance(value, dict):
                merged.refuse(name, value, "rotary parameters must be the same in all layers")
            if merged.values.setdefault(name, value) != value:
                merged.refuse(name, merged.values[name], f"the file also says {value!r}")
    return merged


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    result: dict[str, Any] = {"rope_theta": float(model.rotary_base), "rope_scaling": None}
    if model.rotary_percent != 1.0:
        result["partial_rotary_factor"] = model.rotary_percent
    kind = model.position_embedding_type
    if model.use_rope_scaling:
        kind = "llama3"
    elif model.rotary_seq_len_interpolation_factor is not None:
        kind = "linear"
    if kind in _KEYS:
        result["rope_scaling"] = {"rope_type": kind, **_written(model, kind)}
    return result


def _written(model: ModelConfig, kind: str) -> dict[str, Any]:
    default, result = ModelConfig(), {}
    for key, (name, of) in _KEYS[kind].items():
        value = getattr(model, name)
        if value is not None and (key not in _OPTIONAL or value != getattr(default, name)):
            result[key] = of(value)
    return result
