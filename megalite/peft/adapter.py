"""Adapters saved from and loaded into any layout.

Key idea: a rank's pieces name rectangles of logical tensors; saving puts the owners' together on the first rank,
loading takes each rank's out of the whole. An adapter is small enough to be whole in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError, agree, attempt, on_first_rank
from megalite.checkpoint.huggingface.hub import published_name
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.storage import ADAPTER_FILE
from megalite.config.schema import ModelConfig
from megalite.config.schema_finetune import PeftConfig
from megalite.distributed.collectives import broadcast_object
from megalite.distributed.mesh import Group, Mesh
from megalite.distributed.pieces import Piece, gather, whole
from megalite.estimate.model import AdapterWork
from megalite.files.remote import place
from megalite.models.gpt import GPTStage
from megalite.nn.module import named_specs
from megalite.optimizer.optimizer import Optimizer
from megalite.peft.apply import Scale, apply_peft, prompt_from_text, scales_of
from megalite.peft.convert import PROMPT, from_peft, to_peft
from megalite.peft.files import peft_config, read_adapter, write_adapter
from megalite.peft.modules import EXPERT_LINEAR_OF, MLP_PARTS, linears_of, widths_of
from megalite.precision.policy import Precision


@dataclass(frozen=True)
class AdapterPlan:
    """What to build beside a `model` with `vocab_size` rows, and what to fill it with. `peft`: complete. `scales`:
    LoRA's targets. `values`: whole parameters by global name from the folder of `--load-adapter`; empty where none was
    given."""

    peft: PeftConfig
    model: ModelConfig
    vocab_size: int
    scales: dict[str, Scale]
    values: dict[str, Tensor]

    def work(self, *, head: bool) -> AdapterWork:
        """What it adds to the work for a token. `head`: a classifier's is trained too."""
        assert self.model.num_layers is not None
        if self.peft.peft == "lora":
            sizes = (
                self.scales[part].rank
                * sum(widths_of(part, linear, self.model))
                * (self.model.moe_router_topk if part in EXPERT_LINEAR_OF else 1)
                for number in range(self.model.num_layers)
                for part, linear in linears_of(self.model, number).items()
                if part in self.scales
            )
            return AdapterWork(sum(sizes), head)
        return AdapterWork(0, head, self.peft.num_virtual_tokens, computed=self.peft.peft == "prompt")

    @property
    def caution(self) -> str:
        """What to know of a saved adapter. In DeepSeek-V3, for one, transformers 5 has no linear layers in the experts,
        and PEFT 0.21 takes every target of such a name for one of an older adapter there."""
        names = sorted(MLP_PARTS & self.scales.keys()) if self.model.num_experts is not None else []
        if not names:
            return ""
        return (
            f"; of some models with experts PEFT takes {', '.join(names)} for targets in the routed ones: use "
            "tools/generate.py, or merge the adapter with tools/merge_adapter.py"
        )

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

    def stage(
        self,
        directory: str,
        pieces: Iterable[Piece],
        mesh: Mesh,
        *,
        base: str | None = None,
        class_names: Sequence[str] | None = None,
        beside: Mapping[str, bytes] | None = None,
    ) -> Callable[[Group], None]:
        """What writes `directory` in PEFT's format, collectively over all ranks, with what the trained parameters'
        pieces hold now. Collective over the world.

        `base`: the model's Hugging Face folder, where known. `class_names`: a classifier's, in order. `beside`: the
        files of tokenizer, chat template and generation settings that the model was trained with, as PEFT's users keep
        them there. All ranks raise the same error where it can't be written.
        """
        values = gather(pieces, mesh)

        def write() -> None:
            config, tensors = to_peft(values, self.model, self.peft, self.scales, self.vocab_size, base)
            write_adapter(directory, config, tensors, class_names, beside)

        return partial(on_first_rank, write)


def plan_adapter(
    peft: PeftConfig, model: ModelConfig, vocab_size: int, group: Group, classes: int | None = None
) -> AdapterPlan:
    """`peft`: complete. `classes`: of a model that classifies.

    All members of `group` raise the same `CheckpointError` where the folder of `--load-adapter` is missing, damaged or
    of another model.
    """
    if peft.load_adapter is None:
        return AdapterPlan(peft, model, vocab_size, scales_of(peft, model) if peft.peft == "lora" else {}, {})
    directory = peft.load_adapter
    found: list[tuple[dict[str, Tensor], dict[str, Scale]]] = []
    agree(attempt(lambda: found.append(from_peft(read_adapter(directory), model, vocab_size, classes))), group)
    values, scales = found[0]
    return AdapterPlan(peft, model, vocab_size, scales, values)


def load_adapter(model: GPTStage, directory: str, *, mesh: Mesh, precision: Precision) -> PeftConfig:
    """Put the adapter of a folder on a whole model, for evaluation; what kind it is.

    Raises a `CheckpointError` where the folder is missing, damaged or of another model.
    """
    peft = peft_config(directory)
    plan = plan_adapter(peft, model.config, model.vocab_size, mesh.world)
    plan.apply([model], mesh=mesh, precision=precision, seed=0)
    plan.fill([model], [whole(*entry) for entry in named_specs(model)])
    model.requires_grad_(False)
    return peft


class AdapterSaver:
    """Writes a run's adapter where `--save-adapter` and `--save-best-adapter` ask for it. `classes`, `beside`: see
    `AdapterPlan.stage`. `saver`: writes them. `say`: prints a line on the first rank. All methods are collective over
    the world."""

    def __init__(
        self,
        plan: AdapterPlan,
        optimizer: Optimizer,
        base: str | None,
        *,
        classes: Sequence[str] | None,
        beside: Mapping[str, bytes],
        saver: Saver,
        say: Callable[[str], None],
    ):
        """`base`: the folder of `--load-hf`."""
        self.plan, self.optimizer, self.saver, self.say = plan, optimizer, saver, say
        self.base, self.classes, self.beside = None if base is None else published_name(base), classes, beside
        self._saved_at = -1

    def save(self, iteration: int) -> None:
        """Of `--save-adapter`, once a step."""
        directory = self.plan.peft.save_adapter
        if directory is not None and self._saved_at != iteration:
            self._saved_at = iteration
            self._write("--save-adapter", directory, self.plan.caution)

    def standing_best(self, best: float | None) -> float | None:
        """`best`, the lowest loss of an earlier run, where its adapter is in the folder of `--save-best-adapter`; else
        None: the best of this run is to be there. Agreed with the first rank."""
        directory = self.plan.peft.save_best_adapter
        if directory is None or best is None:
            return best
        there: bool = broadcast_object((place(directory) / ADAPTER_FILE).exists(), self.optimizer.mesh.world)
        if not there:
            self.say(f"--save-best-adapter {directory} holds no adapter: the best of this run will be kept there")
        return best if there else None

    def save_if_best(self, loss: float, best: float | None) -> float | None:
        """Of `--save-best-adapter`, after a validation; the lowest loss so far, of which `best` was the one before."""
        directory = self.plan.peft.save_best_adapter
        if directory is None or not loss < (math.inf if best is None else best):
            return best
        self._write("--save-best-adapter", directory, f": validation loss {loss:.6g} is the lowest so far")
        return loss

    def _write(self, flag: str, directory: str, comment: str) -> None:
        """Have the adapter written; `comment` on it for the user."""
        write = self.plan.stage(
            directory,
            self.optimizer.parameter_pieces().values(),
            self.optimizer.mesh,
            base=self.base,
            class_names=self.classes,
            beside=self.beside,
        )

        def job(group: Group) -> None:
            try:
                write(group)
            except CheckpointError as error:
                raise CheckpointError(f"{flag} {directory}: {error}") from error

        self.saver.submit(job, f"saved the adapter in {directory}{comment}")
