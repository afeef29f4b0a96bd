"""Adapters on a built model: which modules are added where, and what stays frozen.

Key idea: what is added are ordinary parameters with specs, children of the layers that call them. So the optimizer,
checkpoints, norms and dumps treat them as any others; and whatever needs no gradient has no place in any of those.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.check_peft import lora_parts, target_names
from megalite.config.errors import UserError
from megalite.config.schema import ModelConfig
from megalite.config.schema_finetune import PeftConfig
from megalite.distributed.layout import DOMAINS, Domain
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import whole
from megalite.models.gpt import GPTStage
from megalite.nn.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalite.nn.module import Build, initialize_pieces, named_specs
from megalite.nn.moe.experts import ExpertLinear
from megalite.nn.tokens import VirtualTokens
from megalite.nn.transformer import TransformerLayer
from megalite.peft.lora import ColumnLora, ExpertLora, LowRank, RowLora, Slots
from megalite.peft.modules import linears_of, slots_of
from megalite.peft.virtual import Prefix, Prompt, backend_problem
from megalite.precision.policy import Precision


@dataclass(frozen=True)
class Scale:
    """Of one target: the rank of its matrices, and what their product is multiplied by."""

    rank: int
    factor: float


def scales_of(peft: PeftConfig, model: ModelConfig) -> dict[str, Scale]:
    """The targets that the flags of LoRA mean, in the order of the network."""
    rank, alpha = peft.lora_rank, peft.lora_alpha
    scale = Scale(rank, alpha / math.sqrt(rank) if peft.use_rslora else alpha / rank)
    return dict.fromkeys(lora_parts(model, target_names(peft, model)), scale)


def apply_peft(
    stages: Sequence[GPTStage],
    peft: PeftConfig,
    *,
    mesh: Mesh,
    precision: Precision,
    seed: int,
    scales: Mapping[str, Scale] | None = None,
) -> None:
    """Freeze a rank's chunks of a model and add what `peft` asks for, initialised; nothing where that is none.

    Call it on chunks whose parameters have values, before the optimizer is built. `scales`: LoRA's targets where the
    flags don't say them. Raises a UserError where the attention kernel can't do it.
    """
    if peft.peft == "none":
        return
    for stage in stages:
        if (problem := backend_problem(stage.core.backend, peft.peft, mesh.device.type)) is not None:
            raise UserError(problem)
    for stage in stages:
        build = Build(stage.config, mesh, precision, weight_gradients=stage.weight_gradients)
        stage.requires_grad_(False)
        known = set(stage.parameters())
        if peft.peft == "lora":
            _add_lora(stage, build, scales_of(peft, stage.config) if scales is None else scales, peft.lora_dropout)
        else:
            _add_virtual(stage, build, peft)
        initialize_pieces((whole(*entry) for entry in named_specs(stage) if entry[1] not in known), seed)
        if stage.classifier is not None:  # new as well
            stage.classifier.requires_grad_()


def layers_of(stage: GPTStage) -> Iterator[TransformerLayer]:
    """The layers of a chunk."""
    for layer in stage.decoder.layers.values():
        assert isinstance(layer, TransformerLayer)
        yield layer


def _add_lora(stage: GPTStage, build: Build, scales: Mapping[str, Scale], drop: float) -> None:
    for layer in layers_of(stage):
        by_linear: dict[str, list[LowRank]] = {}
        there = linears_of(stage.config, layer.number)
        for part, scale in scales.items():
            if part in there:
                settings = LowRank(part, scale.rank, scale.factor, drop, layer.number)
                by_linear.setdefault(there[part], []).append(settings)
        for name, adapters in by_linear.items():
            base = layer.get_submodule(name)
            if isinstance(base, ExpertLinear):
                base.lora = ExpertLora(build, base, adapters[0])
            elif isinstance(base, RowParallelLinear):
                base.lora = RowLora(build, base, adapters[0])
            else:
                assert isinstance(base, (ColumnParallelLinear, ReplicatedLinear))
                local = base.param_specs["weight"].local_shape
                base.lora = ColumnLora(build, base, [(one, _slots(one.part, stage.config, local)) for one in adapters])


def _slots(part: str, model: ModelConfig, local_shape: tuple[int, ...]) -> Slots | None:
    """Where a target is in the logical and in the local weight; there may be fewer queries here."""
    found = slots_of(part, model)
    if found is None:
        return None
    dim, (low, high) = found
    if dim == 0:
        return Slots(dim, (low, high), (low, high))
    assert model.num_attention_heads is not None
    fewer = model.num_attention_heads // model.num_query_groups + 2 - local_shape[1]
    return Slots(dim, (low, high), (max(0, low - fewer) if low else 0, high - fewer))


def _add_virtual(stage: GPTStage, build: Build, peft: PeftConfig) -> None:
    count = peft.num_virtual_tokens
    stage.virtual = VirtualTokens(count, in_sequence=peft.peft == "prompt")
    if peft.peft == "prompt":
        if stage.span.has_embedding:
            assert stage.embedding is not None
            stage.embedding.prompt = Prompt(build, count)
        return
    hidden = (peft.prefix_hidden_size or stage.config.hidden_size) if peft.prefix_projection else None
    for layer in layers_of(stage):
        layer.self_attention.prefix = Prefix(build, count, hidden=hidden)


@torch.no_grad()
def prompt_from_text(stage: GPTStage, tokens: Sequence[int]) -> Tensor:
    """What a prompt [n, hidden] starts from: the embeddings of `tokens`, repeated or cut to its length.

    `stage` holds the prompt. Collective over the tensor-parallel ranks. A UserError where there are no tokens.
    """
    embedding = stage.embedding
    assert embedding is not None and isinstance(embedding.prompt, Prompt)
    if not tokens:
        raise UserError("--prompt-init-text has no tokens: give it some text")
    count = embedding.prompt.count
    repeated = list(tokens) * -(-count // len(tokens))
    ids = torch.tensor(repeated[:count], device=embedding.prompt.weight.device)
    vectors: Tensor = embedding.word_embeddings(ids[:, None], whole=True)[:, 0]
    return vectors


def owned_parameters(stages: Sequence[GPTStage], mesh: Mesh, domains: Collection[Domain] = DOMAINS) -> tuple[int, int]:
    """Logical parameters of this rank's chunks that are trained, and all, without copies that others of the replica
    own. `domains`: those of these alone. Summed over the ranks along a domain's `model_axes` they are the model's."""
    trained = total = 0
    for stage in stages:
        for _, parameter, spec in named_specs(stage):
            if spec.domain in domains and not spec.keeps_dtype:  # what does is state, by a rule
                owned = sum(math.prod(box.shape) for box in spec.boxes if box.owner == mesh.rank)
                total += owned
                trained += owned if parameter.requires_grad else 0
    return trained, total
