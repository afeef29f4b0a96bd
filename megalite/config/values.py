"""Checks that a value from a JSON file has its field's type."""

from __future__ import annotations

from typing import Any

_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}


def misfit(annotation: str, value: Any) -> str | None:
    """The type that a value should have (such as `list[int] | None`) if it has another one, else None."""
    kind = annotation.removesuffix(" | None")
    if value is None:
        return None if kind != annotation else _described(kind)
    if kind.startswith("list["):
        item = kind.removeprefix("list[").removesuffix("]")
        fits = isinstance(value, list) and all(_fits(item, each) for each in value)
        return None if fits else _described(kind)
    return None if _fits(kind, value) else _described(kind)


def _described(kind: str) -> str:
    item = kind.removeprefix("list[").removesuffix("]")
    return _WORDS[item] if item == kind else f"a list, each item {_WORDS[item]}"


def _fits(kind: str, value: Any) -> bool:
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    return type(value).__name__ == kind or (kind == "float" and isinstance(value, int))
