"""Trained vectors that stand before the tokens of every sequence (Li and Liang 2021; Lester et al. 2021).

Key idea: what a forward is told of its sequence is extended once, before the first layer; so positions, masks and
dropout are right for every layer and attention kernel that takes a mask. Positions count the virtual tokens, and every
token sees them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.mesh import Group
from megalite.nn.module import SequenceInfo


@dataclass(frozen=True)
class VirtualTokens:
    """`count` of them. `in_sequence`: they pass through the layers as tokens do; else they are keys and values of each
    layer. `group`: ranks among which activations are cut along the sequence, None where they aren't."""

    count: int
    in_sequence: bool
    group: Group | None

    def enter(self, info: SequenceInfo) -> bool:
        """Whether they lengthen the sequence of this forward."""
        return self.in_sequence and info.begins

    def place(self, info: SequenceInfo) -> SequenceInfo:
        """Positions and token indices with the virtual tokens in front."""
        positions = info.position_ids + self.count
        if not self.in_sequence:
            return replace(info, position_ids=positions)
        if not info.begins:
            return replace(info, position_ids=positions, token_index=info.token_index + self.count)
        device = positions.device
        virtual = torch.arange(self.count, device=device).expand(positions.shape[0], -1)
        index = torch.arange(self.count + positions.shape[1], device=device)
        if self.group is not None:
            index = index.chunk(self.group.size)[self.group.rank]
        return replace(info, position_ids=torch.cat((virtual, positions), dim=1), token_index=index)

    def see(self, visible: Tensor | None, info: SequenceInfo, tokens: int) -> Tensor | None:
        """The mask `visible` [b or 1, 1, s, keys] of the real `tokens` (None: the causal rule) with the virtual ones
        as first keys, and where they enter the sequence as first queries too."""
        if visible is None:
            if self.enter(info):
                return None
            device = info.position_ids.device
            visible = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device).tril()
        seen = F.pad(visible, (self.count, 0), value=True)
        if not self.enter(info):
            return seen
        first = torch.ones(self.count, seen.shape[-1], dtype=torch.bool, device=seen.device).tril()
        return torch.cat((first.expand(*seen.shape[:2], -1, -1), seen), dim=2)
