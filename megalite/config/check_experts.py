"""Combinations of flags that can't work: mixtures of experts and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import all_fields, needs
from megalite.config.resolve import balancing, data_parallel_size, expert_layers, ffn_width
from megalite.config.schema import RunConfig

_LAYOUT = ("layout.expert_model_parallel_size", "layout.expert_tensor_parallel_size")
_COUNTED = "group_score_topk"
_OF_SCORES = "topk_scaling_factor", "num_groups", "group_topk", "score_function", "pre_softmax", "enable_expert_bias"
_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def expert_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Problems of mixtures of experts. `config`: given or resolved."""
    model, wanted = config.model, config.model.num_experts is not None
    others = [path for path in all_fields() if path.startswith("model.moe_")]
    yield from needs(config, wanted, "--num-experts", *others, *_LAYOUT)
    if not wanted:
        return
    flag = f"--num-experts {model.num_experts}"
    if model.add_bias_linear:
        yield f"{flag} needs --disable-bias-linear: experts have no biases"
    if config.precision.fp8_format is not None:
        yield f"--fp8-format {config.precision.fp8_format} can't be used with {flag}: use --bf16"
    if config.layout.tensor_model_parallel_size > 1 and not config.layout.sequence_parallel:
        yield f"{flag} with --tensor-model-parallel-size above 1 needs --sequence-parallel"
    if config.peft.peft == "prompt" and config.layout.context_parallel_size > 1:
        yield (
            f"--peft prompt can't be used with {flag} and --context-parallel-size above 1, whose ranks would each "
            "count the virtual tokens: use lora, or --context-parallel-size 1"
        )
    if model.num_layers is not None:
        try:
            if not any(expert_layers(model)):
                yield f"--moe-layer-freq {model.moe_layer_freq} leaves no layer for the experts of {flag}"
        except ValueError as error:
            yield f"--moe-layer-freq: {error}"
    yield from _upcycling_problems(config)
    yield from _router_problems(config)
    yield from _balancing_problems(config)
    yield from _grid_problems(config, world_size)


def idle_of_experts(config: RunConfig) -> Iterator[tuple[str, list[str]]]:
    """Why settings of experts can't matter beside the others, and which."""
    model, layout = config.model, config.layout
    if model.moe_expert_capacity_factor is None:
        yield "without --moe-expert-capacity-factor", ["model.moe_token_drop_policy"]
    if not model.moe_router_enable_expert_bias:
        yield "without --moe-router-enable-expert-bias", ["model.moe_router_bias_update_rate"]
    if model.moe_router_score_function == "sigmoid":
        yield "with --moe-router-score-function sigmoid", ["model.moe_router_pre_softmax"]
    if (
        layout.expert_model_parallel_size * (layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size)
        == 1
    ):
        yield "where every rank holds all experts", ["model.moe_token_dispatcher_type"]
    without = [kind for kind, weight in balancing(model).items() if kind in _LOSSES and not weight]
    if without and not any(balancing(model).values()):
        yield "without --moe-aux-loss-coeff above 0", ["model.moe_router_load_balancing_type"]
    elif without:
        yield f"on {', '.join(without)}, whose weight is 0", ["model.moe_aux_loss_coeff"]


def _upcycling_problems(config: RunConfig) -> Iterator[str]:
    model, checkpoint = config.model, config.checkpoint
    if not model.moe_use_upcycling:
        return
    flag, inner = "--moe-use-upcycling", ffn_width(model)
    if not (config.finetune.load_hf or checkpoint.load or checkpoint.pretrained_checkpoint):
        yield f"{flag} needs a dense model to start from: give --pretrained-checkpoint, --load-hf or --load"
    if model.moe_ffn_hidden_size not in (None, inner):
        yield (
            f"--moe-ffn-hidden-size {model.moe_ffn_hidden_size} must be --ffn-hidden-size {inner} with {flag}: each "
            "expert starts as a copy of the dense MLP"
        )
    if model.moe_shared_expert_intermediate_size is not None:
        yield f"--moe-shared-expert-intermediate-size can't be used with {flag}: a dense model has nothing to fill it"
    if config.peft.peft != "none":
        yield f"--peft {config.peft.peft} can't be used with {flag}, whose routers start random and must be trained"


def _router_problems(config: RunConfig) -> Iterator[str]:
    model = config.model
    experts, topk, sigmoid = model.num_experts or 0, model.moe_router_topk, model.moe_router_score_function == "sigmoid"
    if topk > experts:
        yield f"--moe-router-topk {topk} is above --num-experts {experts}"
    if topk == 1 and not sigmoid and not model.moe_router_pre_softmax and "sinkhorn" not in balancing(model):
        yield (
            "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over the chosen expert alone is always 1, "
            "so the router would learn nothing"
        )
    if model.moe_router_enable_expert_bias and not sigmoid:
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid"
    yield from _group_problems(config, experts)
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None:
        yield "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size"


def _group_problems(config: RunConfig, experts: int) -> Iterator[str]:
    model, topk = config.model, config.model.moe_router_topk
    groups, chosen, counted = (getattr(model, f"moe_router_{name}") for name in ("num_groups", "group_topk", _COUNTED))
    yield from needs(config, chosen is not None, "--moe-router-group-topk", f"model.moe_router_{_COUNTED}")
    if (groups is None) != (chosen is None):
        yield "--moe-router-num-groups and --moe-router-group-topk need each other: give both or neither"
    if groups is None or chosen is None:
        return
    each = experts // groups
    if experts % groups:
        yield f"--moe-router-num-groups {groups} does not divide --num-experts {experts}"
    elif chosen > groups or topk > chosen * each or (counted is None and topk % chosen):
        yield (
            f"--moe-router-group-topk {chosen} must be at most --moe-router-num-groups {groups}, divide "
            f"--moe-router-topk {topk} (unless --moe-router-group-score-topk is given), and leave each group at most "
            f"its {each} experts"
        )
    elif counted is not None and counted > each:
        yield f"--moe-router-group-score-topk {counted} is above the {each} experts of a group"


def _balancing_problems(config: RunConfig) -> Iterator[str]:
    model = config.model
    kinds, weights = model.moe_router_load_balancing_type or ["aux_loss"], model.moe_aux_loss_coeff
    shown = f"--moe-router-load-balancing-type {' '.join(kinds)}"
    if len(set(kinds)) < len(kinds) or (len(kinds) > 1 and not set(kinds) <= set(_LOSSES)):
        yield f"{shown}: several must be different losses of {', '.join(_LOSSES)}"
    if "sinkhorn" in kinds:
        paths = (f"model.moe_router_{name}" for name in _OF_SCORES)
        yield from needs(config, False, f"another balancing than {shown}, which doesn't use it", *paths)
    if weights is None:
        return
    given = f"--moe-aux-loss-coeff {' '.join(map(str, weights))}"
    if len(weights) != len(kinds):
        yield f"{given} must be as many numbers as {shown} has losses: {len(kinds)}"
    elif any(weights) and not set(kinds) <= set(_LOSSES):
        yield f"{given} can't be used with {shown}, which has no loss"


def _grid_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    layout, model = config.layout, config.model
    ep, tp = layout.expert_model_parallel_size, layout.tensor_model_parallel_size
    etp = layout.expert_tensor_parallel_size or tp
    tensor = f"--expert-tensor-parallel-size {etp}" + ("" if layout.expert_tensor_parallel_size else " (its default)")
    if (model.num_experts or 0) % ep:
        yield f"--expert-model-parallel-size {ep} does not divide --num-experts {model.num_experts}"
    width = model.moe_ffn_hidden_size or ffn_width(model)
    if width is not None and width % etp:
        yield f"{tensor} does not divide --moe-ffn-hidden-size {width}"
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None and shared % tp:
        yield f"--tensor-model-parallel-size {tp} does not divide --moe-shared-expert-intermediate-size {shared}"
    ranks = data_parallel_size(layout, world_size) * layout.context_parallel_size * tp
    if ranks % (ep * etp):
        yield (
            f"--expert-model-parallel-size {ep} x {tensor} = {ep * etp} does not divide the {ranks} ranks "
            "(TP x CP x DP) of a pipeline stage"
        )
