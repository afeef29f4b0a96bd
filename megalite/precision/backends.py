"""What computes a product of two quantised matrices."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megalite.config.schema import PrecisionConfig
from megalite.precision.scaling import Quantized


class Backend(Protocol):
    """`a` [m, k] times the transpose of `b` [n, k], [m, n] in `dtype`."""

    name: str

    def product(self, a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor: ...


class Emulated:
    """Dequantised and multiplied in the wide dtype of the scales: on any device, in any dtype."""

    name = "emulated"

    def product(self, a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        return (a.dequantize() @ b.dequantize().t()).to(dtype)


def choose(config: PrecisionConfig, device: torch.device) -> tuple[Backend, str]:
    return Emulated(), ""
