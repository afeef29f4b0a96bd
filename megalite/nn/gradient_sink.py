"""Where a layer puts the gradient of a weight.

Key idea: a layer adds a weight's gradient straight to a wide tensor that it doesn't own. `parameter.gradient_sink`, set
by the optimizer's buckets, says which; asking only when the gradient is there lets that tensor exist only then, and
telling when it's in lets its reduction start. Without a sink the layer returns its gradient to autograd as usual.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GradientSink(Protocol):
    """Takes one parameter's gradients."""

    def target(self) -> Tensor:
        """The wide tensor of the parameter's local shape to add a contribution to."""
        ...

    def arrived(self) -> None:
        """One contribution has been added."""
        ...


def sink_of(parameter: Tensor) -> GradientSink | None:
    """The sink of a parameter, where it has one."""
    sink: GradientSink | None = getattr(parameter, "gradient_sink", None)
    return sink
