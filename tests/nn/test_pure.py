"""Functions that may be compiled: none breaks off, and what compiled code computes is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.nn import cross_entropy, mlp, norm, rotary
from megalite.nn.pure import compiler_problems

X, GRAD = torch.randn(2, 6, 2, 4, 8, dtype=torch.float64)
TABLE = torch.randn(6, 1, 1, 3, dtype=torch.float64), torch.randn(6, 1, 1, 3, dtype=torch.float64)
WEIGHT, SCALE = torch.randn(8, dtype=torch.float64), torch.rand(6, 2, 4, 1, dtype=torch.float64)
LOGITS, TOP = torch.randn(5, 9, dtype=torch.bfloat16), torch.randn(5, 1)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (mlp.gated_silu, (X,)),
        (mlp.gated_silu_gradient, ((True,), GRAD[..., :4], X)),
        (norm.rms_norm, (X, WEIGHT, 1e-5, torch.float64)),
        (norm.rms_norm_gradient, ((True, True), GRAD, X, WEIGHT, SCALE)),
        (norm.rms_norm_gradient, ((True, False), GRAD, X, WEIGHT, SCALE)),
        (rotary.turned, (X, *TABLE, False)),
        (rotary.turned, (X, *TABLE, True)),
        (cross_entropy.exponentials, (LOGITS, TOP, True)),
        (cross_entropy.put_gradient, (LOGITS, torch.rand(5, 9), TOP, torch.ones(()))),
    ],
)
def test_a_function_is_one_graph_with_the_same_results(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    def copies() -> list[Any]:
        return [each.clone() if isinstance(each, Tensor) else each for each in arguments]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs, expected_inputs = copies(), copies()
    torch.testing.assert_close(compiled(*inputs), function(*expected_inputs), equal_nan=True)
    for ours, expected in zip(inputs, expected_inputs, strict=True):
        if isinstance(ours, Tensor):
            torch.testing.assert_close(ours, expected)


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiler_problems(False, "cpu") == []
    assert compiler_problems(True, "cpu") == [
        "--compile needs a C++ compiler, and no-such-compiler isn't there: install one or leave --compile out"
    ]
