"""Which keys a query sees follows from the places of both alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.distributed.mesh import Group
from megalite.nn.tokens import Places, Tokens, VirtualTokens, visibility

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2], [5] * 8], dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("virtual", [0, 3])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
def test_a_query_sees_virtual_tokens_and_its_document_from_the_window_up_to_itself(
    window: int | None, virtual: int, documents: torch.Tensor | None
) -> None:
    """Queries may be any of the tokens, and keys in any order, as where a rank holds a part of each sequence."""
    whole = Places(torch.arange(8), documents)
    whole = whole.after(virtual) if virtual else whole
    places, order = torch.arange(8 + virtual)[[0, 3, -1]], torch.arange(8 + virtual).flip(0)
    queries, keys = (
        Places(whole.index[some], None if whole.documents is None else whole.documents[:, some], virtual)
        for some in (places, order)
    )
    mask = visibility(queries, keys, window)[:, 0]
    for b in range(len(mask)):
        for row, query in zip(mask[b], places.tolist(), strict=True):
            seen = {
                key
                for key in range(query + 1)
                if key < virtual
                or (
                    (window is None or query - key <= window)
                    and (documents is None or documents[b, query - virtual] == documents[b, key - virtual])
                )
            }
            assert set(order[row].tolist()) == seen


def test_virtual_tokens_in_the_sequence_or_before_its_keys_see_and_are_seen_alike() -> None:
    tokens = Tokens.whole(torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1]]), DOCUMENTS)
    before, inside = (VirtualTokens(3, in_sequence=among).before(tokens) for among in (False, True))
    assert (inside.keys, before.queries) == (None, tokens.queries)
    mask = visibility(inside.queries, inside.queries, 1)
    assert torch.equal(mask[:, :, 3:], visibility(before.queries, before.keys, 1))
    assert inside.positions.tolist() == [[0, 1, 2, *before.positions[0].tolist()]]
    later = VirtualTokens(
        3, in_sequence=True
    ).before(  # the last token, the rest is in a cache
        replace(
            tokens,
            positions=tokens.positions[:, 7:],
            queries=tokens.queries.slice(7, 8),
            keys=tokens.queries,
            begins=False,
        )
    )
    assert torch.equal(visibility(later.queries, later.keys, 1), mask[:, :, -1:])


def test_ranks_hold_parts_of_the_sequence_between_blocks_virtual_tokens_included() -> None:
    tokens = VirtualTokens(4, in_sequence=True).before(Tokens.whole(torch.arange(8)[None]))
    parts = [replace(tokens, group=Group((0, 1, 2), rank, None)).index_between_blocks for rank in range(3)]
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
