"""The fields of `RunConfig` as one flat list: where each lives, its flag, its type and its default.

Flags, checks, messages and the documentation all read this list, so that none of them spells a flag a second time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config.schema import RunConfig
from megalite.config.schema_field import AT_LEAST_ONE, NOT_NEGATIVE, Flag

FINETUNING = ("finetune", "peft")
"""Sections that only finetune.py has flags for."""

KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


@dataclass(frozen=True, kw_only=True)
class Field(Flag):
    """One field and its flag. `kind`: type of a value, of an item where `is_list`. `optional`: may have no value in a
    resolved configuration."""

    section: str
    name: str
    kind: type
    is_list: bool
    optional: bool
    default: Any

    @property
    def path(self) -> str:
        """`section.name`, the name of this field everywhere in `config/`."""
        return f"{self.section}.{self.name}"

    @property
    def turns_off(self) -> bool:
        """The field is true by default and its flag makes it false."""
        return self.kind is bool and self.default is True

    def show(self, value: Any) -> str:
        """The field's flag with a value, as a user would type it."""
        if self.kind is bool:
            return self.option if value != self.default else f"no {self.option}"
        words = value if isinstance(value, list) else [value]
        return " ".join([self.option, *(str(word) for word in words)])


def section_names() -> list[str]:
    """The sections of `RunConfig` in order."""
    return [section.name for section in dataclasses.fields(RunConfig)]


def pretraining_sections() -> list[str]:
    """The sections that pretrain_gpt.py has flags for."""
    return [name for name in section_names() if name not in FINETUNING]


def finetuning_sections() -> list[str]:
    """The sections that finetune.py has flags for: all, its own first."""
    return [*FINETUNING, *pretraining_sections()]


def section_fields(section: str) -> list[Field]:
    """The fields of one section in order. A KeyError for a section that doesn't exist."""
    if section not in section_names():
        raise KeyError(section)
    return [_field(section, raw) for raw in dataclasses.fields(getattr(RunConfig(), section))]


@functools.cache  # checks ask for it dozens of times, and it never changes
def all_fields() -> Mapping[str, Field]:
    """Every field by its path."""
    return {field.path: field for section in section_names() for field in section_fields(section)}


def _field(section: str, raw: dataclasses.Field[Any]) -> Field:
    annotation = str(raw.type).removesuffix(" | None")
    kind = KINDS[annotation.removeprefix("list[").removesuffix("]")]
    said: Flag = raw.metadata["flag"]
    filled = {
        "option": said.option or "--" + raw.name.replace("_", "-"),
        "bound": said.bound or {int: AT_LEAST_ONE, float: NOT_NEGATIVE}.get(kind),
    }
    return Field(
        section=section,
        name=raw.name,
        kind=kind,
        is_list=annotation.startswith("list["),
        optional=annotation != raw.type,
        default=raw.default,
        **vars(said) | filled,
    )


def get(config: RunConfig, path: str) -> Any:
    """The value at `section.name`."""
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def put(config: RunConfig, path: str, value: Any) -> None:
    """Set the value at `section.name`."""
    section, name = path.split(".")
    setattr(getattr(config, section), name, value)


def given(config: RunConfig, *paths: str) -> list[str]:
    """Those of the fields that don't have their default, each as a user would type it."""
    fields = all_fields()
    return [fields[path].show(get(config, path)) for path in paths if get(config, path) != fields[path].default]


def needs(config: RunConfig, met: bool, reason: str, *paths: str) -> list[str]:
    """One line for each of the fields that was set although what it needs, `reason`, isn't `met`."""
    return [] if met else [f"{shown} needs {reason}" for shown in given(config, *paths)]


def take_out(shown: list[str]) -> list[str]:
    """One line that lists flags with their values, to be taken out of a command; empty for fewer than two."""
    if len(shown) < 2:
        return []
    return [f"to run, remove these flags: {' '.join(shown)}"]


def output_folders(config: RunConfig) -> dict[str, str]:
    """The folders of checkpoints and adapters that this run writes, by flag. Checkpoints come of training alone."""
    writers = [each for each in all_fields().values() if each.writes == "model" and get(config, each.path) is not None]
    trains = not config.validation.skip_train
    return {each.option: get(config, each.path) for each in writers if trains or each.section != "checkpoint"}


def adapter_folders(config: RunConfig) -> dict[str, str]:
    """The folders of adapters among them."""
    return {flag: folder for flag, folder in output_folders(config).items() if flag != "--save"}


def value_problems(config: RunConfig) -> Iterator[str]:
    """Every field whose value is out of its own bounds. Combinations of fields are `check.py`'s."""
    for field in all_fields().values():
        value = get(config, field.path)
        for item in value if isinstance(value, list) else [value]:
            if item is not None and (problem := _value_problem(field, item)):
                yield problem


def _value_problem(field: Field, value: Any) -> str | None:
    if field.choices:
        listed = ", ".join(str(choice) for choice in field.choices)
        return None if value in field.choices else f"{field.show(value)}: not one of {listed}"
    if field.kind is str and not str(value).strip():
        return f"{field.option} is empty: leave it out or give it a value"
    if field.bound is None:
        return None
    if not math.isfinite(value):
        return f"{field.show(value)}: not a finite number"
    return None if field.bound.holds(value) else f"{field.show(value)}: {field.bound.rule}"
