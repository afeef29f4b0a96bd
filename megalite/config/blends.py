"""Blends: the corpora that a data flag names, and their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.errors import UserError

MAX_MEMBERS = 2**15 - 1


@dataclass(frozen=True)
class Blend:
    """Prefixes of token files, and their weights, or None for weights by size. `flag` named them."""

    flag: str
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(items: Sequence[str], flag: str) -> Blend:
    """A blend from `WEIGHT PREFIX WEIGHT PREFIX ...` or from prefixes alone; `flag` is named in errors.

    Weights needn't sum to one. Members of weight zero are left out.
    """
    words = [item.strip() for item in items if item.strip()]
    if not words:
        raise UserError(f"{flag} is empty; give a prefix, or WEIGHT PREFIX pairs")
    numbers = [_number(word) for word in words]
    prefixes, weights = words, None
    if any(number is not None for number in numbers):
        pairs = list(zip(words[1::2], numbers[::2], strict=False))
        if 2 * len(pairs) != len(words) or None in numbers[::2] or any(number is not None for number in numbers[1::2]):
            raise UserError(
                f"{flag} {' '.join(words)}: write only prefixes, or WEIGHT PREFIX WEIGHT PREFIX ... (a prefix that "
                "looks like a number begins with ./)"
            )
        members = [(prefix, weight) for prefix, weight in pairs if weight]
        if not members or not all(0 <= weight < math.inf for _, weight in members):
            raise UserError(f"{flag}: weights must be finite, none negative and not all 0, not {' '.join(words[::2])}")
        prefixes, weights = [prefix for prefix, _ in members], tuple(weight for _, weight in members)
    if len(prefixes) > MAX_MEMBERS:
        raise UserError(f"{flag} names {len(prefixes)} prefixes; at most {MAX_MEMBERS} are possible")
    return Blend(flag, tuple(prefixes), weights)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
