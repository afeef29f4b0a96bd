"""A dataclass field that is a command-line flag."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def flag(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    choices: tuple[Any, ...] | None = None,
    planned: str | None = None,
    repeatable: bool = False,
) -> Any:
    """A dataclass field that becomes a command-line flag.

    `name`: the flag, where it isn't the field's name; for a boolean that is on by default it is the flag that turns
    it off. `aliases`: other accepted spellings. `planned`: the feature isn't built yet; its name. Any value but the
    default is then refused by `config.check.not_built`. `repeatable`: a list that grows with each time it is given,
    where others are replaced.
    """
    metadata = {
        "help": help,
        "name": name,
        "aliases": aliases,
        "choices": choices,
        "planned": planned,
        "repeatable": repeatable,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
