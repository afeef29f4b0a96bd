"""The fused kernels: which is chosen, and that the libraries' are called as their sources want it.

Neither NVIDIA Apex nor Transformer Engine runs on a CPU: here a stand-in with the signature of the real class checks
each call by binding it; where a library imports, the real class is bound as well.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megalite.config.schema import OptimizerConfig, RunConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.param_spec import NO_DECAY, Treatment
from megalite.optimizer.fused import LIBRARIES, LibraryAdam, TorchFused, build_engines, check_adam_backend
from megalite.optimizer.segments import Segment
from tests.helpers import FP32

CPU = torch.device("cpu")


def _apex_init(
    self: Any, params: Any, lr: Any = 1e-3, bias_correction: Any = True, betas: Any = (0.9, 0.999), eps: Any = 1e-8,
    adam_w_mode: Any = True, weight_decay: Any = 0.0, amsgrad: Any = False, set_grad_none: Any = True,
    capturable: Any = False, use_master: Any = False,
) -> None: ...  # fmt: skip


def _apex_step(
    self: Any, closure: Any = None, grads: Any = None, output_params: Any = None, scale: Any = None,
    grad_norms: Any = None, grad_scaler: Any = None,
) -> None: ...  # fmt: skip


def _te_init(
    self: Any, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), eps: Any = 1e-8, weight_decay: Any = 0.0,
    amsgrad: Any = False, *, bias_correction: Any = True, adam_w_mode: Any = True, capturable: Any = False,
    master_weights: Any = False, master_weight_dtype: Any = None, exp_avg_dtype: Any = None,
    exp_avg_sq_dtype: Any = None, use_decoupled_grad: Any = False, store_param_remainders: Any = False,
    set_grad_none: Any = None,
) -> None: ...  # fmt: skip


def _te_step(self: Any, closure: Any = None, grad_scaler: Any = None) -> None: ...


SIGNATURES = {"apex": (_apex_init, _apex_step), "te": (_te_init, _te_step)}


def stand_in(init: Callable[..., None], step: Callable[..., None]) -> type:
    """A class that takes only the calls that `init` and `step` take, keeps the count of updates in its groups as both
    libraries do, and computes AdamW with torch."""

    class FusedAdam(torch.optim.AdamW):
        def __init__(self, *args: Any, **kwargs: Any):
            bound = inspect.signature(init).bind(self, *args, **kwargs).arguments
            assert bound["adam_w_mode"] and bound["bias_correction"]
            kept = {name: bound[name] for name in ("lr", "betas", "eps", "weight_decay")}
            super().__init__(bound["params"], **kept, foreach=False)

        def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            inspect.signature(step).bind(self, *args, **kwargs)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["step"] = torch.tensor(float(group["step"]))
                group["step"] += 1
            super().step()

    return FusedAdam


def segments(seed: int) -> list[Segment]:
    """Of three treatments, without a bucket."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for treatment, sizes in ((Treatment(), (256, 128)), (NO_DECAY, (128,)), (Treatment(lr_group="decoupled"), (64,))):
        for size in sizes:
            main = nn.Parameter(torch.randn(size, generator=generator))
            main.grad = torch.zeros(size)
            result.append(Segment(None, treatment, 0, size, False, main))  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize("library", SIGNATURES)
def test_a_librarys_adam_is_called_as_it_wants_and_computes_what_torchs_does(library: str) -> None:
    config = OptimizerConfig(adam_beta2=0.95)
    ours, theirs = segments(1), segments(1)
    torchs = TorchFused(config, CPU, torch.float32, ours)
    librarys = LibraryAdam(stand_in(*SIGNATURES[library]), library, config, theirs)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.gradient.copy_(torch.randn(a.main.shape, generator=generator))
            b.gradient.copy_(a.gradient)
        for engine in (torchs, librarys):
            engine.step(0.5, {"default": 1e-2, "decoupled": 1e-3}, 0.1)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.main, b.main, atol=1e-6)
        assert librarys.moments(b).keys() == torchs.moments(a).keys()
        assert torch.allclose(torchs.moments(a)["exp_avg"], librarys.moments(b)["exp_avg"], atol=1e-6)


@pytest.mark.parametrize("library", SIGNATURES)
def test_a_rank_without_segments_makes_a_librarys_adam_and_steps(library: str) -> None:
    engine = LibraryAdam(stand_in(*SIGNATURES[library]), library, OptimizerConfig(), [])
    engine.set_steps(3)
    engine.step(1.0, {"default": 1.0}, 0.1)


@pytest.mark.parametrize("library", SIGNATURES)
def test_the_recorded_signatures_are_those_of_an_installed_library(library: str) -> None:
    real = pytest.importorskip(LIBRARIES[library][1], exc_type=ImportError).FusedAdam
    init, step = SIGNATURES[library]
    for ours, theirs in ((init, real.__init__), (step, real.step)):
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def _install(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    """Stand-ins for both libraries' modules."""
    for _, module in LIBRARIES.values():
        for name in (module.partition(".")[0], module):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[module]).update(attributes)


@pytest.mark.parametrize("device", ["cpu", "cuda"], ids=["on a CPU", "on a GPU"])
@pytest.mark.parametrize("backend", ["torch", *LIBRARIES])
def test_what_is_asked_for_updates_and_torchs_own_is_the_default(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = next(iter(LIBRARIES)) if backend == "torch" else backend
    _install(monkeypatch, FusedAdam=stand_in(*SIGNATURES[library]))
    config = RunConfig() if backend == "torch" else RunConfig(optimizer=OptimizerConfig(adam_backend=backend))
    assert check_adam_backend(config, "cuda") == []
    (engine,) = build_engines(config.optimizer, FP32, single_process_mesh(device), segments(0))
    assert engine.description == ("torch AdamW, fused" if backend == "torch" else f"{LIBRARIES[backend][0]} FusedAdam")


@pytest.mark.parametrize(
    ("changes", "device", "word"),
    [
        ({"optimizer": "sgd"}, "cuda", "--optimizer sgd"),
        ({"optimizer_cpu_offload": True}, "cuda", "--optimizer-cpu-offload"),
        ({"fp64": True}, "cuda", "--fp64"),
        ({}, "cpu", "cpu"),
        ({}, "cuda", "can't be imported"),  # another project called apex has no such class
    ],
)
def test_a_librarys_adam_that_cannot_be_used_is_refused_with_the_reason(
    changes: dict[str, Any], device: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(monkeypatch)
    config = RunConfig(optimizer=OptimizerConfig(adam_backend="apex"))
    for name, value in changes.items():
        setattr(config.precision if name == "fp64" else config.optimizer, name, value)
    (problem,) = check_adam_backend(config, device)
    assert problem.startswith("--adam-backend apex") and word in problem


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_factor_is_as_good_as_gradients_multiplied_by_it(kind: str, wide: torch.dtype) -> None:
    ours, plain = segments(3), segments(3)
    for given, gradient, factor in ((ours, 1.0, 1 / 3), (plain, 1 / 3, 1.0)):
        for segment in given:
            segment.gradient.fill_(gradient)
        engine = TorchFused(OptimizerConfig(optimizer=kind), CPU, wide, given)
        engine.step(factor, {"default": 1e-2, "decoupled": 1e-2}, 0.0)
    assert all(torch.allclose(a.main, b.main, rtol=1e-6) for a, b in zip(ours, plain, strict=True))
