"""Which linear layers of a Hugging Face model correspond to which parts of ours.

Key idea: the architecture's table of weights already says which stored tensor is which rectangle of a fused weight. So
a layer's name, and the order of its outputs, follow from that table, and an adapter beside any part of a fused weight
can be stored as adapters beside the layers that it covers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megalite.checkpoint.huggingface.architecture import Architecture
from megalite.checkpoint.huggingface.parts import Part
from megalite.config.resolve import expert_layers, head_widths
from megalite.config.schema import ModelConfig
from megalite.distributed.param_spec import Shape

Range = tuple[int, int]

QKV, PROJECTION = "self_attention.linear_qkv", "self_attention.linear_proj"
FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
EXPERTS_FC1, EXPERTS_FC2 = "mlp.experts.linear_fc1", "mlp.experts.linear_fc2"
EXPERT_LINEAR_OF = {
    "experts_up_proj": EXPERTS_FC1,
    "experts_gate_up_proj": EXPERTS_FC1,
    "experts_down_proj": EXPERTS_FC2,
}
"""Of routed experts, whose matrices are one parameter for all of a layer."""
SHARED_FC1, SHARED_FC2 = "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"
_OF_SHARED_EXPERTS = {FC1: SHARED_FC1, FC2: SHARED_FC2}

_LINEAR_OF = {
    "c_attn": QKV,
    "q_proj": QKV,
    "k_proj": QKV,
    "v_proj": QKV,
    "o_proj": PROJECTION,
    "gate_proj": FC1,
    "up_proj": FC1,
    "gate_up_proj": FC1,
    "down_proj": FC2,
}
MLP_PARTS = {part for part, linear in _LINEAR_OF.items() if linear in (FC1, FC2)}
_LATENT_LINEAR_OF = {
    "q_proj": "self_attention.linear_q_proj",
    "q_a_proj": "self_attention.linear_q_down_proj",
    "q_b_proj": "self_attention.linear_q_up_proj",
    "kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "kv_b_proj": "self_attention.linear_kv_up_proj",
}


def linears_of(model: ModelConfig, number: int) -> dict[str, str]:
    """What a target is a part of, or all of, in layer `number`, by the targets that there may be in it. In a layer with
    experts those of the MLP are in its shared experts."""
    linears = _LINEAR_OF
    if model.multi_latent_attention:
        linears = _LATENT_LINEAR_OF | {part: linear for part, linear in _LINEAR_OF.items() if linear != QKV}
    if not expert_layers(model)[number]:
        return linears
    has_shared = model.moe_shared_expert_intermediate_size is not None
    return {
        part: _OF_SHARED_EXPERTS.get(linear, linear)
        for part, linear in linears.items()
        if has_shared or linear not in _OF_SHARED_EXPERTS
    } | EXPERT_LINEAR_OF


def layers_with(linear: str, model: ModelConfig) -> list[int]:
    """The numbers of the layers that have a linear layer of this name."""
    return [number for number in range(model.num_layers) if linear in linears_of(model, number).values()]


def linear_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Logical shapes of the weights of a layer's linear layers, those that any layer has; of routed experts one's."""
    assert model.hidden_size is not None and model.num_attention_heads is not None
    assert model.kv_channels is not None and model.ffn_hidden_size is not None
    hidden, heads, width = model.hidden_size, model.num_attention_heads, model.kv_channels
    groups = model.num_query_groups
    fused: dict[str, Shape] = {QKV: (groups, heads // groups + 2, width, hidden)}
    shapes: dict[str, Shape] = {
        **(_latent_shapes(model) if model.multi_latent_attention else fused),
        PROJECTION: (hidden, heads * head_widths(model)[1]),
    }
    for first, second, inner in (
        (FC1, FC2, model.ffn_hidden_size),
        (SHARED_FC1, SHARED_FC2, model.moe_shared_expert_intermediate_size or 0),
        (EXPERTS_FC1, EXPERTS_FC2, model.moe_ffn_hidden_size or 0),
    ):
        if layers_with(first, model):
            shapes[first] = (2, inner, hidden) if model.swiglu else (inner, hidden)
            shapes[second] = (hidden, inner)
    return shapes


def _latent_shapes(model: ModelConfig) -> dict[str, Shape]:
    hidden, heads, latent, queries = model.hidden_size, model.num_attention_heads, model.kv_lora_rank, model.q_lora_rank
    shapes = {
        "kv_a_proj_with_mqa": (latent + model.qk_pos_emb_head_dim, hidden),
        "kv_b_proj": (heads, model.qk_head_dim + model.v_head_dim, latent),
    }
    if queries is None:
        shapes = {"q_proj": (heads, head_widths(model)[0], hidden), **shapes}
    else:
        shapes = {"q_a_proj": (queries, hidden), "q_b_proj": (heads, head_widths(model)[0], queries), **shapes}
    return {_LATENT_LINEAR_OF[part]: shape for part, shape in shapes.items()}


def slots_of(part: str, model: ModelConfig) -> tuple[int, Range] | None:
    """The dimension of a fused weight and the range of it that a target is; None: the whole weight."""
    assert model.num_attention_heads is not None
    queries = model.num_attention_heads // model.num_query_groups
    ranges = {"q_proj": (0, queries), "k_proj": (queries, queries + 1), "v_proj": (queries + 1, queries + 2)}
    if part in ranges and not model.multi_latent_attention:
        return 1, ranges[part]
    if model.swiglu and part in ("gate_proj", "up_proj"):
        return 0, (0, 1) if part == "gate_proj" else (1, 2)
    return None


def output_slices(part: str, linear: str, model: ModelConfig) -> tuple[slice, ...]:
    """The outputs [...] of its linear layer that a target is."""
    shape = linear_shapes(model)[linear][:-1]
    slots = slots_of(part, model)
    return tuple(
        slice(*slots[1]) if slots is not None and dim == slots[0] else slice(0, size) for dim, size in enumerate(shape)
    )


def widths_of(part: str, linear: str, model: ModelConfig) -> tuple[int, int]:
    """Inputs and outputs of a target."""
    outputs = (each.stop - each.start for each in output_slices(part, linear, model))
    return linear_shapes(model)[linear][-1], prod(outputs)


@dataclass(frozen=True)
class HFLinear:
    """A linear layer of the Hugging Face model: `name` without the layer's number (`{n}`); `linear`: the layer of ours
    that holds it; `rows`: where its outputs are in ours; `transposed`: its weight is stored as [in, out]."""

    name: str
    linear: str
    rows: Part
    transposed: bool

    @property
    def suffix(self) -> str:
        """Its name within a layer, such as `self_attn.q_proj`."""
        return self.name.partition("{n}.")[2]

    def matrix(self, rank: int) -> Part:
        """Where a stored B [out, rank] lies in one of ours [..., rank]."""
        rows = self.rows
        return Part(rows.name, (*rows.factors, (rank,)), (*rows.order, len(rows.order)), (*rows.start, 0))


def hf_linears(architecture: Architecture, model: ModelConfig) -> list[HFLinear]:
    """The linear layers of one layer of the model, in order."""
    return [
        HFLinear(part.name.removesuffix(".weight"), linear, rows, transposed)
        for linear, shape in linear_shapes(model).items()
        if linear not in EXPERT_LINEAR_OF.values()
        for part, rows, transposed in _rows(architecture, f"decoder.layers.{{n}}.{linear}.weight", shape)
    ]


def _rows(architecture: Architecture, template: str, shape: Shape) -> Iterator[tuple[Part, Part, bool]]:
    rule = architecture.names[template]
    parts = rule(shape)
    if len(shape) == 2:
        out = shape[0]
        yield parts[0], Part(parts[0].name, ((out,),), (0,), (0,)), parts[0].order == (1, 0)
        return
    # The rule of a weight, applied to its shape without the inputs, says where the outputs lie.
    for part, rows in zip(parts, rule(shape[:-1]), strict=True):
        yield part, rows, len(part.factors) > 1 and part.order[-1] == 0


def part_of(layer: HFLinear, model: ModelConfig) -> str:
    """The target of ours that is exactly this layer; of those that mean the same outputs, the one of this network."""
    for part, linear in linears_of(model, layers_with(layer.linear, model)[0]).items():
        fits = linear == layer.linear and output_slices(part, linear, model) == layer.rows.slices
        if fits and (_LINEAR_OF.get(part) != FC1 or model.swiglu or part == "up_proj"):
            return part
    raise AssertionError(f"no target is {layer.name}")


def overlap(part: str, layer: HFLinear, model: ModelConfig) -> bool:
    """Whether a target shares outputs with a layer of Hugging Face's."""
    here = linears_of(model, layers_with(layer.linear, model)[0])
    return here.get(part) == layer.linear and layer.rows.overlap(output_slices(part, layer.linear, model)) is not None
