"""Measures on held-out data: the loss over all tokens, how well a classifier decides, what the model writes.

Key idea: all three come from the same forwards, by the executor and schedule of training. So they work at every layout;
and to continue a few short prompts no cache of keys is needed: each new token is one forward over the whole text.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.config.schema import RunConfig
from megalite.data.microbatch import Microbatch
from megalite.data.tokenizer_base import Tokenizer
from megalite.distributed.collectives import all_gather_objects, all_reduce
from megalite.distributed.mesh import Mesh
from megalite.models.gpt import GPTStage
from megalite.precision.backends import ALIGNMENT
from megalite.training.engine import Engine


class DecisionCounts:
    """Counts int64 [true class, decided class], on ranks of the last pipeline stage."""

    def __init__(self, classes: int, mesh: Mesh):
        self.mesh = mesh
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=mesh.device)

    def clear(self) -> None:
        """Begin an evaluation."""
        self.counts.zero_()

    def add(self, stage: GPTStage, hidden: Tensor, batch: Microbatch) -> None:
        """Count the decisions of the last stage from its `hidden` [s, b, h] at the places that count."""
        decided = stage.decisions(hidden).t()[batch.loss_mask]
        true = batch.labels[batch.loss_mask]
        places = true * len(self.counts) + decided
        self.counts += torch.bincount(places, minlength=self.counts.numel()).view_as(self.counts)

    def scores(self) -> dict[str, float]:
        """Accuracy and macro F1 of all that was counted. Collective over the ranks that differ in data or stage."""
        return scores_of(all_reduce(self.counts.clone(), self.mesh.all_but_tp))


def scores_of(counts: Tensor) -> dict[str, float]:
    """`accuracy`, and `macro_f1`: the mean over the classes that occur (truly or as a decision) of
    2 hits / (truly + decided). `counts` [true, decided]; zeros where nothing was counted."""
    table = counts.double().cpu()
    hits, occurrences = table.diag(), table.sum(0) + table.sum(1)
    seen = occurrences > 0
    f1 = (2 * hits[seen] / occurrences[seen]).mean() if seen.any() else torch.zeros(())
    return {"accuracy": float(hits.sum() / table.sum().clamp(min=1)), "macro_f1": float(f1)}


PROGRESS_SECONDS = 30.0  # without a line


@dataclass
class Evaluator:
    """Runs forwards without gradients. `data`: this rank's microbatches of a split for one evaluation: of
    `--eval-iters` global batches, or with `--full-validation` of the whole split. `say`: prints a line on
    the first rank. `moved`: called at each global batch."""

    config: RunConfig
    mesh: Mesh
    engine: Engine
    data: Callable[[str], Iterator[Microbatch]]
    decisions: DecisionCounts | None = None
    say: Callable[[str], None] = print
    moved: Callable[[], object] = lambda: None

    def run(self, split: str) -> tuple[float, dict[str, float]]:
        """Mean loss in nats over the split's unmasked tokens, NaN where there are none; and of a classifier its scores.
        Collective (world)."""
        microbatches, on_output = self.data(split), None
        if self.decisions is not None:
            self.decisions.clear()
            on_output = self.decisions.add
        # losses and tokens; float64 so that the sum doesn't depend on how the ranks share the samples
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        validation, begun, done = self.config.validation, time.monotonic(), 0
        reported = begun
        self.moved()
        while batches := list(itertools.islice(microbatches, self.config.microbatches_per_step(self.mesh.dp.size))):
            sums[0] += self.engine.evaluate(batches, on_output)
            if self.mesh.pp.rank == self.mesh.pp.size - 1:  # where the losses are
                sums[1] += self.mesh.upload(self.engine.executor.objective.normaliser(batches))
            done += 1
            self.moved()
            if (now := time.monotonic()) - reported > PROGRESS_SECONDS:
                most = "" if validation.full_validation else f" of at most {validation.eval_iters}"
                self.say(f"{split}: {done}{most} global batches evaluated in {now - begun:.0f} s")
                reported = now
        loss, tokens = all_reduce(sums, self.mesh.all_but_tp).tolist()
        return loss / tokens if tokens else math.nan, {} if self.decisions is None else self.decisions.scores()


NEW_TOKENS = 64
"""Of each continuation, at most."""


@dataclass(frozen=True)
class Prompts:
    """`ids`: of each of the `texts`, none empty. `ends`: ids that end an answer."""

    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    ends: Collection[int]


def length_multiple(config: RunConfig, mesh: Mesh) -> int:
    """What the length of a batch must be a multiple of where it follows from the samples.

    Scales of FP8 are of what comes after a sample too, so there it should be a multiple in any layout.
    """
    multiple = mesh.layout.sequence_multiple
    return multiple if config.precision.fp8_format is None else math.lcm(multiple, ALIGNMENT)


@dataclass
class Continuations:
    """`length`: the most ids of a text and its answer; each of the prompts is shorter. Rows are as long as a multiple
    of `multiple`."""

    mesh: Mesh
    engine: Engine
    tokenizer: Tokenizer
    prompts: Prompts
    length: int
    multiple: int

    def texts(self) -> list[str]:
        """What follows each prompt where the likeliest token is taken each time. Collective over the world."""
        texts = [list(prompt) for prompt in self.prompts.ids]
        running = set(range(len(texts)))
        for _ in range(NEW_TOKENS):
            for n, token in enumerate(self._likeliest(texts)):
                if n in running and token in self.prompts.ends:
                    running.discard(n)
                elif n in running:
                    texts[n].append(token)
            running = {n for n in running if len(texts[n]) < self.length}
            if not running:
                break
        return [
            self.tokenizer.detokenize(text[len(prompt) :]) for text, prompt in zip(texts, self.prompts.ids, strict=True)
        ]

    def _likeliest(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """The id that follows each text; the same on all ranks."""
        found: list[tuple[int, float, int]] = []

        def choose(stage: GPTStage, hidden: Tensor, batch: Microbatch) -> None:
            found.extend(self._local(stage, hidden, batch))

        batches = [self._padded(texts)]
        if self.engine.executor.stages[0].config.moe_expert_capacity_factor is not None:
            # Tokens of a batch are dropped for others of it, and no text may depend on the others.
            batches = [
                replace(self._padded([text]), sample_ids=torch.tensor([number])) for number, text in enumerate(texts)
            ]
        self.engine.evaluate([batch.of_rank(self.mesh.cp) for batch in batches], choose)
        best: dict[int, tuple[float, int]] = {}
        for group in (self.mesh.tp, self.mesh.cp, self.mesh.pp):  # who has not the last stage or a text finds nothing
            found = [each for share in all_gather_objects(found, group) for each in share]
        for text, value, token in found:
            if text not in best or value > best[text][0]:
                best[text] = value, token
        return [best[text][1] for text in range(len(texts))]

    def _local(self, stage: GPTStage, hidden: Tensor, batch: Microbatch) -> list[tuple[int, float, int]]:
        """Of each text that ends here: its number, which is the sample's, the largest logit after it and the id of
        that, among the columns of this tensor-parallel rank."""
        rows, places = batch.loss_mask.nonzero(as_tuple=True)
        indices = (places + stage.sequence_length(0)) * len(rows) + rows
        first = stage.group.rank * stage.output_weight.shape[0]
        logits = stage.logits(hidden, indices)[:, : max(0, self.tokenizer.vocab_size - first)]
        if not logits.shape[1]:
            return []
        values, columns = logits.max(dim=1)
        columns += first
        return list(zip(batch.sample_ids[rows].tolist(), values.tolist(), columns.tolist(), strict=True))

    def _padded(self, texts: Sequence[Sequence[int]]) -> Microbatch:
        """The texts as rows; attention is causal, so no text sees its padding. The loss counts their last places."""
        width = min(-(-max(map(len, texts)) // self.multiple) * self.multiple, self.length)
        tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        mask[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])] = True
        positions = torch.arange(width).expand(len(texts), -1)
        lengths = torch.tensor([len(text) for text in texts])
        return Microbatch(tokens, torch.zeros_like(tokens), mask, positions, torch.arange(len(texts)), lengths=lengths)
