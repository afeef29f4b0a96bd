"""Values as they are written: whole numbers by users, and those of a JSON file.

Key idea: decimal arithmetic, so that no whole number is rounded on its way: `2.4B` is exact, `16.9` is refused.
"""

from __future__ import annotations

from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, InvalidOperation
from typing import Any

LARGEST = 2**63 - 1  # what a tensor of integers can hold
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
_SUFFIXES = {"K": 3, "M": 6, "B": 9, "T": 12}  # powers of ten
_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}


def whole_number(text: str, *, suffixes: bool = False) -> int:
    """`12`, `1e6` or `1000.0`; with `suffixes` also `2.4B` (K, M, B, T: powers of 1000). A ValueError says why not."""
    power = _SUFFIXES.get(text[-1:].upper(), 0) if suffixes else 0
    try:
        value = Decimal(text[:-1] if power else text)
    except InvalidOperation:
        kind = "a number with one of the suffixes K, M, B, T" if suffixes else "a number"
        raise ValueError(f"{text} is not {kind}") from None
    if not value.is_finite():
        raise ValueError(f"{text} is not a finite number")
    if -LARGEST <= value <= LARGEST:  # comparisons are exact for any exponent
        value = value.scaleb(power, _EXACT)
    if not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{text} is too large: at most {LARGEST}")
    if value != value.to_integral_value():
        raise ValueError(f"{text} is not a whole number")
    return int(value)


def type_problem(annotation: str, value: Any) -> str | None:
    """What a stored value should be, in words, if it isn't of the annotated type (such as `list[int] | None`)."""
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return None
    item = kind.removeprefix("list[").removesuffix("]")
    if item == kind:
        return None if _is_a(kind, value) else _WORDS[kind]
    fits = isinstance(value, list) and all(_is_a(item, each) for each in value)
    return None if fits else f"a list, each item {_WORDS[item]}"


def _is_a(kind: str, value: Any) -> bool:
    return type(value).__name__ == kind or (kind == "float" and type(value) is int)
