"""The fields of `RunConfig` as one flat list: where each lives, its flag, its type and its default.

Flags, checks, messages and the documentation all read this list, so that none of them spells a flag a second time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megalite.config.schema import RunConfig

FINETUNING = ("finetune", "peft")
"""Sections that only finetune.py has flags for."""

KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


@dataclass(frozen=True)
class Field:
    """One field. `option`: its flag. `kind`: type of a value, of an item where `is_list`."""

    section: str
    name: str
    kind: type
    is_list: bool
    default: Any
    option: str
    aliases: tuple[str, ...]
    help: str
    choices: tuple[Any, ...] | None
    planned: str | None
    repeatable: bool

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


def all_fields() -> dict[str, Field]:
    """Every field by its path."""
    return {field.path: field for section in section_names() for field in section_fields(section)}


def _field(section: str, raw: dataclasses.Field[Any]) -> Field:
    annotation = str(raw.type).removesuffix(" | None")
    is_list = annotation.startswith("list[")
    default = raw.default if raw.default_factory is dataclasses.MISSING else raw.default_factory()
    return Field(
        section=section,
        name=raw.name,
        kind=KINDS[annotation.removeprefix("list[").removesuffix("]")],
        is_list=is_list,
        default=default,
        option=raw.metadata["name"] or "--" + raw.name.replace("_", "-"),
        aliases=tuple(raw.metadata["aliases"]),
        help=raw.metadata["help"],
        choices=raw.metadata["choices"],
        planned=raw.metadata["planned"],
        repeatable=raw.metadata["repeatable"],
    )


def get(config: RunConfig, path: str) -> Any:
    """The value at `section.name`."""
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def put(config: RunConfig, path: str, value: Any) -> None:
    """Set the value at `section.name`."""
    section, name = path.split(".")
    setattr(getattr(config, section), name, value)


def settings_not_built(config: RunConfig) -> list[tuple[str, str]]:
    """Settings whose feature isn't built yet: the flag with its value, and the feature's name."""
    pairs = ((field, get(config, field.path)) for field in all_fields().values())
    return [(each.show(value), each.planned) for each, value in pairs if each.planned and value != each.default]


def take_out(shown: list[str]) -> list[str]:
    """One line that lists flags with their values, to be taken out of a command; empty for fewer than two."""
    return [f"to run, remove these flags: {' '.join(shown)}"] if len(shown) > 1 else []
