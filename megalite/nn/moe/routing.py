"""What a router decides."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """Where n tokens go. `experts` int64 [n, k]: global numbers of each token's experts, all different in a row.
    `weights` wide [n, k], with gradient: a token's output is the weighted sum of its experts'. `kept` bool [n, k]:
    those that aren't dropped; None: all."""

    experts: Tensor
    weights: Tensor
    kept: Tensor | None = None
