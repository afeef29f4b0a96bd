"""The grid of ranks, as arithmetic.

Key idea: every group of a run follows from one grid. Rank order is Megatron-LM's: tensor fastest, then context, data,
pipeline slowest. The dense parts use the factorisation (pp, dp, cp, tp), the experts (pp, edp, ep, etp) of the same
ranks; both multiply to the world size. Pure data: nothing here touches torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.config.resolve import heads_exchanged
from megalite.config.schema import LayoutConfig

DENSE_AXES = ("pp", "dp", "cp", "tp")  # slowest first
EXPERT_AXES = ("pp", "edp", "ep", "etp")
CONTEXT_AXES = ("pp", "dp", "ring", "heads", "tp")  # cp, by what its ranks exchange
_FAMILIES = (DENSE_AXES, EXPERT_AXES, CONTEXT_AXES)


@dataclass(frozen=True)
class Domain:
    """How one kind of parameters lies on the grid. Ranks that differ only along `data_axes` hold the same parameters
    and get other data; those that differ only along `model_axes` together hold one copy; `tensor_axis` cuts tensors."""

    data_axes: tuple[str, ...]
    model_axes: tuple[str, ...]
    tensor_axis: str


DENSE = Domain(data_axes=("dp", "cp"), model_axes=("pp", "tp"), tensor_axis="tp")
EXPERT = Domain(data_axes=("edp",), model_axes=("pp", "ep", "etp"), tensor_axis="etp")
DOMAINS = (DENSE, EXPERT)


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. `dp` is the number of model replicas times 1/cp. `heads`: how many neighbouring
    context-parallel ranks exchange heads; those that differ in `ring` exchange keys and values."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    heads: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        assert min(self.tp, self.pp, self.dp, self.cp, self.ep, self.etp) >= 1
        assert self.cp % self.heads == 0
        assert (self.dp * self.cp * self.tp) % (self.ep * self.etp) == 0

    @classmethod
    def from_config(cls, config: LayoutConfig, world_size: int) -> Layout:
        """The layout of `world_size` ranks; sizes were checked to divide (`config.check`)."""
        tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        cp, ep = config.context_parallel_size, config.expert_model_parallel_size
        dp = world_size // (tp * pp * cp)
        return cls(
            *(tp, pp, dp, cp, ep, config.expert_tensor_parallel_size or tp),
            heads=heads_exchanged(config),
            sequence_parallel=config.sequence_parallel,
        )

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Copies of each expert: expert data-parallel size."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def ring(self) -> int:
        """Context-parallel ranks that exchange keys and values."""
        return self.cp // self.heads

    @property
    def sequence_parts(self) -> int:
        """Into how many parts the tokens of a context-parallel rank are cut between blocks."""
        return self.tp if self.sequence_parallel else 1

    @property
    def sequence_multiple(self) -> int:
        """What a sequence's length must be a multiple of: each context-parallel rank holds two equal chunks of it."""
        return self.sequence_parts if self.cp == 1 else self.cp * math.lcm(2, self.sequence_parts)

    def size(self, axis: str) -> int:
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index of `rank` along every axis."""
        result: dict[str, int] = {}
        for axes in _FAMILIES:
            rest = rank
            for axis in reversed(axes):
                rest, result[axis] = divmod(rest, self.size(axis))
        return result

    def rank_at(self, **coordinates: int) -> int:
        """The rank at dense coordinates (absent axes are 0)."""
        rank = 0
        for axis in DENSE_AXES:
            rank = rank * self.size(axis) + coordinates.get(axis, 0)
        return rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ only along `axes`, each in rank order; together they hold every rank once."""
        return list(dict.fromkeys(self.group_of(rank, *axes) for rank in range(self.world_size)))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group along `axes` that holds `rank`."""
        families = (each for each in _FAMILIES if set(axes) <= set(each))
        family = next(families, None)
        assert family is not None, f"{axes} aren't axes of one family"
        here, ranks = self.coordinates(rank), [0]
        for axis in family:
            indices = range(self.size(axis)) if axis in axes else (here[axis],)
            ranks = [at * self.size(axis) + index for at in ranks for index in indices]
        return tuple(ranks)
