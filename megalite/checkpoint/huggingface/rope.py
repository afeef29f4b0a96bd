"""Rotary positions in `config.json`: the old keys (`rope_theta`, `rope_scaling`, `partial_rotary_factor`) and the new
one (`rope_parameters`), to and from the fields of `ModelConfig`.

Key idea: both are merged into one dictionary, in which they must not contradict each other; unknown keys are
refused. The old keys are written: every version of transformers reads them.
"""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.huggingface.architecture import Same, read_same
from megalite.checkpoint.huggingface.fields import Fields
from megalite.config.schema import ModelConfig

DEFAULT_BASE = 10000.0
_DEFAULT = ModelConfig()


def _optional(ours: str, kind: type) -> Same:
    """A key that is absent where the field has its default."""
    return Same(ours, kind, getattr(_DEFAULT, ours))


_FACTOR = {"factor": Same("rope_scaling_factor", float)}
_ORIGINAL = {"original_max_position_embeddings": Same("rope_original_max_position_embeddings", int)}
_ATTENTION = {"attention_factor": _optional("rope_attention_factor", float)}
_KEYS: dict[str, dict[str, Same]] = {
    "default": {},
    "linear": {"factor": Same("rotary_seq_len_interpolation_factor", float)},
    "dynamic": _FACTOR,
    "llama3": {
        **_FACTOR,
        "low_freq_factor": Same("rope_low_freq_factor", float),
        "high_freq_factor": Same("rope_high_freq_factor", float),
        **_ORIGINAL,
    },
    "yarn": {
        **_FACTOR,
        **_ORIGINAL,
        **_ATTENTION,
        "beta_fast": _optional("yarn_beta_fast", float),
        "beta_slow": _optional("yarn_beta_slow", float),
        "mscale": _optional("yarn_mscale", float),
        "mscale_all_dim": _optional("yarn_mscale_all_dim", float),
        "truncate": _optional("yarn_correction_range_round_to_int", bool),
    },
    "longrope": {
        **_FACTOR,
        **_ORIGINAL,
        **_ATTENTION,
        "short_factor": Same("longrope_short_factor", list),
        "long_factor": Same("longrope_long_factor", list),
    },
}
"""The keys of each kind."""


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
    result |= read_same(rope, _KEYS[kind])
    for key, (name, of, _) in _KEYS[kind].items():
        if of is list:
            result[name] = _numbers(rope, key, result[name])
    factor = result.get("rotary_seq_len_interpolation_factor", 1)
    if factor < 1:
        rope.refuse("factor", factor, "linear scaling takes a number of at least 1")
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
        values = ((key, of, getattr(model, ours), default) for key, (ours, of, default) in _KEYS[kind].items())
        written = {key: of(value) for key, of, value, default in values if value not in (None, default)}
        result["rope_scaling"] = {"rope_type": kind, **written}
    return result
