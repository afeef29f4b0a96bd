"""Keys and values of the tokens seen so far, so that each new token costs one token's work.

Key idea: all memory is taken at once, for the longest that the sequences may become; a step writes its slice in place
and attention reads a view, so nothing is copied and nothing grows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.models.gpt import GPTStage
from megalite.nn.transformer import TransformerLayer


class KeyValueCache:
    """The cache that `nn.module.KeyValueCache` asks for. `tokens`: per sequence, padding included."""

    def __init__(self, model: GPTStage, *, tokens: int, batch: int) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._filled: dict[int, int] = {}
        for layer in model.decoder.layers.values():
            assert isinstance(layer, TransformerLayer)
            attention = layer.self_attention
            weight = attention.linear_qkv.weight
            shape = (tokens, batch, attention.local_groups, attention.width)
            self._keys[layer.number] = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            self._values[layer.number] = torch.empty_like(self._keys[layer.number])
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
