"""Dropout as a function of its place: rate, scale, and what the mask may and may not depend on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.distributed import random
from megalite.nn.attention_kernels import core_attention
from megalite.nn.dropout import dropout, hidden_dropout
from megalite.nn.tokens import Places, Tokens
from tests.helpers import UNFUSED, tiny_build

LENGTH, WIDTH = 64, 96
KEYS = random.fold(1234, torch.arange(100, 108))


def whole(keys: Tensor | None, length: int = LENGTH) -> Tokens:
    return replace(Tokens.whole(torch.arange(length)[None]), dropout_keys=keys)


def mask(keys: Tensor, *, tokens: Tensor | None = None, layer: int = 3, site: str = "mlp", drop: float = 0.3) -> Tensor:
    """What hidden dropout does to ones [s, b, h]."""
    places = whole(keys) if tokens is None else replace(whole(keys), queries=Places(tokens))
    ones = torch.ones(len(places.queries.index), len(keys), WIDTH, dtype=torch.float64)
    return hidden_dropout(ones, drop, places, layer, site)


@pytest.mark.parametrize("drop", [0.1, 0.3, 0.9])
def test_the_share_asked_for_is_dropped_and_the_rest_scaled_up(drop: float) -> None:
    values = mask(KEYS, drop=drop)
    kept = values[values != 0]
    assert torch.allclose(kept, torch.full_like(kept, 1 / (1 - drop)))
    count = values.numel()
    assert abs(len(kept) / count - (1 - drop)) < 5 * math.sqrt(drop * (1 - drop) / count)


def test_the_mask_of_a_sample_is_the_same_anywhere_in_the_batch_and_every_time() -> None:
    whole = mask(KEYS)
    assert torch.equal(whole, mask(KEYS))
    order = torch.tensor([5, 0, 7])
    assert torch.equal(mask(KEYS[order]), whole[:, order])
    assert torch.equal(mask(KEYS[2:3]), whole[:, 2:3])


def test_a_rank_with_a_part_of_the_tokens_computes_its_part_of_the_mask() -> None:
    whole = mask(KEYS)
    zigzag = torch.cat((torch.arange(8, 16), torch.arange(48, 56)))
    assert torch.equal(mask(KEYS, tokens=zigzag), whole[zigzag])


def test_samples_layers_and_sites_have_independent_masks() -> None:
    base = (mask(KEYS[:1]) != 0).double().flatten()
    others = [mask(KEYS[1:2]), mask(KEYS[:1], layer=4), mask(KEYS[:1], site="attention output")]
    for other in others:
        pair = torch.stack((base, (other != 0).double().flatten()))
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 5 / math.sqrt(base.numel())


def test_the_gradient_passes_where_the_value_did() -> None:
    x = torch.randn(LENGTH, 8, WIDTH, dtype=torch.float64, requires_grad=True)
    y = hidden_dropout(x, 0.3, whole(KEYS), 3, "mlp")
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, mask(KEYS))


def test_no_keys_or_no_rate_means_no_dropout() -> None:
    x = torch.randn(LENGTH, 8, WIDTH)
    assert hidden_dropout(x, 0.3, whole(None), 0, "mlp") is x
    assert hidden_dropout(x, 0.0, whole(KEYS), 0, "mlp") is x
    assert (dropout(x, 1.0, KEYS[None, :, None], torch.arange(WIDTH)) == 0).all()


def attention_weights(
    keys: Tensor, *, heads: int = 4, head: int = 0, groups: int = 2, queries: slice = slice(None)
) -> Tensor:
    """Dropped attention weights [b, heads, queries, keys] of equal scores: the values are unit vectors, one a key."""
    core = core_attention(tiny_build(attention_dropout=0.4), UNFUSED)
    core.first_head, length = head, 32
    q, k = (torch.zeros(length, len(keys), n, length, dtype=torch.float64) for n in (heads, groups))
    values = torch.eye(length, dtype=torch.float64)[:, None, None].expand_as(k)
    tokens = whole(keys, length)
    tokens = replace(tokens, queries=Places(tokens.queries.index[queries]), keys=tokens.queries)
    out = core(q[queries], k, values, replace(tokens, mask=core.mask(tokens).fill_(True)), 0)
    return out.unflatten(-1, (heads, length)).permute(1, 2, 0, 3)


def test_attention_dropout_drops_and_scales_weights_after_the_softmax() -> None:
    weights = attention_weights(KEYS) * 32
    kept = weights[weights != 0]
    assert torch.allclose(kept, torch.full_like(kept, 1 / 0.6))
    assert abs(len(kept) / weights.numel() - 0.6) < 5 * math.sqrt(0.24 / weights.numel())


def test_attention_dropout_depends_on_sample_head_query_and_key_alone() -> None:
    whole = attention_weights(KEYS)
    assert torch.equal(attention_weights(KEYS[3:5]), whole[3:5])
    # A rank with the last two heads, which are a group of their own.
    assert torch.equal(attention_weights(KEYS, heads=2, head=2, groups=1), whole[:, 2:])
    assert torch.equal(attention_weights(KEYS, groups=1), whole)
    assert torch.equal(attention_weights(KEYS, queries=slice(3, None, 4)), whole[:, :, 3::4])


def test_attention_masks_of_heads_and_samples_are_independent() -> None:
    kept = (attention_weights(KEYS) != 0).double()
    pairs = [(kept[0, 0], kept[0, 1]), (kept[0, 0], kept[1, 0]), (kept[0, 0], kept[0, 0].t())]
    for pair in pairs:
        assert abs(torch.corrcoef(torch.stack([x.flatten() for x in pair]))[0, 1].item()) < 5 / 32


@pytest.mark.parametrize("drop", [0.5, 1.0])
def test_what_is_dropped_is_zero_even_where_it_is_infinite(drop: float) -> None:
    x = torch.full((LENGTH, len(KEYS), WIDTH), torch.inf, requires_grad=True)
    result = hidden_dropout(x, drop, whole(KEYS), 0, "mlp output")
    result.backward(torch.full_like(result, torch.inf))
    for values in (result, x.grad):
        assert ((values == 0) | (values == torch.inf)).all()
        assert (values == torch.inf).any() == (drop < 1)
