"""Which experts a token is sent to, and the losses that spread tokens over them.

Key idea: what looks at more than one token looks at a whole sequence or micro-batch, whichever ranks its tokens are on:
counts and scores are put together over these ranks. So a routing doesn't depend on the layout. An auxiliary loss joins
the backward at the weights; each rank adds its tokens' part of it.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from megalite.config.resolve import balancing
from megalite.distributed import random
from megalite.distributed.collectives import all_reduce, start_all_gather
from megalite.distributed.mesh import Group
from megalite.distributed.param_spec import ZEROS, Init, ParamSpec, replicated
from megalite.nn.module import Build, ShardedModule
from megalite.nn.moe.choice import capacity_mask, limited_to_groups, sinkhorn
from megalite.nn.moe.figures import LoadFigures
from megalite.nn.moe.routing import Routing
from megalite.nn.tokens import Tokens


class _Attach(torch.autograd.Function):
    """The identity on `x`, from which a backward also begins at `loss` []."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones_like(ctx.saved_tensors[0])


class Router(ShardedModule):
    """Scores of all experts for each token, and the `--moe-router-topk` best. `number`: of the layer, global.

    The product is in the activations' dtype or in that of `--moe-router-dtype`; all after it is at least wide.
    """

    def __init__(self, build: Build, number: int):
        super().__init__()
        self.config = config = build.config
        assert config.num_experts is not None
        self.number, self.experts, self.topk = number, config.num_experts, config.moe_router_topk
        self.cp, self.wide = build.mesh.cp, build.precision.wide
        shape = (self.experts, config.hidden_size)
        boxes = replicated(shape, build.place(), partial=build.mesh.layout.sequence_parallel)
        spec = ParamSpec(shape, shape, boxes, Init(std=config.init_method_std))
        self.weight = self.add_parameter("weight", spec, build)
        asked = {None: build.precision.compute, "fp32": build.precision.wide, "fp64": torch.float64}
        self.product = asked[config.moe_router_dtype]
        biased = config.moe_router_enable_expert_bias
        self.balancing = balancing(config)
        of_load = "global_aux_loss" in self.balancing
        self.expert_bias = self.add_state("expert_bias", (self.experts,), ZEROS, build) if biased else None
        even = torch.full((self.experts,), 1.0 / self.experts, dtype=build.precision.wide, device=build.mesh.device)
        self.load = even if of_load else None
        self.figures = LoadFigures(self.experts, build.precision.wide, build.mesh.device)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        """`x` [s, b, h], this rank's tokens."""
        logits = self._jittered(x, tokens).flatten(0, 1).to(self.product) @ self.weight.to(self.product).t()
        logits = logits.to(torch.promote_types(self.wide, self.product))
        parts = [group for group in (tokens.group, self.cp) if group is not None and group.size > 1]
        counted, lengths = self._without_padding(x, tokens, parts)
        routing = self._route(logits, counted, parts, training=tokens.dropout_keys is not None)
        # In generation no text may depend on the others.
        if self.config.moe_expert_capacity_factor is not None and tokens.cache is None:
            most, order = self._capacity(lengths), self._order(x, tokens)
            kept = capacity_mask(routing, most, order, counted, parts, self.config)
            routing = routing._replace(weights=routing.weights * kept, kept=kept)
        if tokens.auxiliary is None:
            return routing
        batch, auxiliary = x.shape[1], tokens.auxiliary
        probabilities = self._probabilities(logits) * counted
        balance, z = self._losses(logits, probabilities, counted, lengths, parts)
        if auxiliary.counting:
            self.figures.add(routing, probabilities, balance * batch, z * batch, counted)
        loss = (balance + z) * (auxiliary.scale * batch)
        if loss.requires_grad:
            routing = routing._replace(weights=cast(Tensor, _Attach.apply(routing.weights, loss)))
        return routing

    def _without_padding(self, x: Tensor, tokens: Tokens, parts: list[Group]) -> tuple[Tensor, Tensor]:
        """Which of this rank's tokens count, bool [n, 1], and how many do of each whole sequence, wide [b]. How much
        padding there is depends on the layout, so it counts nowhere."""
        counted = tokens.counted_between_blocks
        if counted is None or tokens.lengths is None:
            length, batch = x.shape[0] * prod(group.size for group in parts), x.shape[1]
            all_of_them = torch.ones(x.shape[0] * batch, 1, dtype=torch.bool, device=x.device)
            return all_of_them, torch.full((batch,), length, dtype=self.wide, device=x.device)
        return counted.flatten()[:, None], tokens.lengths.to(self.wide)

    def _jittered(self, x: Tensor, tokens: Tokens) -> Tensor:
        epsilon = self.config.moe_input_jitter_eps
        if not epsilon or tokens.dropout_keys is None:
            return x
        index = tokens.index_between_blocks[:, None] * x.shape[2] + torch.arange(x.shape[2], device=x.device)
        keys = random.fold(tokens.dropout_keys, self.number, "router jitter")
        factor = 1.0 + epsilon * (2.0 * random.uniform(keys[None, :, None], index[:, None]) - 1.0)
        return x * factor.to(x.dtype)

    def _route(self, logits: Tensor, counted: Tensor, parts: list[Group], *, training: bool) -> Routing:
        """`logits` wide [n, experts]. `parts`: over which the tokens of a micro-batch are cut."""
        config = self.config
        if "sinkhorn" in self.balancing:
            everyone = logits.detach().masked_fill(~counted, -torch.inf)
            for group in parts:
                everyone = start_all_gather(everyone, group).wait()
            assigned = sinkhorn(everyone, logits.detach()) if training else logits
            experts = assigned.topk(self.topk, dim=-1).indices
            scores = logits.sigmoid() if self.topk == 1 else logits.softmax(dim=-1)
            return Routing(experts, scores.gather(1, experts))
        if config.moe_router_score_function == "sigmoid":
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(dim=-1) if config.moe_router_pre_softmax else logits
        ranked = scores.detach() if self.expert_bias is None else scores.detach() + self.expert_bias
        groups, chosen = config.moe_router_num_groups, config.moe_router_group_topk
        if groups is not None and chosen is not None:
            assert config.moe_router_group_score_topk is not None  # resolved
            ranked = limited_to_groups(ranked, groups, chosen, config.moe_router_group_score_topk)
        experts = ranked.topk(self.topk, dim=-1).indices
        weights = scores.gather(1, experts)
        if config.moe_router_score_function == "sigmoid" and self.topk > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        elif config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax:
            weights = weights.softmax(dim=-1)
        return Routing(experts, weights * (config.moe_router_topk_scaling_factor or 1.0))

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Of all experts, with a sum of 1."""
        if self.config.moe_router_score_function == "softmax":
            return logits.softmax(dim=-1)
        scores = logits.sigmoid()
        return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)

    def _losses(
        self, logits: Tensor, probabilities: Tensor, counted: Tensor, lengths: Tensor, parts: list[Group]
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of the balancing losses and of the z-loss, means over the sequences of a micro-batch, wide
        []."""
        batch, lengths = len(lengths), lengths.clamp(min=1)
        balance = z = logits.new_zeros(())
        if self.config.moe_z_loss_coeff:  # Zoph et al. 2022
            squares = _of_sequences(logits.logsumexp(dim=-1, keepdim=True).square() * counted, batch)
            z = (squares[:, 0] / lengths).sum() * (self.config.moe_z_loss_coeff / batch)
        for kind, coefficient in self.balancing.items():
            if not coefficient:
                continue
            if kind == "global_aux_loss":
                assert self.load is not None
                part = (_of_sequences(probabilities, batch) @ self.load / lengths).mean()
            else:
                whole = lengths if kind == "seq_aux_loss" else lengths.sum().view(1)
                part = self._switch_loss(probabilities, counted, whole, parts)
            balance = balance + part * (coefficient * self.experts)
        return balance, z

    def _switch_loss(self, probabilities: Tensor, counted: Tensor, lengths: Tensor, parts: list[Group]) -> Tensor:
        """This rank's part of the mean over sequences of the sum over experts of its share of choices times its mean
        probability (Fedus et al. 2021). `lengths` [sequences]: of each."""
        best = probabilities.detach().topk(self.topk, dim=-1).indices  # without bias or groups, as in Megatron-LM
        chosen = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, best, True) & counted
        counts = _of_sequences(chosen.to(probabilities.dtype), len(lengths))
        for group in parts:
            all_reduce(counts, group)
        shares = counts / (self.topk * lengths.square())[:, None]
        return (_of_sequences(probabilities, len(lengths)) * shares).sum() / len(lengths)

    def _capacity(self, lengths: Tensor) -> Tensor:
        """Most tokens of an expert in a micro-batch, []."""
        assert self.config.moe_expert_capacity_factor is not None
        choices = lengths.to(torch.float64).sum() * self.topk
        return (choices / self.experts * self.config.moe_expert_capacity_factor).ceil()

    @staticmethod
    def _order(x: Tensor, tokens: Tokens) -> Tensor:
        """The place of each token in its micro-batch, int64 [n]: by its place in the sequence, then by sample."""
        batch = torch.arange(x.shape[1], device=x.device)
        return (tokens.index_between_blocks[:, None] * x.shape[1] + batch).flatten()


def _of_sequences(x: Tensor, sequences: int) -> Tensor:
    """Sums over the tokens of each sequence of `x` [n, experts], whose sequences alternate: [sequences, experts]."""
    return x.view(-1, sequences, x.shape[-1]).sum(dim=0)
