"""The one exception for mistakes that the user can correct."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in flags, files or data. Its message names the flag, file or line and says what would be valid.

    Entry points print the message without a traceback. `everywhere`: all ranks raise it alike, so one speaks for all.
    """

    everywhere = False


class FlagError(UserError):
    """A bad flag or combination of flags, found before any process group exists. Entry points exit with status 2."""


def refuse(problems: list[str]) -> None:
    """Raise one FlagError with all `problems`, if there are any."""
    if problems:
        raise FlagError("\n".join(problems))


def listed(items: Iterable[str], *, shown: int = 8, before: str = "\n  ") -> str:
    """Items of a message, each with `before` in front of it: the first few, then how many more there are."""
    items = list(items)
    more = [f"and {len(items) - shown} more"] if len(items) > shown else []
    return "".join(f"{before}{item}" for item in [*items[:shown], *more])
