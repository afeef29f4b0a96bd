"""Rotary positions in `config.json`: the old keys (`rope_theta`, `rope_scaling`, `partial_rotary_factor`) and the new
one (`rope_parameters`), to and from the fields of `ModelConfig`.

Key idea: both are poured into one dictionary, in which they may not contradict each other, and whatever of it isn't
understood is refused. The old keys are written: every version of transformers reads them.
"""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.huggingface.fields import Fields
from megalite.config.schema import ModelConfig

DEFAULT_BASE = 10000.0
_LLAMA3 = {"low_freq_factor": float, "high_freq_factor": float, "original_max_position_embeddings": int}
"""Constants of Llama 3's scaling, which `ModelConfig` has under `rope_` and the same names."""


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
    kind = rope.choose("rope_type", ("default", "linear", "llama3"), "default")
    if kind == "linear":
        factor = rope.take("factor", float)
        if factor < 1:
            rope.refuse("factor", factor, "linear scaling takes a number of at least 1")
        result["rotary_seq_len_interpolation_factor"] = factor
    elif kind == "llama3":
        rope.values.setdefault("original_max_position_embeddings", positions)
        result |= {"use_rope_scaling": True, "rope_scaling_factor": rope.take("factor", float)}
        for name, of in _LLAMA3.items():
            result[f"rope_{name}"] = rope.take(name, of)
        if result["rope_high_freq_factor"] <= result["rope_low_freq_factor"]:
            rope.refuse("high_freq_factor", result["rope_high_freq_factor"], "it must be above low_freq_factor")
    if kind != "llama3":  # written beside other kinds by some versions, and without meaning there
        rope.drop("original_max_position_embeddings")
    rope.finish()
    return result


def _merged(fields: Fields) -> Fields:
    """All rotary parameters, from wherever they are."""
    new = fields.take("rope_parameters", dict, {})
    old = fields.take("rope_scaling", dict, {})
    above = {name: fields.values.pop(name, None) for name in ("rope_theta", "partial_rotary_factor")}
    merged = Fields({}, f"{fields.where}, rope_parameters" if new else f"{fields.where}, rope_scaling")
    for source in (new, old, above):
        for name, value in source.items():
            name = "rope_type" if name == "type" else name
            if value is None:
                continue
            if isinstance(value, dict):
                merged.refuse(name, value, "rotary parameters that differ between layers")
            if merged.values.setdefault(name, value) != value:
                merged.refuse(name, merged.values[name], f"the file also says {value!r}")
    return merged


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`."""
    result: dict[str, Any] = {"rope_theta": float(model.rotary_base), "rope_scaling": None}
    if model.rotary_percent != 1.0:
        result["partial_rotary_factor"] = model.rotary_percent
    if model.use_rope_scaling:
        constants = {name: of(getattr(model, f"rope_{name}")) for name, of in _LLAMA3.items()}
        result["rope_scaling"] = {"rope_type": "llama3", "factor": float(model.rope_scaling_factor), **constants}
    elif model.rotary_seq_len_interpolation_factor is not None:
        result["rope_scaling"] = {"rope_type": "linear", "factor": float(model.rotary_seq_len_interpolation_factor)}
    return result
