"""What a model writes after the prompts of `--eval-prompt`, during training.

Key idea: each new token is one evaluation forward over the whole text, by the same executor and schedule that measure
the loss. So it works at every layout, without a cache of keys; a few short prompts are cheap enough.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.data.microbatch import Microbatch
from megalite.data.tokenizer_base import Tokenizer
from megalite.distributed.collectives import all_gather_objects
from megalite.distributed.mesh import Mesh
from megalite.models.gpt import GPTStage
from megalite.training.evaluate import Evaluator

NEW_TOKENS = 64
"""Of each continuation, at most."""


@dataclass(frozen=True)
class Prompts:
    """`ids`: of each of the `texts`, none empty. `ends`: ids that end an answer."""

    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    ends: Collection[int]


@dataclass
class Continuations:
    """`length`: the most ids of a text and its answer; each of the prompts is shorter."""

    mesh: Mesh
    evaluator: Evaluator
    tokenizer: Tokenizer
    prompts: Prompts
    length: int

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
        executor, found = self.evaluator.executor, []

        def choose(stage: GPTStage, hidden: Tensor, batch: Microbatch) -> None:
            found.append(self._local(stage, hidden, batch))

        before, executor.on_evaluated = executor.on_evaluated, choose
        try:
            executor.begin([self._padded(texts)])
            self.evaluator.runtime.run(self.evaluator.plan.evaluation(1))
        finally:
            executor.on_evaluated = before
        chosen = None
        if found:  # on ranks of the last stage
            shares = all_gather_objects(found[0], self.mesh.tp)
            chosen = [max(row, key=lambda share: share[0])[1] for row in zip(*shares, strict=True)]
        ids: list[int] = all_gather_objects(chosen, self.mesh.pp)[-1]
        return ids

    def _local(self, stage: GPTStage, hidden: Tensor, batch: Microbatch) -> list[tuple[float, int]]:
        """Largest logit and its id after each text, among the columns of this tensor-parallel rank."""
        rows, places = batch.loss_mask.nonzero(as_tuple=True)
        counted = (places + stage.sequence_length(0)) * len(rows) + rows
        first = stage.group.rank * stage.output_weight.shape[0]
        logits = stage.logits(hidden, counted)[:, : max(0, self.tokenizer.vocab_size - first)]
        if not logits.shape[1]:
            return [(-float("inf"), 0)] * len(rows)
        values, columns = logits.max(dim=1)
        return [(value, first + column) for value, column in zip(values.tolist(), columns.tolist(), strict=True)]

    def _padded(self, texts: Sequence[Sequence[int]]) -> Microbatch:
        """The texts as rows; attention is causal, so no text sees its padding. The loss counts their last places."""
        multiple = self.mesh.tp.size if self.mesh.layout.sequence_parallel else 1
        width = -(-max(map(len, texts)) // multiple) * multiple
        tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        mask[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])] = True
        positions = torch.arange(width).expand(len(texts), -1)
        return Microbatch(tokens, torch.zeros_like(tokens), mask, positions, torch.arange(len(texts)))
