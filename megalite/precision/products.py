"""The matrix products of a linear layer, and the number format that they run in.

Key idea: a linear layer is three products: its output, its input's gradient, its weight's gradient. What each is
computed in is decided here; communication, and where results go, is the layer's (`nn.linear`). Inputs and gradients
take part as *factors*, since each is in two products, and what is computed for the first serves the second.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def grouped_output(self, x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
        """x W^T with a matrix of `matrices` [groups, out, in] for each group of rows: [n, in] → [n, out], where so many
        rows (`counts`) after one another are of a group."""
        if _is_grouped_by_torch(x, *matrices.shape[1:]):
            return torch._grouped_mm(x, matrices.transpose(1, 2), offs=_ends(counts, x.device))
        result = x.new_empty(x.shape[0], matrices.shape[1])
        for part, matrix, rows in zip(result.split(counts), matrices, x.split(counts), strict=True):
            torch.mm(rows, matrix.t(), out=part)
        return result

    def grouped_input_gradient(self, grad: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
        """grad W: [n, out] → [n, in]."""
        return self.grouped_output(grad, matrices.transpose(1, 2), counts)

    @torch.no_grad()
    def add_grouped_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        """Add the matrices' gradients to `total` [groups, out, in], which may be of a wider dtype."""
        if _is_grouped_by_torch(x, *total.shape[1:]):
            total.add_(torch._grouped_mm(grad.t(), x, offs=_ends(counts, x.device)))
            return
        for part, of_grad, of_x in zip(total, grad.split(counts), x.split(counts), strict=True):
            if len(of_x):
                self.add_weight_gradient(part, Factor(of_grad), Factor(of_x))


def _is_grouped_by_torch(x: Tensor, *widths: int) -> bool:
    """Whether one kernel takes all groups: it wants rows of whole 16 bytes. On a CPU it is a loop as well."""
    return x.is_cuda and x.dtype == torch.bfloat16 and all(width * x.element_size() % 16 == 0 for width in widths)


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, dtype=torch.int64).cumsum(0).to(device, torch.int32, non_blocking=True)
