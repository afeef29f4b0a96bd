"""One microbatch as torch tensors, as every pipeline stage of a data-parallel rank sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megalite.data.document_mask import Item
from megalite.distributed.context import zigzag
from megalite.distributed.mesh import Group

_CUT = ("tokens", "labels", "loss_mask", "ahead_tokens", "ahead_labels", "ahead_mask")


@dataclass
class Microbatch:
    """b sequences of s tokens.

    tokens, labels, position_ids: int64 [b, s]; labels are the next tokens. loss_mask: bool [b, s], True where the label
    counts. document_ids: int32 [b, s] with --reset-attention-mask or --sft-packing, else None: attention stays within
    equal ids. sample_ids: int64 [b], each sample's number in the order in which the whole run consumes samples; the
    dropout key. lengths: int64 [b], how many of a row's tokens come before its padding; None: there is no padding.

    `places` int64 [n], where the batch is a part of its sequences: which tokens. Then tokens, labels and loss_mask, and
    those ahead, are [..., n]; position_ids, document_ids and lengths are still of whole sequences.

    With multi-token prediction, of `depths` tokens more: ahead_tokens, ahead_labels int64 and ahead_mask bool [b,
    depths, s], what tokens, labels and loss_mask are so many places ahead; the mask is False where that is another
    document or the end. Here, since a context-parallel rank has only a part of each sequence.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    sample_ids: torch.Tensor
    document_ids: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    places: torch.Tensor | None = None
    ahead_tokens: torch.Tensor | None = None
    ahead_labels: torch.Tensor | None = None
    ahead_mask: torch.Tensor | None = None

    @classmethod
    def from_arrays(cls, arrays: Item) -> Microbatch:
        """From stacked arrays under the names of the fields; shares their memory."""
        return cls(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def of_rank(self, group: Group) -> Microbatch:
        """The tokens of this rank of a context-parallel group."""
        if group.size == 1:
            return self
        places = zigzag(self.tokens.shape[1], group.size, group.rank)
        cut = {name: getattr(self, name) for name in _CUT if getattr(self, name) is not None}
        return dataclasses.replace(self, places=places, **{name: each[..., places] for name, each in cut.items()})

    def pin_memory(self) -> Microbatch:
        """A copy in page-locked memory."""
        return self.map(lambda tensor: tensor.pin_memory())

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Microbatch:
        """`function` of every tensor."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return Microbatch(**{name: function(value) for name, value in values.items() if value is not None})


def stack_items(items: Sequence[Item], sample_ids: np.ndarray) -> Item:
    """Items of one shape and their numbers as the arrays of a microbatch."""
    arrays = {name: np.stack([item[name] for item in items]) for name in items[0]}
    arrays["sample_ids"] = sample_ids
    return arrays


def with_ahead(arrays: Item, depths: int) -> Item:
    """The arrays of a microbatch with what lies 1 to `depths` tokens ahead, as `Microbatch` says; zeros after the
    end."""
    names = {"ahead_tokens": "tokens", "ahead_labels": "labels", "ahead_mask": "loss_mask"}
    result = dict(arrays)
    for ahead, name in names.items():
        result[ahead] = np.stack([_shifted(arrays[name], depth) for depth in range(1, depths + 1)], axis=1)
    documents = arrays.get("document_ids")
    if documents is not None:
        same = [_shifted(documents, depth) == documents for depth in range(1, depths + 1)]
        result["ahead_mask"] &= np.stack(same, axis=1)
    return result


def _shifted(array: np.ndarray, count: int) -> np.ndarray:
    """[b, s] from `count` places on, zeros after the end."""
    rest = array[:, count:]
    return np.pad(rest, ((0, 0), (0, array.shape[1] - rest.shape[1])))
