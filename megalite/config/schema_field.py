"""A dataclass field that is a command-line flag, and which numbers it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bound:
    """What must hold of a number. `rule` says it in words, after the flag and its value."""

    rule: str
    holds: Callable[[float], bool]


AT_LEAST_ONE = Bound("must be at least 1", lambda value: value >= 1)
NOT_NEGATIVE = Bound("must not be negative", lambda value: value >= 0)
ABOVE_ZERO = Bound("must be above 0", lambda value: value > 0)
UP_TO_100 = Bound("must be from 0 to 100", lambda value: 0 <= value <= 100)
UP_TO_65536 = Bound("must be from 1 to 65536", lambda value: 1 <= value <= 65536)  # each is an entry of a list
BELOW_ONE = Bound("must be from 0 to below 1", lambda value: 0 <= value < 1)


@dataclass(frozen=True)
class Flag:
    """What a field says of its flag.

    `bound`: of each of its numbers; by default a whole number is at least 1 and another isn't negative. `option`: the
    flag, where it isn't the field's name; for a boolean that is on by default it is the flag that turns it off.
    `aliases`: other accepted spellings. `repeatable`: a list that grows each time the flag is given. `needed`: no
    run goes without it. `writes`: the flag names where a run writes a "model", other files (a "folder") or one "file".
    `address`: it takes an address in object storage too, like s3://BUCKET/RUN.
    """

    help: str
    bound: Bound | None = None
    option: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    repeatable: bool = False
    needed: bool = False
    writes: str | None = None
    address: bool = False


def flag(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that becomes a command-line flag. `more`: as in `Flag`."""
    return field(default=default, metadata={"flag": Flag(help, **more)})
