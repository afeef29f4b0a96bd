"""The matrix products of a linear layer, and the number format that they run in.

Key idea: a linear layer is three products: its output, its input's gradient, its weight's gradient. What each is
computed in is decided here; communication, and where results go, is the layer's (`nn.linear`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Products:
    """Products in the compute dtype, by torch's GEMMs. `matrix` is the weight [out, in]."""

    def output(self, x: Tensor, matrix: Tensor) -> Tensor:
        """x W^T: [..., in] → [..., out]."""
        return F.linear(x, matrix)

    def add_output(self, total: Tensor, x: Tensor, matrix: Tensor) -> None:
        """total [..., out] += x W^T."""
        total.flatten(0, -2).addmm_(x.flatten(0, -2), matrix.t())

    def input_gradient(self, grad: Tensor, matrix: Tensor) -> Tensor:
        """grad W: [..., out] → [..., in]."""
        return grad @ matrix

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """grad^T x, [out, in], for `grad` [..., out] and `x` [..., in]."""
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)

    @torch.no_grad()
    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add the weight's gradient to `total` [out, in], which may be of a wider dtype."""
        flat_grad, flat_x = grad.flatten(0, -2), x.flatten(0, -2)
        if total.dtype == grad.dtype:
            total.addmm_(flat_grad.t(), flat_x)
        elif grad.is_cuda:
            torch.addmm(total, flat_grad.t(), flat_x, out_dtype=total.dtype, out=total)
        else:  # a CPU has no GEMM of mixed dtypes: the product of one microbatch is rounded before it is added
            total.add_(self.weight_gradient(grad, x))
