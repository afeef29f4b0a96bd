"""The configuration of mixtures of experts (Shazeer et al. 2017)."""

# ruff: noqa: RUF009 (flag() makes a dataclass field, so a list in it is not shared)

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema_field import ABOVE_ZERO, BELOW_ONE, NOT_NEGATIVE, UP_TO_65536, flag


@dataclass
class ExpertFields:
    """Experts in place of the MLP: how many, how tokens are routed to them, how their load is balanced."""

    num_experts: int | None = flag(None, "experts of a layer; default: none, a dense MLP", bound=UP_TO_65536)
    moe_layer_freq: str = flag(
        "1",
        "which layers have experts: N for every Nth from the first, or a list of 0 and 1 such as [0]*3+[1]*58",
    )
    moe_ffn_hidden_size: int | None = flag(None, "width inside an expert; default --ffn-hidden-size")
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "total width of the experts that every token passes; default: none"
    )
    moe_shared_expert_gate: bool = flag(False, "scale the shared experts' output by a learned gate")
    moe_router_topk: int = flag(2, "experts that a token is sent to")
    moe_router_score_function: str = flag(
        "softmax", "what makes scores of the router's logits", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = flag(False, "softmax over all experts, before the choice")
    moe_router_topk_scaling_factor: float | None = flag(
        None, "multiplies the weights of the chosen experts", bound=ABOVE_ZERO
    )
    moe_router_num_groups: int | None = flag(None, "groups of experts that a token chooses between first")
    moe_router_group_topk: int | None = flag(None, "groups that a token's experts may lie in")
    moe_router_group_score_topk: int | None = flag(
        None, "best experts whose scores together are a group's; default --moe-router-topk / --moe-router-group-topk"
    )
    moe_router_dtype: str | None = flag(
        None, "number format of the router's product and scores", choices=("fp32", "fp64")
    )
    moe_router_load_balancing_type: list[str] | None = flag(
        None,
        "how tokens are spread over the experts; several losses may be given; default aux_loss",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    )
    moe_aux_loss_coeff: list[float] | None = flag(None, "weight of each of these losses; default 0", bound=NOT_NEGATIVE)
    moe_z_loss_coeff: float | None = flag(None, "weight of the loss on large router logits")
    moe_router_enable_expert_bias: bool = flag(
        False, "balance by a bias on the choice that follows the load, without a loss"
    )
    moe_router_bias_update_rate: float = flag(1e-3, "how far that bias moves in a step")
    moe_input_jitter_eps: float | None = flag(
        None, "the router's input is multiplied by random numbers this near to 1", bound=BELOW_ONE
    )
    moe_expert_capacity_factor: float | None = flag(
        None, "most tokens of an expert, as a multiple of the mean; default: no token is dropped", bound=ABOVE_ZERO
    )
    moe_token_drop_policy: str = flag(
        "probs", "which tokens stay: of the highest weights, or the first", choices=("probs", "position")
    )
    moe_token_dispatcher_type: str = flag(
        "allgather", "how tokens reach their experts' ranks", choices=("allgather", "alltoall")
    )
    moe_per_layer_logging: bool = flag(False, "log the balance of each layer")
    moe_use_upcycling: bool = flag(False, "start the experts from a dense checkpoint's MLP")


ONLY_TRAINING = frozenset(
    f"moe_{name}"
    for name in (
        *("router_load_balancing_type", "aux_loss_coeff", "z_loss_coeff", "router_bias_update_rate"),
        *("input_jitter_eps", "router_dtype", "token_dispatcher_type", "per_layer_logging", "use_upcycling"),
        *("expert_capacity_factor", "token_drop_policy"),  # generation drops no token
    )
)
"""Fields that don't decide what a trained network computes; but sinkhorn, a way of choosing, does."""
