"""The same adapters in megalite and in PEFT, on tiny models of `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.config.schema import LayoutConfig, PrecisionConfig, RunConfig
from megalite.config.schema_finetune import PeftConfig
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.param_spec import Init
from megalite.distributed.pieces import Piece, whole
from megalite.models.gpt import GPTStage, plain_tokens
from megalite.models.stages import stage_spans
from megalite.models.whole import outputs
from megalite.nn.attention_backend import choose_backend
from megalite.nn.module import Build, initialize_pieces, specs_of
from megalite.peft.adapter import load_adapter, plan_adapter
from megalite.peft.files import peft_config
from megalite.precision.policy import Precision
from megalite.training.base_model import base_names, load_base_model
from tests.models.hf_models import VOCABULARY

FP32 = Precision.from_config(PrecisionConfig())


def stages_of(folder: str, mesh: Mesh, classes: Sequence[str] | None = None) -> list[GPTStage]:
    """A rank's part of the model in a Hugging Face folder; with `classes` of a classifier, whose head may be new."""
    found = read_huggingface_config(folder)
    layout = LayoutConfig(tensor_model_parallel_size=mesh.tp.size, pipeline_model_parallel_size=mesh.pp.size)
    config = RunConfig(model=found.model, layout=layout)
    build = Build(found.model, mesh, FP32)
    spans = stage_spans(config)[mesh.pp.rank]
    count, backend = None if classes is None else len(classes), choose_backend(config, "cpu")
    stages = [GPTStage(build, found.vocab_size, span, backend, count).eval() for span in spans]
    pieces = [whole(f"model.{name}", parameter, spec) for name, parameter, spec in specs_of(stages)]
    names = base_names(folder, (name for name, *_ in specs_of(stages)))
    load_base_model(folder, mesh=mesh, pieces=pieces, names=names, classes=classes)
    return stages


def trained_pieces(stages: list[GPTStage]) -> list[Piece]:
    """Of the parameters that have gradients."""
    return [whole(*entry) for entry in specs_of(stages) if entry[1].requires_grad]


def make_and_save(
    mesh: Mesh, folder: str, values: dict[str, Any], target: str, classes: Sequence[str] | None = None
) -> None:
    """Put an adapter of large random weights on this rank's part of a model, and save it."""
    stages = stages_of(folder, mesh, classes)
    peft = peft_config(values["load_adapter"]) if "load_adapter" in values else PeftConfig(**values)
    count = None if classes is None else len(classes)
    plan = plan_adapter(peft, stages[0].config, VOCABULARY, mesh.world, count)
    plan.apply(stages, mesh=mesh, precision=FP32, seed=7)
    pieces = trained_pieces(stages)
    plan.fill(stages, pieces)
    if peft.load_adapter is None:
        loud = (piece._replace(spec=replace(piece.spec, init=Init(std=0.3))) for piece in pieces)
        initialize_pieces(loud, 11)
    plan.stage(target, pieces, mesh, class_names=classes)(mesh.world)


@torch.no_grad()
def our_logits(folder: Path, adapter: Path | None, tokens: Tensor) -> Tensor:
    """[b, s, vocabulary] of the real tokens, in one process."""
    mesh = single_process_mesh()
    (model,) = stages_of(str(folder), mesh)
    if adapter is not None:
        load_adapter(model, str(adapter), mesh=mesh, precision=FP32)
    hidden = model(tokens, plain_tokens(tokens))
    return model.logits(hidden[model.sequence_length(0) :]).transpose(0, 1)


@torch.no_grad()
def our_scores(folder: Path, adapter: Path | None, tokens: Tensor, classes: Sequence[str]) -> Tensor:
    """A classifier's [b, classes] at the last tokens, in one process."""
    mesh = single_process_mesh()
    (model,) = stages_of(str(folder), mesh, classes)
    if adapter is not None:
        plan = plan_adapter(peft_config(adapter), model.config, VOCABULARY, mesh.world, len(classes))
        plan.apply([model], mesh=mesh, precision=FP32, seed=0)
        plan.fill([model], trained_pieces([model]))
    return outputs(model, tokens)[:, -1]


@torch.no_grad()
def peft_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """The same of a model of PEFT's."""
    logits: Tensor = model(tokens).logits
    return logits[:, -tokens.shape[1] :]


def loud(model: nn.Module, std: float = 0.3) -> None:
    """Large random values for an adapter of PEFT's."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
