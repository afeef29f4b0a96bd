"""GPT: decoder-only transformer, GPT-2 to Llama by configuration.

Key idea: a `GPTStage` is the part of the model that one pipeline chunk owns: perhaps the embedding, some layers keyed
by their global number, perhaps the output. One process owns one stage that has all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from megalite.config.schema import ROTARY
from megalite.distributed.collectives import gather_sequence
from megalite.distributed.mesh import Group
from megalite.models.classifier import ClassifierHead
from megalite.models.multi_token import MultiTokenPrediction
from megalite.models.stages import StageSpan
from megalite.nn.attention_backend import AttentionBackend
from megalite.nn.attention_core import CoreAttention
from megalite.nn.attention_kernels import core_attention
from megalite.nn.cross_entropy import OutputCrossEntropy, OutputLoss
from megalite.nn.dropout import hidden_dropout
from megalite.nn.embedding import PositionEmbedding, VocabularyParallelEmbedding, vocabulary_spec
from megalite.nn.linear import linear
from megalite.nn.module import Build, ShardedModule, named_specs
from megalite.nn.norm import Norm
from megalite.nn.recompute import rerun
from megalite.nn.rotary import rotary_table
from megalite.nn.tokens import Tokens, VirtualTokens
from megalite.nn.transformer import TransformerLayer
from megalite.optimizer.sharding import Unit

Result = TypeVar("Result")


class _Embedding(ShardedModule):
    def __init__(self, build: Build, vocab_size: int, span: StageSpan):
        super().__init__()
        self.word_embeddings = VocabularyParallelEmbedding(build, vocab_size, span.tied_stages)
        self.position_embeddings = None
        if span.has_embedding and build.config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(build)
        self.prompt: nn.Module | None = None
        self.drop = build.config.hidden_dropout

    def forward(self, ids: Tensor, tokens: Tokens) -> Tensor:
        """`ids` [b, s] → [s, b, h], with sequence parallelism this rank's part of s. `prompt`: puts virtual tokens
        before them."""
        if self.prompt is not None and tokens.begins:
            x = tokens.part(self.prompt(self.word_embeddings(ids.t(), whole=True))).contiguous()
        else:
            x = self.word_embeddings(ids.t())
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(tokens.part(tokens.positions.t()))
        return hidden_dropout(x, self.drop, tokens, -1, "embedding")


class _Decoder(ShardedModule):
    def __init__(self, build: Build, core: CoreAttention, span: StageSpan):
        super().__init__()
        numbers = range(span.first_layer, span.last_layer)
        self.layers = nn.ModuleDict({str(n): TransformerLayer(build.in_layer(n), core, n) for n in numbers})
        self.layers_at_once = max(1, build.recompute.layers_at_once)
        self.recomputed = len(self.layers) if build.recompute.layers_at_once else build.recompute.first_layers
        self.final_layernorm = None
        if span.has_output:
            partial = build.mesh.layout.sequence_parallel
            self.final_layernorm = Norm(build, build.config.hidden_size, partial=partial)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        layers = list(self.layers.values())
        for first in range(0, len(layers), self.layers_at_once):

            def run(x: Tensor, group: list[nn.Module] = layers[first : first + self.layers_at_once]) -> Tensor:
                for layer in group:
                    x = layer(x, tokens)
                return x

            x = rerun(run, x) if first < self.recomputed and torch.is_grad_enabled() else run(x)
        return x if self.final_layernorm is None else self.final_layernorm(x)


class _Output(ShardedModule):
    """The output over the vocabulary. `own_weight`: a table of its own; else each call brings the embedding's."""

    def __init__(self, build: Build, vocab_size: int, *, own_weight: bool):
        super().__init__()
        self.vocab_size, self.group, self.wide = vocab_size, build.mesh.tp, build.precision.wide
        self.sequence_parallel, self.compiled = build.mesh.layout.sequence_parallel, build.compile
        spec = vocabulary_spec(build, vocab_size, None)
        self.weight = self.add_parameter("weight", spec, build) if own_weight else None

    def forward(self, hidden: Tensor, tied: Tensor | None, compute: Callable[[Tensor, Tensor], Result]) -> Result:
        """`compute`, of hidden states [s, b, h] and the table [local rows, h]: one of the methods below."""
        weight = tied if self.weight is None else self.weight
        assert weight is not None
        return compute(hidden, weight)

    def logits(self, hidden: Tensor, weight: Tensor, token_indices: Tensor | None) -> Tensor:
        """[s, b, local columns], or of `token_indices` [n, local columns]; without those of vocabulary padding."""
        rows = max(0, min(self.vocab_size - self.group.rank * weight.shape[0], weight.shape[0]))
        group: Group | None = self.group
        gather = self.sequence_parallel
        if token_indices is not None and gather:  # gathered here, its gradient is summed over the ranks here
            hidden, group, gather = gather_sequence(hidden, self.group), None, False
        if token_indices is not None:
            hidden = hidden.flatten(0, 1).index_select(0, token_indices)
        return linear(hidden, weight, group, gather=gather, rows=rows)

    def cross_entropy(self, label_smoothing: float) -> OutputCrossEntropy:
        """The loss, without logits."""
        return OutputCrossEntropy(
            self.group, self.vocab_size, self.wide, self.sequence_parallel, label_smoothing, self.compiled
        )


class GPTStage(ShardedModule):
    """The span of a GPT model that one pipeline chunk owns.

    `classes`: how many classes it decides between instead of predicting tokens: it has a `classifier` in place of
    the output over the vocabulary.
    """

    def __init__(
        self, build: Build, vocab_size: int, span: StageSpan, backend: AttentionBackend, classes: int | None = None
    ):
        super().__init__()
        config = build.config
        self.config, self.span, self.vocab_size = config, span, vocab_size
        self.core = core_attention(build, backend)
        self.wide, self.compute, self.group = build.precision.wide, build.precision.compute, build.mesh.tp
        self.weight_gradients = build.weight_gradients
        tied = not config.untie_embeddings_and_output_weights and classes is None
        depths = (config.mtp_num_layers or 0) if span.has_output and classes is None else 0
        self.embedding = None
        if span.has_embedding or (tied and span.has_output) or depths:
            self.embedding = _Embedding(build, vocab_size, span)
        self.decoder = _Decoder(build, self.core, span)
        self.mtp = MultiTokenPrediction(build, self.core, depths) if depths else None
        self.output_layer = self.classifier = None
        if span.has_output and classes is not None:
            self.classifier = ClassifierHead(build, classes)
        elif span.has_output:
            self.output_layer = _Output(build, vocab_size, own_weight=not tied)
        self.virtual: VirtualTokens | None = None

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Token ids [b, s] on the first stage, else activations [s, b, h] → activations [s, b, h].

        On the last stage they are normalised, ready for `logits`. Virtual tokens that pass through the layers are the
        first of s.
        """
        tokens = self._with_tables(tokens)
        if self.span.has_embedding:
            assert self.embedding is not None
            x = self._traced(self.embedding(x, tokens))
        return self.decoder(x, tokens)

    def states_ahead(self, hidden: Tensor, ids: Tensor, tokens: Tokens) -> list[Tensor]:
        """Normalised states [s, b, h] of each depth of multi-token prediction, from those of the last stage. `ids`
        int64 [b, depths, s]: the tokens ahead."""
        assert self.mtp is not None and self.embedding is not None
        states: list[Tensor] = self.mtp(hidden, ids, self._with_tables(tokens), self.embedding.word_embeddings)
        return states

    def _with_tables(self, tokens: Tokens) -> Tokens:
        """`tokens` behind virtual ones, with the mask and rotary table for all layers."""
        if self.virtual is not None:
            tokens = self.virtual.before(tokens)
        rotary = None
        if self.config.position_embedding_type in ROTARY:
            rotary = rotary_table(self.config, tokens, self.wide)
        return replace(tokens, mask=self.core.mask(tokens), rotary=rotary)

    def _traced(self, x: Tensor) -> Tensor:
        """The embedding's output; where nothing on this stage is trained, as the beginning of a graph, so that a
        backward has something to do on every stage."""
        if torch.is_grad_enabled() and not any(parameter.requires_grad for parameter in self.parameters()):
            return x.detach().requires_grad_()
        return x

    def sequence_length(self, tokens: int) -> int:
        """Length of the activations between blocks for a sequence of so many tokens."""
        return tokens + (self.virtual.count if self.virtual is not None and self.virtual.in_sequence else 0)

    @property
    def output_weight(self) -> nn.Parameter:
        """The [local rows, hidden] table of the output: its own, or the embedding's."""
        assert self.output_layer is not None
        if self.output_layer.weight is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight

    def logits(self, hidden: Tensor, token_indices: Tensor | None = None) -> Tensor:
        """[s, b, h] of the last stage → [s, b, local columns]; those of vocabulary padding are left out.

        `token_indices` int64 [n]: only of these of the s · b tokens, [n, local columns].
        """
        assert self.output_layer is not None
        compute = partial(self.output_layer.logits, token_indices=token_indices)
        logits: Tensor = self.output_layer(hidden, self.output_weight, compute)
        return logits

    def units(self, chunk: int) -> Iterator[Unit]:
        """The modules that a forward calls one after another, with the parameters that each uses."""
        named = {parameter: (name, parameter, spec) for name, parameter, spec in named_specs(self)}
        then = self.weight_gradients.then
        first = self.embedding if self.span.has_embedding else None
        ahead = () if self.mtp is None else (self.mtp.ahead, *self.mtp.layers.values())
        last = (self.decoder.final_layernorm, *ahead, self.classifier, self.output_layer)
        for module in (first, *self.decoder.layers.values(), *last):
            if module is not None:
                members = [named[each] for each in self._used_by(module)]
                # An embedding's backward reads no table, and the output's gradients are formed in its forward.
                needed = module not in (first, self.output_layer, *ahead[:1])
                yield Unit(module, chunk, members, then, backward_reads=needed)

    def _used_by(self, unit: nn.Module) -> Iterator[nn.Parameter]:
        """The parameters that a unit's forward uses."""
        if unit is self.output_layer:
            yield self.output_weight
        elif self.mtp is not None and unit is self.mtp.ahead:
            assert self.embedding is not None
            yield self.embedding.word_embeddings.weight
        else:
            yield from unit.parameters()

    def loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        scale: Tensor | float = 1.0,
        label_smoothing: float = 0.0,
        token_indices: Tensor | None = None,
    ) -> OutputLoss:
        """Cross-entropy in nats of `hidden` [s, b, h] for `labels` [b, s]: the next tokens, or classes. Of every token
        [s, b], or of those in `token_indices`, int64 [n] of the s · b. Virtual tokens have none.

        `scale`: what a token's loss counts for in the total, [].
        """
        targets = labels.t().flatten()
        if token_indices is not None:
            targets = targets[token_indices]
        virtual = self.sequence_length(0) * labels.shape[0]
        indices = token_indices
        if virtual:
            indices = virtual + (torch.arange(len(targets), device=labels.device) if indices is None else indices)
        if self.classifier is not None:
            loss = self.classifier.loss(hidden, targets, indices, scale, label_smoothing)
        else:
            assert self.output_layer is not None
            compute = partial(
                self.output_layer.cross_entropy(label_smoothing), targets=targets, token_indices=indices, scale=scale
            )
            loss = self.output_layer(hidden, self.output_weight, compute)
        return loss if token_indices is not None else loss._replace(tokens=loss.tokens.view(labels.t().shape))

    def decisions(self, hidden: Tensor) -> Tensor:
        """A classifier's decision at every token, int64 [s, b]."""
        assert self.classifier is not None
        return self.classifier.decisions(hidden)[self.sequence_length(0) :]


def units_of(stages: Sequence[GPTStage]) -> list[Unit]:
    """The units of a rank's chunks, in the order of a forward."""
    return [unit for chunk, stage in enumerate(stages) for unit in stage.units(chunk)]


def plain_tokens(ids: Tensor) -> Tokens:
    """What a forward knows of `ids` [b, s] where each row is one document from position 0, in evaluation."""
    return Tokens.whole(torch.arange(ids.shape[1], device=ids.device)[None])
