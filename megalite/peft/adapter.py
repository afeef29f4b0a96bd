"""Adapters saved from and loaded into any layout.

Key idea: a rank's pieces name rectangles of logical tensors; saving puts the owners' together on the first rank,
loading takes each rank's out of the whole. An adapter is small enough to be whole in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError, agree, attempt, on_first_rank
from megalite.config.fields import adapter_folders
from megalite.config.schema import ModelConfig, RunConfig
from megalite.config.schema_finetune import PeftConfig
from megalite.distributed.collectives import gather_tensors
from megalite.distributed.mesh import Group, Mesh
from megalite.distributed.pieces import Piece, counts, whole
from megalite.estimate.model import AdapterWork
from megalite.models.gpt import GPTStage
from megalite.nn.attention_backend import AttentionBackend
from megalite.nn.module import named_specs
from megalite.peft.apply import Scale, apply_peft, prompt_from_text, scales_of
from megalite.peft.convert import PROMPT, architecture_of, from_peft, to_peft
from megalite.peft.files import read_adapter, with_adapter_settings, write_adapter
from megalite.peft.modules import widths_of
from megalite.peft.virtual import backend_problem
from megalite.precision.policy import Precision


@dataclass(frozen=True)
class AdapterPlan:
    """What to build and what to fill it with. `peft`: complete. `scales`: LoRA's targets. `values`: whole parameters by
    global name from the folder of `--load-adapter`; empty where none was given."""

    peft: PeftConfig
    scales: dict[str, Scale]
    values: dict[str, Tensor]

    def work(self, model: ModelConfig, *, head: bool) -> AdapterWork:
        """What it adds to the work for a token. `head`: a classifier's is trained too."""
        assert model.num_layers is not None
        if self.peft.peft == "lora":
            sizes = (scale.rank * sum(widths_of(part, model)) for part, scale in self.scales.items())
            return AdapterWork(model.num_layers * sum(sizes), head)
        return AdapterWork(0, head, self.peft.num_virtual_tokens, computed=self.peft.peft == "prompt")

    def apply(self, stages: Sequence[GPTStage], *, mesh: Mesh, precision: Precision, seed: int) -> None:
        """See `apply_peft`."""
        apply_peft(stages, self.peft, mesh=mesh, precision=precision, seed=seed, scales=self.scales)

    @torch.no_grad()
    def fill(
        self, stages: Sequence[GPTStage], pieces: Iterable[Piece], *, prompt_tokens: Sequence[int] | None = None
    ) -> None:
        """Put what the folder holds into the trained parameters' pieces, or else into a prompt the embeddings of
        `prompt_tokens`. Call it when the model's weights are loaded. Collective over the tensor-parallel ranks."""
        values = dict(self.values)
        if prompt_tokens is not None and not values:
            for stage in stages:
                if stage.embedding is not None and stage.embedding.prompt is not None:
                    values[PROMPT] = prompt_from_text(stage, prompt_tokens)
        for piece in pieces:
            for _, start, view in piece.held() if piece.name in values else ():
                view.copy_(values[piece.name][tuple(slice(a, a + n) for a, n in zip(start, view.shape, strict=True))])


def adapter_problems(config: RunConfig, vocab_size: int, backend: AttentionBackend, device_type: str) -> list[str]:
    """Problems, before any process group exists, of a resolved configuration whose section `peft` is complete: virtual
    tokens need a mask, a saved adapter a Hugging Face architecture that has this network, `--load-adapter` a
    folder that fits it."""
    peft = config.peft
    problems = list(filter(None, [backend_problem(backend, peft.peft, device_type)]))
    for flag, folder in adapter_folders(config).items():
        if peft.peft == "lora" and (error := attempt(lambda: architecture_of(config.model, vocab_size))):
            problems.append(f"{flag} {folder}: {error}")
        if (Path(folder) / "config.json").exists():
            problems.append(
                f"{flag} {folder} is a model's folder, and transformers would then always load the model with the "
                "adapter: give another folder"
            )
    if (directory := peft.load_adapter) is not None:
        classes = len(config.finetune.class_names or ()) if config.finetune.task == "classification" else None
        if error := attempt(lambda: from_peft(read_adapter(directory), config.model, vocab_size, classes)):
            problems.append(f"--load-adapter: {error}")
    return problems


def plan_adapter(
    peft: PeftConfig, model: ModelConfig, vocab_size: int, group: Group, classes: int | None = None
) -> AdapterPlan:
    """`peft`: complete. `classes`: of a model that classifies.

    All members of `group` raise the same `CheckpointError` where the folder of `--load-adapter` is missing, damaged or
    of another model.
    """
    if peft.load_adapter is None:
        return AdapterPlan(peft, scales_of(peft, model) if peft.peft == "lora" else {}, {})
    directory = peft.load_adapter
    found: list[tuple[dict[str, Tensor], dict[str, Scale]]] = []
    agree(attempt(lambda: found.append(from_peft(read_adapter(directory), model, vocab_size, classes))), group)
    values, scales = found[0]
    return AdapterPlan(peft, scales, values)


def load_adapter(model: GPTStage, directory: str, *, mesh: Mesh, precision: Precision) -> PeftConfig:
    """Put the adapter of a folder on a whole model, for evaluation; what kind it is.

    Raises a `CheckpointError` where the folder is missing, damaged or of another model.
    """
    peft = with_adapter_settings(PeftConfig(load_adapter=directory))
    plan = plan_adapter(peft, model.config, model.vocab_size, mesh.world)
    plan.apply([model], mesh=mesh, precision=precision, seed=0)
    plan.fill([model], [whole(*entry) for entry in named_specs(model)])
    model.requires_grad_(False)
    return peft


def gather(pieces: Iterable[Piece], mesh: Mesh) -> dict[str, Tensor]:
    """Whole trained parameters on the CPU of the first rank, by global name, from the pieces that ranks hold; nothing
    on the others. Collective over the world."""
    mine = [
        ((piece.name, piece.spec.shape, start), view.detach())
        for piece in pieces
        for box, start, view in piece.held()
        if counts(piece, box, mesh)
    ]
    result: dict[str, Tensor] = {}
    for (name, shape, start), part in gather_tensors(mine, mesh.world, mesh.device):
        tensor = result.setdefault(name, torch.empty(shape, dtype=part.dtype))
        tensor[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part.cpu()
    return result


def save_adapter(
    directory: str,
    pieces: Iterable[Piece],
    *,
    plan: AdapterPlan,
    model: ModelConfig,
    mesh: Mesh,
    vocab_size: int,
    base: str | None = None,
    class_names: Sequence[str] | None = None,
    beside: Mapping[str, bytes] | None = None,
    flag: str = "--save-adapter",
) -> None:
    """Write `directory` in PEFT's format from the trained parameters' pieces. Collective over the world.

    `base`: the model's Hugging Face folder, where known.
    `class_names`: a classifier's, in order. `beside`: the files of tokenizer, chat template and generation settings
    that the model was trained with, as PEFT's users keep them there. `flag`: which one named the folder. All ranks
    raise the same error where it can't be written.
    """
    values = gather(pieces, mesh)

    def write() -> None:
        config, tensors = to_peft(values, model, plan.peft, plan.scales, vocab_size, base)
        write_adapter(directory, config, tensors, class_names, beside)

    try:
        on_first_rank(write, mesh.world)
    except CheckpointError as error:
        raise CheckpointError(f"{flag} {directory}: {error}") from error
