"""Several prompts become several continuations, together.

Key idea: prompts are padded on the left, so the newest token of every prompt is in the last column and one step serves
all. Positions count from each prompt's own first token and padding is invisible, so a prompt's result is what the
prompt alone would give. The prompts first go through the model at once, filling the cache; then one token at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from megalite.config.errors import UserError
from megalite.inference.options import GenerationOptions
from megalite.inference.sampling import TokenSampler
from megalite.models.gpt import GPTStage
from megalite.nn.rotary import scales_by_length
from megalite.nn.tokens import Places, Tokens
from megalite.nn.transformer import TransformerLayer

_PREFILL_TOKENS = 1024  # of each prompt at a time: bounds the mask and the activations of long prompts


class GenerationCache:
    """Keys and values of the tokens seen so far, so that each new token costs one token's work.

    All memory is taken at once, for the longest that the sequences may become; a step writes its slice in place and
    attention reads a view, so nothing is copied and nothing grows. `tokens`: per sequence, padding included.
    """

    def __init__(self, model: GPTStage, *, tokens: int, batch: int) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._filled: dict[int, int] = {}
        for layer in model.decoder.layers.values():
            assert isinstance(layer, TransformerLayer)
            attention = layer.self_attention
            weight = attention.linear_proj.weight
            self._keys[layer.number], self._values[layer.number] = (
                torch.empty((tokens, batch, *shape), dtype=weight.dtype, device=weight.device)
                for shape in attention.cache_shapes
            )
            self._filled[layer.number] = 0

    @property
    def nbytes(self) -> int:
        """Of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self._keys.values(), *self._values.values()))

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [s, b, groups, d] of global layer `layer`; views of all so far."""
        start = self._filled[layer]
        end = start + key.shape[0]
        assert end <= self._keys[layer].shape[0], "more tokens than the cache was made for"
        self._keys[layer][start:end] = key
        self._values[layer][start:end] = value
        self._filled[layer] = end
        return self._keys[layer][:end], self._values[layer][:end]


class PaddedBatch:
    """Prompts (lists of ids, none empty) on their way through the model, with room for `new_tokens` columns more."""

    def __init__(self, model: GPTStage, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> None:
        device = model.output_weight.device
        longest = max(map(len, prompts))
        self.model = model
        self.pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        self.tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        self.cache = GenerationCache(model, tokens=virtual_tokens(model) + longest + new_tokens, batch=len(prompts))
        self.columns = 0
        # Padding is a document of its own, so that no token sees it.
        columns = torch.arange(longest + new_tokens, device=device)
        padded = any(len(prompt) < longest for prompt in prompts)
        documents = (columns >= self.pads[:, None]).to(torch.int32) if padded else None
        self.places = Places(columns, documents)

    def prefill(self, check: Callable[[], None] | None = None) -> Tensor:
        """Logits [b, vocabulary] after the prompts. `check`: called before each part, may raise to give up."""
        # Where rotation depends on the length, a part must not be rotated by its own length.
        at_once = self.tokens.shape[1] if scales_by_length(self.model.config) else _PREFILL_TOKENS
        for part in self.tokens.split(at_once, dim=1):
            if check is not None:
                check()
            logits = self.advance(part)
        return logits

    @torch.inference_mode()
    def advance(self, tokens: Tensor) -> Tensor:
        """Let the model see the next columns, ids [b, s]: logits [b, vocabulary] after the last."""
        first, end = self.columns, self.columns + tokens.shape[1]
        self.columns = end
        queries = self.places.slice(first, end)
        places = Tokens(
            positions=(queries.index - self.pads[:, None]).clamp_min(0),
            queries=queries,
            keys=self.places.slice(0, end) if first else None,
            cache=self.cache,
            begins=first == 0,
        )
        return self.model.logits(self.model(tokens, places)[-1:])[0]


def virtual_tokens(model: GPTStage) -> int:
    """How many positions an adapter's trained vectors take."""
    return 0 if model.virtual is None else model.virtual.count


def room_after(model: GPTStage, prompt: int) -> tuple[float, str]:
    """How many ids may follow a prompt of so many, and what a longer text meets: the end of learned positions, or
    positions at which the keys in the cache would have to be rotated again, since dynamic and longrope positions depend
    on the text's length. Infinity where there is no such limit, though a model may write poorly beyond the length it
    was trained on."""
    config, virtual = model.config, virtual_tokens(model)
    kind, rows = config.position_embedding_type, config.max_position_embeddings
    if kind == "learned_absolute" and rows is not None:
        return rows - virtual - prompt, f"more than the model's {rows - virtual} learned positions"
    limit = config.rope_original_max_position_embeddings - virtual
    if not scales_by_length(config) or (kind == "longrope" and prompt > limit):
        return math.inf, ""
    most = max(1, limit + 1 - prompt)  # nothing is computed after the last
    return most, f"so long a text that {kind} positions would have to rotate the keys in the cache again"


def check_lengths(model: GPTStage, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> None:
    """A UserError where there is no room for a prompt's new tokens."""
    for number, prompt in enumerate(prompts, start=1):
        room, reason = room_after(model, len(prompt))
        if options.max_new_tokens > room:
            remedy = f"use --max-new-tokens {room} or less, or " if room > 0 else ""
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens; with --max-new-tokens {options.max_new_tokens} that is "
                f"{reason}: {remedy}shorten it"
            )


def stream(
    model: GPTStage,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    *,
    stop: Collection[int] = (),
    unknown: Tensor | None = None,
    indices: Sequence[int] | None = None,
    check: Callable[[], None] | None = None,
) -> Iterator[list[int | None]]:
    """Generate step by step: each item holds the new id of every prompt, None for those that have ended.

    A prompt ends where the model chooses one of the ids in `stop`, which is not handed out, or after `max_new_tokens`.
    `prompts`: ids, none empty. `unknown`: ids that are never chosen. `indices`: one number per prompt, which with the
    seed decides its draws; default 0, 1, ... `check`: called before each piece of work, may raise to give up.
    Raises a UserError before any work where a prompt is too long, and later where logits aren't finite.
    """
    assert prompts and all(prompts), "every prompt needs at least one id"
    check_lengths(model, prompts, options)
    indices = range(len(prompts)) if indices is None else indices
    sampler = TokenSampler(options, indices, model.output_weight.device, unknown=unknown)
    return _steps(PaddedBatch(model, prompts, new_tokens=options.max_new_tokens), sampler, frozenset(stop), check)


def _steps(
    batch: PaddedBatch, sampler: TokenSampler, stop: Collection[int], check: Callable[[], None] | None
) -> Iterator[list[int | None]]:
    running = [True] * len(batch.pads)
    chosen: Tensor | None = None
    for step in range(sampler.options.max_new_tokens):
        if check is not None:
            check()
        logits = batch.prefill(check) if chosen is None else batch.advance(chosen[:, None])
        if not bool(logits.isfinite().all()):
            raise UserError("the model's logits are not finite: its weights are damaged, or too large for --fp16")
        chosen = sampler.choose(logits, step)
        ids = chosen.tolist()
        running = [runs and token not in stop for runs, token in zip(running, ids, strict=True)]
        if not any(running):
            return
        yield [token if runs else None for runs, token in zip(running, ids, strict=True)]
