"""The optimizer: one fused update over contiguous segments of wide parameters, sharded or not.

Key idea: gradients arrive in buckets with their final meaning (of the loss summed over the global batch, divided by its
tokens, times the loss scale), so all that is left is sum, norm, clip, update, round, gather. Whether a step is taken is
decided from one global number that every rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megalite.config.schema import OptimizerConfig
from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import Piece, whole
from megalite.optimizer.buckets import build_buckets
from megalite.optimizer.copies import CopySums
from megalite.optimizer.gathering import UnitGatherer, WholeGatherer
from megalite.optimizer.gradient_norm import OwnedViews, combine, global_names
from megalite.optimizer.reduction import GradientReducer, Recorder
from megalite.optimizer.sharding import Sharding, Unit
from megalite.optimizer.transport import Transport
from megalite.optimizer.update import Updater, build_segments, state_bytes
from megalite.precision.policy import Precision


@dataclass(frozen=True)
class StepResult:
    """`grad_norm`: of the unscaled gradients, before clipping. `finite`: whether it, and so every gradient, is."""

    grad_norm: float
    finite: bool


class Optimizer:
    """The optimizer of one rank's parameters. Layers put their gradients into its buckets from here on.

    A step: `begin_step`; forwards and backwards, each announced; `reduce_gradients`; `measure`; `step`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: Mesh,
        precision: Precision,
        config: OptimizerConfig,
        sharding: Sharding | None = None,
        transport: Transport | None = None,
    ):
        """`transport`: for the data-parallel collectives; default: over the mesh's groups."""
        self.config, self.mesh, self.precision = config, mesh, precision
        self.sharding = how = sharding or Sharding()
        self.buckets = build_buckets(units, mesh, precision, how)
        self.names = global_names(self.buckets, mesh)
        self.transport = transport or Transport(mesh.dp_cp)
        self.reducer = GradientReducer(self.buckets, self.transport if mesh.dp_cp.size > 1 else None, how, precision)
        self.gatherer: WholeGatherer | UnitGatherer | None = None
        if how.parameters:
            self.gatherer = UnitGatherer(self.buckets, self.transport, units, how)
        elif how.state:
            self.gatherer = WholeGatherer(self.buckets, self.transport, units, how)
        self.copies = CopySums(self.buckets, mesh)
        self.updater = Updater(build_segments(self.buckets, precision, how.offload), config, precision, mesh.device)
        self._gradients = OwnedViews(self.gradient_pieces(), self.names, mesh, sharded=how.state)
        self._main = OwnedViews(self.updater.main_pieces(), self.names, mesh, sharded=how.state)

    @property
    def description(self) -> str:
        """Which implementation runs, for the block before step one."""
        return self.updater.description

    def record(self, recorder: Recorder) -> None:
        """Tell `recorder` of every data-parallel collective."""
        self.reducer.recorder = recorder
        if self.gatherer is not None:
            self.gatherer.recorder = recorder

    def begin_step(self, microbatches: int) -> None:
        """Clear the main gradients before a step's first backward."""
        self.reducer.begin(microbatches)

    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank keeps between steps: `parameters`, main `gradients`, `main` parameters, `moments`; and
        what of these is on the `host`."""
        parameters = sum((b.held_params if self.sharding.parameters else b.params).nbytes for b in self.buckets)
        gradients = sum((b.held_grads if b.grads is None else b.grads).nbytes for b in self.buckets)
        return {"parameters": parameters, "gradients": gradients, **state_bytes(self.updater.segments)}

    def forward_begins(self) -> None:
        """A chunk is about to run forward."""
        if isinstance(self.gatherer, UnitGatherer):
            self.gatherer.forward_begins()

    def backward_begins(self) -> None:
        """A chunk is about to run backward."""
        if isinstance(self.gatherer, UnitGatherer):
            self.gatherer.backward_begins()

    def backward_ended(self, chunk: int) -> None:
        """A microbatch's gradients of this chunk are all in. Collective over the data-parallel ranks."""
        self.reducer.flush(chunk)

    def reduce_gradients(self) -> None:
        """Sum gradients over the ranks that hold the same parameters, then over partial copies. Collective."""
        self.reducer.finish()
        self.copies.reduce()

    def gradient_pieces(self) -> Iterator[Piece]:
        """The main gradients held here, complete after `reduce_gradients`."""
        for bucket in self.buckets:
            for _, piece in bucket.pieces(bucket.held_grads):
                yield piece

    def parameter_pieces(self) -> dict[str, Piece]:
        """The trainable parameters held here, in the compute dtype, by global name. Collective: gathers are awaited."""
        self.settle()
        pieces: dict[str, Piece] = {}
        for bucket in self.buckets:
            if self.sharding.parameters:
                pieces |= {slot.name: piece for slot, piece in bucket.pieces(bucket.held_params)}
            else:
                pieces |= {slot.name: whole(slot.name, slot.view(bucket.params), slot.spec) for slot in bucket.slots}
        return pieces

    def gradient_norms(self, scale: float) -> dict[str, float]:
        """Norm of every logical parameter's gradient divided by `scale`. Collective."""
        squares = self._gradients.squares()
        return {name: math.sqrt(value) / scale for name, value in zip(self.names, squares, strict=True)}

    def parameter_norm(self) -> float:
        """Norm of all logical parameters. Collective."""
        return combine(self._main.squares())

    def count_zeros(self) -> int:
        """Elements of all logical gradients that are exactly zero. Collective."""
        return self._gradients.zeros()

    def measure(self, loss_scale: float) -> StepResult:
        """The norm of the reduced gradients. Collective, equal on all ranks.

        Outside float64 it is rounded once to float32; that value is logged and used to clip.
        """
        norm = combine(self._gradients.squares()) / loss_scale
        if self.precision.wide != torch.float64:
            norm = torch.tensor(norm, dtype=self.precision.wide).item()
        if not self.sharding.state:  # replicas summed apart, perhaps in another order: the first one's is taken
            mine = norm if self.mesh.dp_cp.rank == 0 else 0.0
            told = torch.tensor(mine, dtype=torch.float64, device=self.mesh.device)
            norm = all_reduce(told, self.mesh.dp_cp).item()
        return StepResult(norm, math.isfinite(norm))

    def step(
        self, result: StepResult, *, lr: float, decoupled_lr: float, weight_decay: float, loss_scale: float
    ) -> None:
        """Unscale, clip to `--clip-grad`, update, round into the parameters, gather. Gradients must be finite."""
        factor = 1.0 / loss_scale
        limit = self.config.clip_grad
        if limit > 0.0:
            factor *= min(1.0, limit / (result.grad_norm + 1e-6))
        self.updater.step(factor, {"default": lr, "decoupled": decoupled_lr}, weight_decay)
        if self.gatherer is not None:
            self.gatherer.updated()

    def settle(self) -> None:
        """Wait for gathers under way, so that parameters may be read from outside the model's forward."""
        if self.gatherer is not None:
            self.gatherer.settle()

    def parameters_loaded(self, *, with_state: bool) -> None:
        """Call after parameters, or pieces of them, were changed from outside. `with_state`: so were main parameters,
        where there are any beside the parameters."""
        if not (with_state and self.precision.needs_main_parameters):
            self.updater.refresh_main()
        if isinstance(self.gatherer, UnitGatherer):
            self.gatherer.updated()

    def named_state(self) -> Iterator[tuple[str, Piece]]:
        """(`kind.parameter name`, piece) of all that a checkpoint needs besides the parameters. Several pieces may be
        of one parameter. Writing into them loads them."""
        for kind, piece in self.updater.state_pieces():
            yield f"{kind}.{piece.name}", piece

    @property
    def steps(self) -> int:
        """Updates taken."""
        return self.updater.steps

    def set_steps(self, steps: int) -> None:
        """Restore the count of updates."""
        self.updater.set_steps(steps)
