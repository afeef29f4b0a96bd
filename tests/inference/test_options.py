"""Numbers that make no sense are refused by flag."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megalite.config.errors import FlagError
from megalite.config.flags import FlagParser, parse_namespace
from megalite.inference.options import GenerationOptions, add_generation_flags, read_generation_options


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", 0),
        ("top_k", -3),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_a_number_out_of_range_is_refused_by_its_flag(field: str, value: Any) -> None:
    with pytest.raises(FlagError, match=f"--{field.replace('_', '-')} {value} must be"):
        GenerationOptions(**{field: value})


def test_the_flags_fill_every_field_and_default_to_its_default() -> None:
    parser = FlagParser("test", "test")
    add_generation_flags(parser)
    given, _ = parse_namespace(parser, [])
    assert read_generation_options(given) == GenerationOptions()
    words = ["--max-new-tokens", "3", "--temperature", "0.5", "--top-k", "7", "--top-p", "0.25", "--seed", "9"]
    given, _ = parse_namespace(parser, words)
    assert read_generation_options(given) == GenerationOptions(3, 0.5, 7, 0.25, 9)
