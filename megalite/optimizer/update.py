"""The update itself: contiguous segments of wide parameters, and the fused optimizer that steps them.

Key idea: elements that are treated alike lie side by side, so one fused call per treatment takes a few long segments.
Unscaling and clipping are a factor that the fused kernel applies as it reads the gradients. Segments may live on the
host (Ren et al. 2021, ZeRO-Offload): then gradients travel there, and updated parameters back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megalite.config.schema import OptimizerConfig
from megalite.distributed.pieces import Piece
from megalite.optimizer.buckets import ALIGNMENT, Bucket
from megalite.optimizer.fused import FusedOptimizer, choose_fused
from megalite.precision.policy import Precision


@dataclass
class Segment:
    """Elements `start` to `stop` of a bucket's held range.

    `main`: their wide parameters: those of the bucket itself where these are wide and on the same device. `gradient`:
    their wide gradients, on the device of `main`. `moments`: per-element state by its kind.
    """

    bucket: Bucket
    weight_decay: bool
    lr_group: str
    start: int
    stop: int
    on_host: bool
    main: nn.Parameter
    gradient: Tensor
    moments: dict[str, Tensor] = field(default_factory=dict)

    @property
    def parameters(self) -> Tensor:
        """These elements among the bucket's own parameters."""
        return self.bucket.held_params[self.start : self.stop]

    @property
    def bucket_gradient(self) -> Tensor:
        return self.bucket.held_grads[self.start : self.stop]

    @property
    def is_copy(self) -> bool:
        """Whether `main` is apart from the bucket's parameters."""
        return self.main.data_ptr() != self.parameters.data_ptr()

    def pieces(self, flat: Tensor) -> Iterator[Piece]:
        """The parameters' parts of a tensor of this segment's length."""
        return (piece for _, piece in self.bucket.pieces(flat, self.start))


def build_segments(buckets: Iterable[Bucket], precision: Precision, offload: float) -> list[Segment]:
    """Segments of all held ranges; of each bucket the first `offload` share of the elements is on the host: so equal
    buckets, such as those of a tied table's copies, are cut at the same place and updated by the same kernels."""
    segments = []
    for bucket in buckets:
        budget = round((bucket.last - bucket.first) * offload / ALIGNMENT) * ALIGNMENT
        for treatment, start, stop in bucket.segments():
            border = start + min(budget, stop - start)
            budget -= border - start
            for low, high, on_host in ((start, border, True), (border, stop, False)):
                if low < high:
                    segments.append(_segment(bucket, treatment, low, high, on_host, precision))
    return segments


def _segment(
    bucket: Bucket, treatment: tuple[bool, str], start: int, stop: int, on_host: bool, precision: Precision
) -> Segment:
    parameters, gradient = bucket.held_params[start:stop], bucket.held_grads[start:stop]
    main = parameters
    if on_host:
        pinned = parameters.is_cuda  # copies from pinned memory run beside the device's work
        main = torch.empty(stop - start, dtype=precision.wide, pin_memory=pinned).copy_(parameters)
        gradient = torch.empty(stop - start, dtype=precision.wide, pin_memory=pinned)
    elif precision.needs_main_parameters:
        main = parameters.to(precision.wide)
    return Segment(bucket, *treatment, start, stop, on_host, nn.Parameter(main, requires_grad=False), gradient)


class Updater:
    """Steps the segments. All state exists from the start, so that a checkpoint before the first step is whole."""

    def __init__(self, segments: list[Segment], config: OptimizerConfig, precision: Precision, device: torch.device):
        self.segments, self.precision = segments, precision
        self.steps = 0  # updates taken: Adam's bias correction counts them, on ranks that train nothing too
        self._engines: list[tuple[FusedOptimizer, list[Segment]]] = []
        for on_host in (False, True):
            mine = [segment for segment in segments if segment.on_host == on_host]
            if mine or not on_host:  # a rank that has nothing to step says what would step it
                where = torch.device("cpu") if on_host else device
                groups: dict[tuple[bool, str], list[nn.Parameter]] = {}
                for segment in mine:
                    groups.setdefault((segment.weight_decay, segment.lr_group), []).append(segment.main)
                self._engines.append((choose_fused(config, where, precision.wide, groups), mine))
        for engine, mine in self._engines:
            for segment in mine:
                segment.main.grad = segment.gradient
                segment.moments = engine.moments(segment.main)

    @property
    def description(self) -> str:
        """Which implementation runs, and on how much."""
        used = [engine.description for engine, mine in self._engines if mine] or [self._engines[0][0].description]
        text = f"{' and '.join(dict.fromkeys(used))}, {len(self.segments)} segments"
        hosted = sum(segment.stop - segment.start for segment in self.segments if segment.on_host)
        return text + (f", {hosted:,} elements on the host" if hosted else "")

    @torch.no_grad()
    def step(self, factor: float, rates: dict[str, float], weight_decay: float) -> None:
        """Update with the gradients times `factor`; `rates`: learning rate by learning-rate group. Then round into the
        buckets' parameters."""
        hosted = [segment for segment in self.segments if segment.on_host]
        for segment in hosted:
            segment.gradient.copy_(segment.bucket_gradient, non_blocking=True)
        if hosted and hosted[0].bucket.held_grads.is_cuda:
            torch.cuda.current_stream().synchronize()
        for engine, _ in self._engines:
            engine.step(factor, rates, weight_decay)
        self.steps += 1
        self.publish()

    def publish(self) -> None:
        """Round main parameters into the parameters."""
        for segment in self.segments:
            if segment.is_copy:
                segment.parameters.copy_(segment.main.detach(), non_blocking=True)

    def refresh_main(self) -> None:
        """Take the main parameters from the parameters (after weights were loaded)."""
        for segment in self.segments:
            if segment.is_copy:
                segment.main.detach().copy_(segment.parameters)

    def state_pieces(self) -> Iterator[tuple[str, Piece]]:
        """(kind, piece) of all that a checkpoint needs besides the parameters. Writing into the pieces loads them."""
        for segment in self.segments:
            kinds = dict(segment.moments)
            if self.precision.needs_main_parameters:
                kinds["main"] = segment.main.detach()
            for kind, flat in kinds.items():
                for piece in segment.pieces(flat):
                    yield kind, piece

    def main_pieces(self) -> Iterator[Piece]:
        """The wide parameters."""
        for segment in self.segments:
            yield from segment.pieces(segment.main.detach())

    def set_steps(self, steps: int) -> None:
        """Restore the count of updates."""
        self.steps = steps
        for engine, _ in self._engines:
            engine.set_steps(steps)


def state_bytes(segments: Iterable[Segment]) -> dict[str, int]:
    """Bytes of main parameters and of moments apart from the buckets' own; and what is on the host: of both, and the
    gradients there."""
    sizes = {"main": 0, "moments": 0, "host": 0}
    for segment in segments:
        main = segment.main.nbytes if segment.is_copy else 0
        moments = sum(moment.nbytes for moment in segment.moments.values())
        sizes["main"] += main
        sizes["moments"] += moments
        sizes["host"] += (main + moments + segment.gradient.nbytes) if segment.on_host else 0
    return sizes
