"""What is updated: contiguous segments of wide parameters, with their gradients.

Key idea: elements that are treated alike lie side by side, so one fused call takes a few long segments. Segments may
live on the host (Ren et al. 2021, ZeRO-Offload): then gradients travel there, and updated parameters back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.distributed.param_spec import Treatment
from megalite.distributed.pieces import Piece
from megalite.optimizer.buckets import ALIGNMENT, Bucket
from megalite.precision.policy import Precision


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `stop` of a bucket's held range.

    `main`: their wide parameters: those of the bucket itself where these are wide and on the same device. Where nothing
    wide is kept, the parameters themselves, on the host a copy. `main.grad`: their main gradients, on the device of
    `main`.
    """

    bucket: Bucket
    treatment: Treatment
    start: int
    stop: int
    on_host: bool
    main: nn.Parameter

    @property
    def parameters(self) -> Tensor:
        """These elements among the bucket's own parameters."""
        return self.bucket.held_params[self.start : self.stop]

    @property
    def bucket_gradient(self) -> Tensor:
        return self.bucket.held_grads[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        assert self.main.grad is not None
        return self.main.grad

    @property
    def in_eight_bits(self) -> bool:
        return self.bucket.in_eight_bits

    @property
    def is_copy(self) -> bool:
        """Whether `main` is apart from the bucket's parameters."""
        return self.main.data_ptr() != self.parameters.data_ptr()

    def pieces(self, flat: Tensor) -> Iterator[Piece]:
        """The parameters' parts of a tensor of this segment's length."""
        return self.bucket.pieces(flat, self.start)


def build_segments(buckets: Iterable[Bucket], precision: Precision, offload: float) -> list[Segment]:
    """Segments of all held ranges; of each bucket the first `offload` share of the elements is on the host: so equal
    buckets, such as those of a tied table's copies, are cut at the same place and updated by the same kernels."""
    segments = []
    for bucket in buckets:
        budget = round((bucket.last - bucket.first) * offload / ALIGNMENT) * ALIGNMENT
        for treatment, start, stop in bucket.treatment_runs():
            border = start + min(budget, stop - start)
            budget -= border - start
            for low, high, on_host in ((start, border, True), (border, stop, False)):
                if low < high:
                    main = _main(bucket, low, high, on_host, precision)
                    segments.append(Segment(bucket, treatment, low, high, on_host, main))
    return segments


def _main(bucket: Bucket, start: int, stop: int, on_host: bool, precision: Precision) -> nn.Parameter:
    """A segment's main parameters and their gradients."""
    parameters, gradient = bucket.held_params[start:stop], bucket.held_grads[start:stop]
    main = parameters
    if on_host:
        pinned = parameters.is_cuda  # copies from pinned memory run beside the device's work
        dtype = precision.wide if precision.states.main_params == "fp32" else parameters.dtype
        main = torch.empty(stop - start, dtype=dtype, pin_memory=pinned).copy_(parameters)
        gradient = torch.empty(stop - start, dtype=gradient.dtype, pin_memory=pinned)
    elif parameters.dtype != precision.wide and precision.states.main_params == "fp32":
        main = parameters.to(precision.wide)
    result = nn.Parameter(main, requires_grad=False)
    result.grad_dtype = None  # any
    result.grad = gradient
    return result
