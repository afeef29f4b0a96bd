"""The matrix products of a linear layer, and the number format that they run in.

Key idea: a linear layer is three products: its output, its input's gradient, its weight's gradient. What each is
computed in is decided here; communication, and where results go, is the layer's (`nn.linear`). Inputs and gradients
take part as *factors*, since each is in two products, and what is computed for the first serves the second.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Role = Literal["input", "weight", "gradient"]


class Factor:
    """An input [..., in] or an output's gradient [..., out] of a layer, as its products take it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @property
    def flat(self) -> Tensor:
        """As a matrix [rows, in or out]."""
        return self.tensor.flatten(0, -2)


class Products:
    """Products in the compute dtype, by torch's GEMMs. `matrix` is the weight [out, in]."""

    def factor(self, role: Role, tensor: Tensor) -> Factor:
        """An input or a gradient, whole."""
        return Factor(tensor)

    def keep(self, factor: Factor, part: Tensor) -> tuple[Tensor, ...]:
        """What a later product needs of a factor, of which only `part`, along the first dimension, is to be kept: first
        that part in some form, then what is the same for all parts."""
        return (part,)

    def restore(self, role: Role, tensor: Tensor, *rest: Tensor) -> Factor:
        """The factor again, from what was kept of it, all parts put together."""
        return Factor(tensor)

    def output(self, x: Factor, matrix: Tensor) -> Tensor:
        """x W^T: [..., in] → [..., out]."""
        return F.linear(x.tensor, matrix)

    def add_output(self, total: Tensor, x: Factor, matrix: Tensor) -> None:
        """total [..., out] += x W^T."""
        total.flatten(0, -2).addmm_(x.flat, matrix.t())

    def input_gradient(self, grad: Factor, matrix: Tensor) -> Tensor:
        """grad W: [..., out] → [..., in]."""
        return grad.tensor @ matrix

    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        """grad^T x, [out, in]."""
        return grad.flat.t() @ x.flat

    @torch.no_grad()
    def add_weight_gradient(self, total: Tensor, grad: Factor, x: Factor) -> None:
        """Add the weight's gradient to `total` [out, in], which may be of a wider dtype."""
        dtype = grad.tensor.dtype
        if total.dtype == dtype:
            total.addmm_(grad.flat.t(), x.flat)
        elif grad.tensor.is_cuda:
            torch.addmm(total, grad.flat.t(), x.flat, out_dtype=total.dtype, out=total)
        else:  # a CPU has no GEMM of mixed dtypes: the product of one microbatch is rounded before it is added
            total.add_(self.weight_gradient(grad, x))
