"""Routers, and experts whose tokens come from other ranks, against loops over tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.nn.module import initialize
from megalite.nn.moe.choice import capacity_mask, limited_to_groups, sinkhorn
from megalite.nn.moe.dispatch import DISPATCHERS
from megalite.nn.moe.experts import Experts
from megalite.nn.moe.router import Router
from megalite.nn.moe.routing import Routing
from megalite.nn.tokens import Auxiliary, Places, Tokens
from megalite.precision import products
from tests.helpers import FP64, tiny_build, tiny_config

DOUBLE = torch.float64
NETWORK: dict[str, Any] = {"num_experts": 8, "moe_ffn_hidden_size": 6, "swiglu": True, "add_bias_linear": False}


class _NoCache:
    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def _router(**fields: Any) -> Router:
    router = Router(tiny_build(FP64, **(NETWORK | fields)), 0)
    initialize(router, 1)
    with torch.no_grad():
        router.weight.copy_(_random(*router.weight.shape, seed=7))
    return router


def _tokens(length: int, batch: int, *, training: bool = True) -> Tokens:
    tokens = Tokens.whole(torch.arange(length).expand(batch, -1))
    keys = torch.arange(batch) if training else None
    return Tokens(tokens.positions, tokens.queries, dropout_keys=keys, auxiliary=Auxiliary(1.0) if training else None)


def test_softmax_over_the_chosen_and_over_all() -> None:
    x = _random(5, 2, 32)
    for before in (False, True):
        router = _router(moe_router_pre_softmax=before, moe_router_topk=3, moe_router_topk_scaling_factor=1.5)
        routing = router(x, _tokens(5, 2, training=False))
        for token, (experts, weights) in enumerate(zip(routing.experts, routing.weights, strict=True)):
            logits = router.weight @ x.flatten(0, 1)[token]
            best = sorted(range(8), key=lambda e: -logits[e].item())[:3]
            assert experts.tolist() == best
            powers = logits.exp()
            truth = powers[best] / (powers.sum() if before else powers[best].sum()) * 1.5
            torch.testing.assert_close(weights, truth)


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    router, x = _router(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True), _random(5, 2, 32)
    assert router.expert_bias is not None
    router.expert_bias.data[3] = 10.0
    routing = router(x, _tokens(5, 2, training=False))
    assert (routing.experts == 3).any(dim=1).all()
    scores = (x.flatten(0, 1) @ router.weight.t()).sigmoid().gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, scores / scores.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("counted", [1, 2])
def test_experts_come_from_the_best_groups(counted: int) -> None:
    scores = _random(6, 12)
    limited = limited_to_groups(scores, groups=4, group_topk=2, counted=counted)
    for row, found in zip(scores, limited, strict=True):
        worth = [sum(sorted(row[3 * g : 3 * g + 3].tolist())[-counted:]) for g in range(4)]
        best = sorted(range(4), key=lambda g: -worth[g])[:2]
        for expert in range(12):
            assert found[expert] == (row[expert] if expert // 3 in best else -math.inf)


def test_sinkhorn_scores_have_equal_sums() -> None:
    logits = _random(16, 4)
    scores = sinkhorn(logits, logits, tolerance=1e-7)
    torch.testing.assert_close(scores.sum(dim=0), torch.full((4,), 0.25, dtype=DOUBLE), rtol=1e-4, atol=0)
    torch.testing.assert_close(scores.sum(dim=1), torch.full((16,), 1 / 16, dtype=DOUBLE), rtol=1e-4, atol=0)


@pytest.mark.parametrize("padding", [(), (2, 3, 7)])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_an_expert_keeps_up_to_its_capacity(policy: str, padding: tuple[int, ...]) -> None:
    experts = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(n))[:2] for n in range(10)])
    routing = Routing(experts, _random(10, 2).abs())
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    config = tiny_config(**NETWORK | {"num_experts": 4}, moe_token_drop_policy=policy)
    counted = torch.tensor([n not in padding for n in range(10)])[:, None]
    kept = capacity_mask(routing, torch.tensor(3.0), order, counted, [], config)
    for expert in range(4):
        mine = [(n, k) for n in range(10) for k in range(2) if experts[n, k] == expert and n not in padding]
        weight = {(n, k): routing.weights[n, k].item() for n, k in mine}
        ranked = sorted(mine, key=lambda at: -weight[at] if policy == "probs" else order[at[0]].item())
        assert {at for at in mine if kept[at]} == set(ranked[:3])


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.3, 0.2]},
        {"moe_z_loss_coeff": 0.1},
    ],
    ids=str,
)
def test_a_sequence_with_padding_counts_as_without_it_and_beside_others(fields: dict[str, Any]) -> None:
    """Losses of two sequences of 6 and 3 tokens, by their gradients, and what is counted for biases and the log."""
    x, router, lengths = _random(8, 2, 32), _router(**fields), [6, 3]
    for row, length in enumerate(lengths):
        router(x[:length, row : row + 1], _tokens(length, 1)).weights.sum().mul(0.0).backward()
    alone, counts = router.weight.grad, router.figures.values.clone()
    router.weight.grad = None
    router.figures.values.zero_()
    tokens = replace(_tokens(8, 2), lengths=torch.tensor(lengths))
    router(x, tokens).weights.sum().mul(0.0).backward()
    assert alone is not None and router.weight.grad is not None
    torch.testing.assert_close(router.weight.grad, alone, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(router.figures.values, counts, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position"},
        {"moe_expert_capacity_factor": 0.8},
        {"moe_router_load_balancing_type": ["sinkhorn"], "moe_router_topk": 1},
    ],
    ids=str,
)
def test_padding_takes_no_place_of_a_token(fields: dict[str, Any]) -> None:
    x, router = _random(9, 2, 32), _router(**fields)
    without = router(x[:5], _tokens(5, 2))
    found = router(x, replace(_tokens(9, 2), lengths=torch.tensor([5, 5])))
    assert torch.equal(found.experts[:10], without.experts)
    torch.testing.assert_close(found.weights[:10], without.weights, rtol=1e-12, atol=0)


def test_tokens_after_a_cache_are_never_dropped() -> None:
    router, x = _router(moe_expert_capacity_factor=0.1), _random(1, 6, 32)
    places = Places(torch.tensor([3]))
    tokens = Tokens(torch.full((6, 1), 3), places, places, cache=_NoCache(), begins=False)
    assert router(x, tokens).kept is None
    (kept,) = router(x, Tokens(torch.full((6, 1), 3), places))[2:]
    assert kept is not None and 0 < kept.sum() <= 8  # one of each expert


def test_auxiliary_losses_are_their_formulas_and_join_the_backward() -> None:
    fields = {"moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.3, 0.2]}
    router, x, batch = _router(**fields, moe_z_loss_coeff=0.1), _random(6, 2, 32), 2
    routing = router(x, _tokens(6, batch))
    routing.weights.sum().mul(0.0).backward()  # of the auxiliary losses alone
    found = router.weight.grad
    weight = router.weight.detach().clone().requires_grad_()
    logits = x.flatten(0, 1) @ weight.t()
    probabilities = logits.softmax(dim=-1)
    chosen = F.one_hot(logits.topk(2).indices, 8).sum(1).to(DOUBLE)
    loss = 0.1 * logits.logsumexp(-1).square().mean()
    for rows, coefficient in (([slice(0, None, 2), slice(1, None, 2)], 0.3), ([slice(None)], 0.2)):
        for row in rows:
            share = chosen[row].mean(0) / 2
            loss = loss + coefficient * 8 * (share * probabilities[row].mean(0)).sum() / len(rows)
    (loss * batch).backward()
    assert found is not None and weight.grad is not None
    torch.testing.assert_close(found, weight.grad, rtol=1e-12, atol=1e-14)
    balance, z, entropy, tokens, dropped = router.figures.values[8:].tolist()
    assert balance + z == pytest.approx(loss.item() * batch)
    assert (tokens, dropped) == (12, 0)
    assert entropy == pytest.approx(-(probabilities * probabilities.log()).sum().item())
    assert router.figures.values[:8].tolist() == chosen.sum(0).tolist()


# ---------------------------------------------------------------------------------------------------------- dispatch

EVEN = [[0, 3], [7, 1], [2, 5], [4, 6], [1, 0], [6, 2]]
CHOICES = {
    "all experts": [EVEN, EVEN[::-1]],
    "all to one expert": [[[5, 0]] * 4, [[5, 0]] * 3],
    "three tokens": [[[5, 0], [3, 1]], [[7, 3]]],
    "a rank without tokens": [[[1, 2], [6, 7]], []],
}


def _layer(mesh: Mesh, kind: str, choice: str, drops: bool) -> tuple[Tensor, ...]:
    """On each rank of two: its tokens' results, and gradients of these and of the weights; of the first expert matrix
    on this rank. The tokens of a tensor-parallel or data rank are its own."""
    experts = Experts(tiny_build(FP64, mesh, **NETWORK))
    initialize(experts, 1)
    chosen = torch.tensor(CHOICES[choice][mesh.rank], dtype=torch.int64).view(-1, 2)
    n = len(chosen)
    x, weights = _random(n, 32, seed=mesh.rank), _random(n, 2, seed=9 + mesh.rank)
    x.requires_grad_()
    weights.requires_grad_()
    kept = torch.arange(2 * n).view(n, 2) % 3 > 0 if drops else None
    used = weights if kept is None else weights * kept
    y = DISPATCHERS[kind](mesh, 8)(x, Routing(chosen, used, kept), experts)
    y.sin().sum().backward()
    assert x.grad is not None and weights.grad is not None and experts.linear_fc1.weight.grad is not None
    return y.detach(), x.grad, weights.grad, experts.linear_fc1.weight.grad


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", DISPATCHERS)
@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=2, etp=2)], ids=["EP 2", "ETP 2"])
def test_tokens_of_two_ranks_get_what_a_loop_computes(
    pool: ProcessPool, layout: Layout, kind: str, choice: str
) -> None:
    drops = choice == "all experts"
    found = pool.run(_layer, 2, kind, choice, drops, layout=layout)
    experts = Experts(tiny_build(FP64, single_process_mesh(), **NETWORK))
    initialize(experts, 1)
    w1 = experts.linear_fc1.weight.detach().clone().requires_grad_()
    w2 = experts.linear_fc2.weight.detach()
    for rank, (y, x_grad, weights_grad, _) in enumerate(found):
        chosen = CHOICES[choice][rank]
        x, weights = _random(len(chosen), 32, seed=rank), _random(len(chosen), 2, seed=9 + rank)
        x.requires_grad_()
        weights.requires_grad_()
        rows = []
        for n, pair in enumerate(chosen):
            row = torch.zeros(32, dtype=DOUBLE)
            for k, e in enumerate(pair):
                if not drops or (2 * n + k) % 3 > 0:
                    row = row + weights[n, k] * (w2[e] @ (F.silu(w1[e, 0] @ x[n]) * (w1[e, 1] @ x[n])))
            rows.append(row)
        if not rows:
            assert y.shape == (0, 32)
            continue
        truth = torch.stack(rows)
        truth.sin().sum().backward()
        assert x.grad is not None and weights.grad is not None
        for ours, theirs in ((y, truth.detach()), (x_grad, x.grad), (weights_grad, weights.grad)):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    assert w1.grad is not None
    dim = 0 if layout.ep == 2 else 2
    torch.testing.assert_close(torch.cat([each[3] for each in found], dim=dim), w1.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 8), (0, 0, 0)])
def test_the_grouped_kernel_computes_what_products_one_by_one_do(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken on CUDA; a CPU has it too."""
    rows = sum(counts)
    x, grad, weight = (_random(*shape).float() for shape in ((rows, 16), (rows, 8), (3, 8, 16)))
    found = []
    for grouped in (False, True):
        monkeypatch.setattr(products, "_is_grouped_by_torch", lambda *_, kernel=grouped: kernel)
        total = torch.ones(3, 8, 16)
        made = products.Products()
        made.add_grouped_weight_gradient(total, grad, x, counts)
        found.append((made.grouped_output(x, weight, counts), made.grouped_input_gradient(grad, weight, counts), total))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
