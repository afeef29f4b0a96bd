"""The block before the first step: what this run is, in numbers that can be checked."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch

from megalite.config.errors import FlagError
from megalite.config.resolve import context_exchange
from megalite.config.schema import RunConfig
from megalite.data.gpt_dataset import Datasets
from megalite.distributed.collectives import all_gather_objects
from megalite.distributed.launch import Environment
from megalite.distributed.layout import DENSE, DOMAINS, Domain, Layout
from megalite.distributed.mesh import Mesh
from megalite.estimate.activations import chunk_activations
from megalite.estimate.memory import MemoryEstimate, estimate_memory, free_machine_memory, machine_memory
from megalite.estimate.model import count_parameters
from megalite.models.gpt import GPTStage
from megalite.nn.attention_backend import AttentionBackend
from megalite.nn.embedding import padded_vocabulary
from megalite.nn.module import specs_of
from megalite.nn.moe.layer import MoELayer
from megalite.peft.apply import apply_peft, layers_of, owned_parameters
from megalite.pipeline.schedules import Action
from megalite.pipeline.timeline import peak_live
from megalite.precision.fp8 import Fp8
from megalite.precision.policy import Precision
from megalite.training.executor import LoweredSchedules
from megalite.training.model import TrainedModel, build_stages, fp8_weights
from megalite.training.task import TASKS


def say(mesh: Mesh, *lines: str) -> None:
    """Print on the first rank."""
    if mesh.is_first:
        for line in lines:
            print(line, flush=True)


def size(count: float, unit: str = "B") -> str:
    """A number with a decimal prefix: 1234567 → 1.23 MB."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(count) < 1000 or prefix == "T":
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    raise AssertionError


def _local_parameters(stages: Sequence[GPTStage], domain: Domain | None = None, *, frozen: bool = False) -> int:
    """What this rank holds of them, of one domain or of all; `frozen`: only what isn't trained."""
    return sum(
        parameter.numel()
        for _, parameter, spec in specs_of(stages)
        if domain in (None, spec.domain) and not spec.keeps_dtype and not (frozen and parameter.requires_grad)
    )


def _model_lines(model: TrainedModel) -> list[str]:
    config, mesh = model.config, model.mesh
    rows = padded_vocabulary(model.vocab_size, config.model.make_vocab_size_divisible_by, mesh.tp.size)
    counts = [
        each
        for domain in DOMAINS
        for each in all_gather_objects(owned_parameters(model.stages, mesh, [domain]), mesh.along(domain.model_axes))
    ]
    mine, total = (sum(each) for each in zip(*counts, strict=True))
    formula = count_parameters(config.model, model.vocab_size)
    active = total - formula.total + formula.active
    experts = "" if active == total else f", {active:,} active for a token"
    trained = "" if model.adapter is None else f", {mine:,} of them trained ({mine / total:.3%})"
    return [
        f"parameters: {total:,} in all{experts}{trained}, {_local_parameters(model.stages):,} on this rank",
        f"vocabulary: {model.vocab_size:,}, {rows:,} rows in memory",
        f"training FLOPs per token: {model.flops_per_token(config.data.seq_length):.4g}",
    ]


def predicted_memory(
    config: RunConfig, stages: Sequence[GPTStage], actions: list[Action], mesh: Mesh
) -> MemoryEstimate:
    """The formulas for a rank that does `actions` in a step of the largest global batch."""
    return functools.reduce(operator.add, memory_by_domain(config, stages, actions, mesh).values())


def memory_by_domain(
    config: RunConfig, stages: Sequence[GPTStage], actions: list[Action], mesh: Mesh
) -> dict[Domain, MemoryEstimate]:
    """The same, apart for the parameters that all data ranks share and for experts. Activations, and weights in FP8,
    are with the former."""
    chunks = [
        chunk_activations(
            config,
            stage.vocab_size,
            layers=len(stage.decoder.layers),
            with_experts=sum(isinstance(layer.mlp, MoELayer) for layer in layers_of(stage)),
            in_fp8=sum(any(fp8_weights([layer])) for layer in stage.decoder.layers.values()),
            has_output=stage.output_layer is not None,
            fused_attention=stage.core.backend.kernel != "unfused",
        )
        for stage in stages
    ]
    activations = peak_live(actions, [chunk.kept for chunk in chunks]) + max(chunk.working for chunk in chunks)
    fp8 = sum(weight.numel() for _, weight, _ in fp8_weights(stages))
    return {
        domain: estimate_memory(
            config,
            _local_parameters(stages, domain),
            activations=activations if domain is DENSE else 0,
            frozen=_local_parameters(stages, domain, frozen=True),
            ranks=mesh.along(domain.data_axes).size,
            fp8=fp8 if domain is DENSE else 0,
        )
        for domain in DOMAINS
    }


def memory_by_stage(
    config: RunConfig, vocab_size: int, backend: AttentionBackend, world_size: int, device: torch.device
) -> list[MemoryEstimate]:
    """`predicted_memory` of each pipeline rank, before there is a model: of shapes without memory."""
    layout = Layout.from_config(config.layout, world_size)
    precision = Precision.from_config(config.precision, Fp8.from_config(config.precision, device))
    # How many classes there are the data may have to tell; a head is small.
    classes = None if TASKS[config.finetune.task].of_tokens else len(config.finetune.class_names or [""])
    estimates, actions = [], LoweredSchedules(config, 0).training_of_all(config.microbatches_per_step(layout.dp))
    for rank in range(layout.pp):
        mesh = Mesh(layout, layout.rank_at(pp=rank), torch.device("meta"), {})
        stages = build_stages(config, mesh, precision, vocab_size, backend, classes)
        apply_peft(stages, config.peft, mesh=mesh, precision=precision, seed=0)
        estimates.append(predicted_memory(config, stages, actions[rank], mesh))
    return estimates


def check_memory(
    stages: Sequence[MemoryEstimate], config: RunConfig, environment: Environment, device: torch.device
) -> list[str]:
    """Lines that tell the prediction, and whether this machine may have too little for its ranks. A FlagError where
    its whole memory can't hold even what its ranks keep between steps on the CPU."""
    layout, first = Layout.from_config(config.layout, environment.world_size), environment.rank - environment.local_rank
    ranks = range(first, first + environment.local_world_size)
    here = [stages[layout.coordinates(rank)["pp"]] for rank in ranks]
    lines, places = _memory_lines(stages), f"the {len(here)} process{'es' if len(here) > 1 else ''} of this machine"
    if device.type == "cuda":
        offload = config.optimizer.optimizer_offload_fraction if config.optimizer.optimizer_cpu_offload else 0.0
        needed = max(each.total - offload * (each.main_parameters + each.moments) for each in here)
        there, places = torch.cuda.get_device_properties(device).total_memory, "a GPU"
    else:
        state, there = sum(each.state for each in here), machine_memory()
        if state > there:
            raise FlagError(
                f"parameters, gradients and optimizer states of {places} need {size(state)}, and its memory is "
                f"{size(there)}. Train a smaller model (--num-layers, --hidden-size, --ffn-hidden-size, "
                "--num-attention-heads, or another --preset), or prove this layout on a small model of the same kind: "
                "tools/verify_parallel.py --shrink with these flags"
            )
        needed, there = sum(each.total for each in here), free_machine_memory()
    if needed > there:
        lines.append(f"warning: {places} may need {size(needed)}, and {size(there)} are there: memory may run out")
    return lines


def _memory_lines(stages: Sequence[MemoryEstimate]) -> list[str]:
    """Of the pipeline rank that needs most; and of each, where they differ."""
    memory = max(stages, key=lambda stage: stage.total)
    most = f" (pipeline rank {stages.index(memory)}, which needs most)" if len(stages) > 1 else ""
    lines = [
        f"predicted memory per rank{most}: {size(memory.total)} = parameters {size(memory.parameters)} "
        f"+ main gradients {size(memory.main_gradients)} + main parameters {size(memory.main_parameters)} "
        f"+ moments {size(memory.moments)} + activations {size(memory.activations)}"
        + (f" + weights in FP8 {size(memory.fp8_weights)}" if memory.fp8_weights else "")
    ]
    if len({stage.total for stage in stages}) > 1:
        lines.append("by pipeline rank: " + ", ".join(size(stage.total) for stage in stages))
    return lines


def _layout_line(config: RunConfig, mesh: Mesh, threads: int) -> str:
    layout = mesh.layout
    sizes = f"TP {layout.tp} x PP {layout.pp} x DP {layout.dp} x CP {layout.cp} = {layout.world_size} processes"
    extra = ", sequence parallel" if layout.sequence_parallel else ""
    if layout.cp > 1:
        extra += f", {context_exchange(config.layout)} between context-parallel ranks"
    if config.model.num_experts is not None:
        by = f" by {config.model.moe_token_dispatcher_type}" if layout.ep * layout.etp > 1 else ""
        extra += f", experts EP {layout.ep} x ETP {layout.etp} x DP {layout.edp}{by}"
    if layout.pp > 1:
        extra += f", schedule {config.layout.pipeline_schedule}"
    if config.layout.data_parallel_sharding_strategy != "no_shard":
        extra += f", sharding {config.layout.data_parallel_sharding_strategy}"
    return f"layout: {sizes} on {mesh.device.type}, {threads} threads each{extra}"


def opening_block(model: TrainedModel, datasets: Datasets, *, threads: int, iteration: int, of: int) -> str:
    """The whole block as text. `iteration`: the last one that is done, `of` so many. Collective over the model's
    ranks."""
    config, backend = model.config, model.stages[0].core.backend
    training, short = config.training, TASKS[config.finetune.task].short_samples
    lines = [
        *_model_lines(model),
        _layout_line(config, model.mesh, threads),
        f"precision: {model.precision.name}; attention: {backend.kernel} ({backend.reason}); "
        f"norm: {config.model.normalization}; optimizer: {model.optimizer.description}",
        *(["between matrix products: torch.compile"] if training.compile else []),
        *([model.precision.fp8.description] if model.precision.fp8 else []),
        f"batch: {training.global_batch_size} sequences of {'up to ' if short else ''}{config.data.seq_length} tokens "
        f"a step, micro batch {training.micro_batch_size}; {of:,} steps, starting after {iteration:,}",
        *(f"data: {summary.line()}" for summary in datasets.summaries),
    ]
    return "\n".join(["=" * 80, *(f" {line}" for line in lines), "=" * 80])
