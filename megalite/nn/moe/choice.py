"""Rules by which experts are chosen or tokens dropped, as functions of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.config.schema import ModelConfig
from megalite.distributed.collectives import start_all_gather
from megalite.distributed.mesh import Group
from megalite.nn.moe.routing import Routing

_MOST_ROUNDS = 1000


def limited_to_groups(scores: Tensor, groups: int, group_topk: int, counted: int) -> Tensor:
    """`scores` [n, experts] of the experts in each token's `group_topk` best of `groups` groups, -inf of the others. A
    group is as good as its `counted` best experts together (DeepSeek-AI 2024)."""
    by_group = scores.unflatten(1, (groups, -1))
    value = by_group.topk(counted, dim=-1).values.sum(dim=-1)
    best = torch.zeros_like(value, dtype=torch.bool).scatter_(1, value.topk(group_topk, dim=-1).indices, True)
    return by_group.masked_fill(~best[..., None], float("-inf")).flatten(1)


def sinkhorn(logits: Tensor, mine: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Scores of `mine`, some rows of `logits` [n, experts], after rows and columns of all of exp(logits) are scaled to
    equal sums (Clark et al. 2022), or nearly so after many rounds. Rows of -inf (padding) have no part in that."""
    costs = logits.exp()
    tokens, experts = costs.any(dim=1).sum(), costs.shape[1]
    columns = costs.new_ones(experts)
    for _ in range(_MOST_ROUNDS):
        rows = 1.0 / (tokens * ((costs * columns).sum(1) + 1e-8))
        new = 1.0 / (experts * ((rows[:, None] * costs).sum(0) + 1e-8))
        change, columns = (new - columns).abs().mean().item(), new
        if change <= tolerance:
            break
    ours = mine.exp()
    return ours * columns / (tokens * ((ours * columns).sum(1, keepdim=True) + 1e-8))


def capacity_mask(
    routing: Routing, capacity: Tensor, order: Tensor, counted: Tensor, parts: list[Group], config: ModelConfig
) -> Tensor:
    """Bool as `routing.experts`: which of them keep the token, each at most `capacity` [] of the whole micro-batch:
    those with the highest weights, or with `position` the first, before any padding. `order` int64 [n]: places of the
    tokens in it. `counted` bool [n, 1]: not of padding."""
    experts, first = routing.experts, 0
    weights = routing.weights.detach().masked_fill(~counted, -torch.inf)
    places = torch.where(counted[:, 0], order, order + torch.iinfo(order.dtype).max // 2)
    for group in parts:
        first += group.rank * len(places)
        experts, weights, places = (start_all_gather(each, group).wait() for each in (experts, weights, places))
    topk = experts.shape[1]
    place = places[:, None].expand(-1, topk).flatten()
    by_place = place.argsort(stable=True)
    if config.moe_token_drop_policy == "probs":
        by_place = by_place[weights.flatten()[by_place].argsort(descending=True, stable=True)]
    ranked = by_place[experts.flatten()[by_place].argsort(stable=True)]  # by expert, then by what counts
    counts = torch.bincount(experts.flatten(), minlength=config.num_experts or 0)
    starts = counts.cumsum(0) - counts
    position = torch.empty_like(ranked)
    position[ranked] = torch.arange(len(ranked), device=ranked.device)
    kept = (position - starts[experts.flatten()] < capacity).view(-1, topk)
    return kept[first : first + len(order)]
