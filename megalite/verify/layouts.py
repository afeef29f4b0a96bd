"""The layouts of a proof matrix."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle

from megalite.config.schema import RunConfig

_SIZES = ("TP", "PP", "VPP", "DP", "CP", "EP")


@dataclass(frozen=True)
class Variant:
    """One way to run a model."""

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    chunks: int = 1
    dp: int = 1
    schedule: str = "auto"
    recompute: str | None = None
    sharding: str = "no_shard"
    cp: int = 1
    exchange: str = "p2p"
    ep: int = 1
    etp: int | None = None

    @property
    def processes(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        parts = [f"TP {self.tp}" + (" + SP" if self.sequence_parallel else ""), f"PP {self.pp}"]
        if self.chunks > 1:
            parts.append(f"VPP {self.chunks}")
        parts.append(f"DP {self.dp}")
        if self.cp > 1:
            parts.append(f"CP {self.cp} {self.exchange}")
        if self.ep > 1 or self.etp is not None:
            parts.append(f"EP {self.ep}" + ("" if self.etp is None else f" x ETP {self.etp}"))
        if self.pp > 1:
            parts.append(self.schedule)
        if self.sharding != "no_shard":
            parts.append(f"shards {self.sharding}")
        if self.recompute:
            parts.append(f"recompute {self.recompute}")
        sizes = [part for part in parts if part.split()[0] in _SIZES]
        return " x ".join(sizes) + "".join(f", {part}" for part in parts if part not in sizes)

    def apply(self, config: RunConfig) -> RunConfig:
        """The configuration (as given, unresolved) in this layout."""
        config = copy.deepcopy(config)
        layout, training = config.layout, config.training
        layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size = self.tp, self.pp
        layout.context_parallel_size, layout.cp_comm_type = self.cp, [self.exchange]
        layout.hierarchical_context_parallel_sizes = [2, self.cp // 2] if self.exchange == "a2a+p2p" else None
        layout.expert_model_parallel_size, layout.expert_tensor_parallel_size = self.ep, self.etp
        layout.sequence_parallel = self.sequence_parallel
        layout.num_layers_per_virtual_pipeline_stage = None
        layout.num_virtual_stages_per_pipeline_rank = self.chunks if self.chunks > 1 else None
        layout.pipeline_schedule = self.schedule
        layout.use_distributed_optimizer, layout.data_parallel_sharding_strategy = False, self.sharding
        layout.overlap_grad_reduce = layout.overlap_param_gather = self.sharding != "no_shard"
        config.precision.fp8_param_gather &= self.sharding != "no_shard"  # which gathers nothing
        training.recompute_granularity = self.recompute
        if self.recompute == "full":
            training.recompute_method, training.recompute_num_layers = "uniform", 1
        return config


SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")


EXCHANGES = {1: ("p2p",), 2: ("p2p", "all_gather", "a2a"), 4: ("p2p", "all_gather", "a2a", "a2a+p2p")}
"""What so many context-parallel ranks can exchange."""


def variants(
    processes: int,
    recompute: tuple[str | None, ...] = (None,),
    shardings: tuple[str, ...] = ("no_shard",),
    contexts: tuple[int, ...] = (1,),
) -> Iterator[Variant]:
    """All layouts of up to `processes` processes: TP and PP in 1, 2, 4, DP in 1, 2, sequence parallelism, every
    schedule; with DP 2 each of `shardings`; CP in `contexts`, with what these ranks exchange by turns."""
    for cp in contexts:
        turns = cycle(EXCHANGES[cp])
        for variant in _variants(processes // cp, recompute, shardings):
            exchange = "p2p" if variant.tp == 4 else next(turns)  # with a head or two there is nothing to exchange
            exchange = "p2p" if variant.tp == 2 and cp == 4 and exchange == "a2a" else exchange
            yield replace(variant, cp=cp, exchange=exchange)


def with_experts(layouts: Iterable[Variant]) -> Iterator[Variant]:
    """Those that a model with eight experts can have, on each grid of up to four expert-parallel ranks by turns."""
    turns: dict[int, Iterator[tuple[int, int | None]]] = {}
    for variant in layouts:
        if variant.tp > 1 and not variant.sequence_parallel:
            continue
        ranks = variant.tp * variant.dp * variant.cp
        if ranks not in turns:
            grids = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2) if ranks % (ep * etp) == 0]
            turns[ranks] = cycle([*grids[1:], grids[0]])
        ep, etp = next(turns[ranks])
        yield replace(variant, ep=ep, etp=etp)


def _variants(processes: int, recompute: tuple[str | None, ...], shardings: tuple[str, ...]) -> Iterator[Variant]:
    for tp in (1, 2, 4):
        for sequence_parallel in (False, True) if tp > 1 else (False,):
            for pp in (1, 2, 4):
                for chunks, schedule in _schedules(pp):
                    for dp in (1, 2):
                        for what in recompute:
                            if what == "full" and schedule == "zb-h1":  # refused: it would save nothing
                                continue
                            for sharding in shardings if dp > 1 else ("no_shard",):
                                variant = Variant(tp, sequence_parallel, pp, chunks, dp, schedule, what, sharding)
                                if variant.processes <= processes:
                                    yield variant


def _schedules(pp: int) -> list[tuple[int, str]]:
    if pp == 1:
        return [(1, "auto")]
    return [(1, "gpipe"), (1, "1f1b"), (1, "zb-h1"), (2, "interleaved")]
