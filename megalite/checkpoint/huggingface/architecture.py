"""What there is to know of one Hugging Face architecture: its parameters' names, its configuration both ways.

Key idea: the table is asked for the model's parameters, whose names and shapes come from the model itself. So a
parameter that the table lacks, or a tensor that the model doesn't want, is found, and no shape is derived twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.fields import REQUIRED, Fields
from megalite.checkpoint.huggingface.parts import Part, Rule
from megalite.checkpoint.huggingface.parts import same as stored_as
from megalite.config.schema import ModelConfig
from megalite.distributed.param_spec import Shape

CLASSIFIER = "ForSequenceClassification"  # how the names of such classes end
HEAD = "classifier.weight"
_EVERYWHERE: dict[str, Rule] = {
    HEAD: stored_as("score.weight")
}  # a classifier's head has one name in all architectures
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def _parts(names: Mapping[str, Rule], name: str, shape: Shape) -> tuple[Part, ...] | None:
    match = _LAYER.match(name)
    number = "" if match is None else match[1]
    rule = names.get(name if match is None else f"decoder.layers.{{n}}.{name[match.end() :]}")
    return None if rule is None else tuple(replace(one, name=one.name.replace("{n}", number)) for one in rule(shape))


@dataclass(frozen=True)
class Architecture:
    """`model_type` and `class_name` as in `config.json`. `prefix`: of tensor names, absent in files that hold the model
    without its head. `names`: global name (`{n}`: a layer's number) to rule. `read`: from the fields of `config.json`
    to those of a resolved `ModelConfig`; `write`: back. `buffers`: names of stored tensors that are no parameters, as
    regular expressions. `others`: other rules for some of `names`, which are read where files have them."""

    model_type: str
    class_name: str
    prefix: str
    names: Mapping[str, Rule]
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    buffers: tuple[str, ...] = ()
    others: Mapping[str, Rule] = field(default_factory=dict)

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Where the parameter `name` of the logical `shape` lies in the files."""
        parts = _parts({**self.names, **_EVERYWHERE}, name, shape)
        if parts is None:
            raise CheckpointError(f"{self.model_type} has no parameter that corresponds to {name}")
        return parts

    def other_parts(self, name: str, shape: Shape) -> tuple[Part, ...] | None:
        """Where else it may lie; None: nowhere."""
        return _parts(self.others, name, shape)

    @property
    def classifier_name(self) -> str:
        """The class in `config.json` of a classifier with this network."""
        return self.class_name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + CLASSIFIER

    def is_buffer(self, name: str) -> bool:
        """Whether a stored tensor is no parameter."""
        return any(re.fullmatch(pattern, name) for pattern in self.buffers)


class Same(NamedTuple):
    """A field of `config.json` that is the field `ours` of `ModelConfig`. `default`: where it is absent."""

    ours: str
    kind: type
    default: Any = REQUIRED


def read_same(fields: Fields, table: Mapping[str, Same]) -> dict[str, Any]:
    """The fields of `ModelConfig` from those of `config.json` in the table."""
    return {ours: fields.take(name, kind, default) for name, (ours, kind, default) in table.items()}


def write_same(model: ModelConfig, table: Mapping[str, Same]) -> dict[str, Any]:
    """The inverse."""
    return {name: getattr(model, same.ours) for name, same in table.items()}


def attention_shape(heads: int, groups: int | None, width: int) -> dict[str, Any]:
    """The fields of `ModelConfig` that say how many heads of which width there are."""
    groups = heads if groups is None else groups
    return {
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": width,
    }
