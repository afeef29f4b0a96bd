"""Blends as megatron-core reads them; what is no blend is refused (`test_check.py`)."""

from __future__ import annotations

import pytest

from megalite.config.blends import MAX_MEMBERS, parse_blend
from megalite.config.errors import UserError


@pytest.mark.parametrize(
    "words, prefixes, weights",
    [
        ("p", "p", None),
        ("p q r", "pqr", None),
        ("30 p 70 q", "pq", (30.0, 70.0)),
        ("1 p", "p", (1.0,)),
        ("1e-9 p .5 q", "pq", (1e-9, 0.5)),
        ("0 p 1 q", "q", (1.0,)),  # which megatron-core keeps
    ],
)
def test_blends_are_parsed_as_in_megatron_core(words: str, prefixes: str, weights: tuple[float, ...] | None) -> None:
    blend = parse_blend(words.split(), "--data-path")
    assert (blend.prefixes, blend.weights) == (tuple(prefixes), weights)
    if "0 p" not in words[:3]:
        utils = pytest.importorskip("megatron.core.datasets.utils")
        theirs, shares = utils.get_blend_from_list(words.split())
        assert list(blend.prefixes) == list(theirs)
        assert (None if weights is None else list(weights)) == shares


def test_no_prefix_and_too_many_are_refused_by_flag() -> None:
    for words, says in (([], "is empty"), (["p"] * (MAX_MEMBERS + 1), f"at most {MAX_MEMBERS}")):
        with pytest.raises(UserError, match=f"--train-data-path .*{says}"):
            parse_blend(words, "--train-data-path")
