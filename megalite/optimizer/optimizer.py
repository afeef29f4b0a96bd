"""The optimizer: one fused update over contiguous segments of wide parameters, sharded or not.

Key idea: gradients arrive in buckets with their final meaning (of the loss summed over the global batch, divided by its
tokens, times the loss scale), so all that is left is sum, norm, clip, update, round, gather. Whether a step is taken is
decided from one global number that every rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from megalite.config.schema import OptimizerConfig
from megalite.distributed.layout import DOMAINS
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import Piece, whole
from megalite.optimizer.buckets import build_buckets
from megalite.optimizer.copies import CopySums
from megalite.optimizer.fused import build_engines
from megalite.optimizer.gathering import UnitGatherer, WholeGatherer
from megalite.optimizer.gradient_norm import OwnedViews, combine, global_names
from megalite.optimizer.reduction import GradientReducer, Recorder
from megalite.optimizer.segments import build_segments
from megalite.optimizer.sharding import Sharding, Unit
from megalite.optimizer.transport import Transport
from megalite.precision.fp8 import Fp8Scaling
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
        scaling: Fp8Scaling | None = None,
        seed: int = 0,
    ):
        """`transport`: for the data-parallel collectives, in place of the plain one. `scaling`: of the layers in eight
        bits. `seed`: of random rounding."""
        self.config, self.mesh, self.precision = config, mesh, precision
        self.sharding = sharding = sharding or Sharding()
        self.buckets = build_buckets(units, mesh, precision, sharding)
        self.names = global_names(self.buckets, mesh)
        self._trained = {slot.name for bucket in self.buckets for slot in bucket.slots}
        self.transport, self.scaling = transport or Transport(), scaling or Fp8Scaling({}, mesh)
        self.reducer = GradientReducer(self.buckets, units, self.transport, precision, sharding)
        kind = UnitGatherer if sharding.parameters else WholeGatherer
        self.gatherer: WholeGatherer | UnitGatherer = kind(self.buckets, self.transport, units, sharding)
        self.copies = [CopySums(self.buckets, mesh, domain) for domain in DOMAINS]
        self.segments = build_segments(self.buckets, precision, sharding.offload)
        self.engines = build_engines(config, precision, mesh, self.segments, self.names, seed)
        self.steps = 0  # updates taken: Adam's bias correction counts them, on ranks that train nothing too
        self._gradients = OwnedViews(self.gradient_pieces(), self.names, mesh, precision.wide)
        main_pieces = (piece for segment in self.segments for piece in segment.pieces(segment.main.detach()))
        self._main = OwnedViews(main_pieces, self.names, mesh, precision.wide)

    @property
    def description(self) -> str:
        """Which implementation runs and on how much, for the block before step one."""
        used = dict.fromkeys(engine.description for engine in self.engines)
        text = f"{' and '.join(used)}, {len(self.segments)} segments"
        hosted = sum(segment.stop - segment.start for segment in self.segments if segment.on_host)
        return text + (f", {hosted:,} elements on the host" if hosted else "")

    def record(self, recorder: Recorder) -> None:
        """Tell `recorder` of every data-parallel collective."""
        self.reducer.recorder = self.gatherer.recorder = recorder

    def begin_step(self, microbatches: int) -> None:
        """Clear the main gradients before a step's first backward."""
        self.reducer.begin(microbatches)

    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank keeps between steps: `parameters`, main `gradients`, `main` parameters, `moments`; and
        what of these is on the `host`. Main parameters that are the parameters themselves don't count."""
        parameters = sum((b.held_params if b.sharding.parameters else b.params).nbytes for b in self.buckets)
        gradients = sum((b.held_grads if b.grads is None else b.grads).nbytes for b in self.buckets)
        sizes = {"parameters": parameters, "gradients": gradients, "main": 0, "moments": 0, "host": 0}
        for engine in self.engines:
            for segment in engine.segments:
                state = {kind: flat.nbytes for kind, flat in engine.moments(segment).items()}
                main = state.pop("main", 0) + (segment.main.nbytes if segment.is_copy else 0)
                moments = sum(state.values())
                sizes["main"] += main
                sizes["moments"] += moments
                sizes["host"] += (main + moments + segment.gradient.nbytes) if segment.on_host else 0
        return sizes

    def forward_begins(self) -> None:
        """A chunk is about to run forward."""
        self.gatherer.in_backward = False

    def backward_begins(self) -> None:
        """A chunk is about to run backward."""
        self.gatherer.in_backward = True

    def backward_ended(self, chunk: int) -> None:
        """A microbatch's gradients of this chunk are all in. Collective over the data-parallel ranks."""
        self.reducer.backward_ended(chunk)

    def reduce_gradients(self) -> None:
        """Sum gradients over the ranks that hold the same parameters, then over partial copies. Collective."""
        self.reducer.finish()
        for copies in self.copies:
            copies.reduce()

    def gradient_pieces(self) -> Iterator[Piece]:
        """The main gradients held here, complete after `reduce_gradients`."""
        for bucket in self.buckets:
            yield from bucket.pieces(bucket.held_grads)

    def parameter_pieces(self) -> dict[str, Piece]:
        """The trainable parameters held here, in the compute dtype, by global name; of those stored in eight bits the
        main parameters. Collective: gathers are awaited."""
        self.finish_gathers()
        pieces: dict[str, Piece] = {}
        for segment in self.segments:
            if segment.in_eight_bits:
                pieces |= {piece.name: piece for piece in segment.pieces(segment.main.detach())}
        for bucket in self.buckets:
            if bucket.in_eight_bits:
                continue
            if bucket.sharding.parameters:
                pieces |= {piece.name: piece for piece in bucket.pieces(bucket.held_params)}
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
        return StepResult(norm, math.isfinite(norm))

    @torch.no_grad()
    def step(
        self, result: StepResult, *, lr: float, decoupled_lr: float, weight_decay: float, loss_scale: float
    ) -> None:
        """Unscale, clip to `--clip-grad`, update, round into the parameters, gather. Gradients must be finite."""
        factor = 1.0 / loss_scale
        limit = self.config.clip_grad
        if limit > 0.0:
            factor *= min(1.0, limit / (result.grad_norm + 1e-6))
        hosted = [segment for segment in self.segments if segment.on_host]
        for segment in hosted:
            segment.gradient.copy_(segment.bucket_gradient, non_blocking=True)
        if hosted and self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        for engine in self.engines:
            engine.step(factor, {"default": lr, "decoupled": decoupled_lr}, weight_decay)
        self.steps += 1
        self._round()
        self.gatherer.updated()

    def _round(self) -> None:
        """Main parameters into those that layers use, where these are others."""
        for segment in self.segments:
            if segment.is_copy and not segment.in_eight_bits:
                segment.parameters.copy_(segment.main.detach(), non_blocking=True)
        self._round_to_eight_bits(self._trained)

    def _round_to_eight_bits(self, changed: Collection[str] | None = None) -> None:
        """`changed`: names of the parameters that have other values; None: any may."""
        self.scaling.parameters_changed(self.scaling.layers if changed is None else changed)
        pieces = []
        for segment in self.segments:
            if segment.in_eight_bits:
                pairs = zip(segment.pieces(segment.main.detach()), segment.pieces(segment.parameters), strict=True)
                pieces += [(main.name, main.flat, rounded.flat) for main, rounded in pairs]
        self.scaling.store_weights(pieces)

    def finish_gathers(self) -> None:
        """Wait for gathers under way, so that parameters may be read from outside the model's forward."""
        self.gatherer.finish()

    def parameters_loaded(self, *, with_state: bool) -> None:
        """Call after parameters, or pieces of them, were changed from outside. `with_state`: so were main parameters,
        where there are any beside the parameters."""
        if not (with_state and self.precision.needs_main_parameters):
            for segment in self.segments:
                if segment.is_copy and not segment.in_eight_bits:
                    segment.main.detach().copy_(segment.parameters)
        for engine in self.engines:
            engine.loaded(with_state=with_state)
        self._round_to_eight_bits()
        self.gatherer.parameters_changed()

    def named_state(self, *, to_fill: bool = False) -> Iterator[tuple[str, Piece]]:
        """(`kind.parameter name`, piece) of all that a checkpoint needs besides the parameters. Several pieces may be
        of one parameter. `to_fill`: to be loaded by writing into them, and then `parameters_loaded`."""
        for engine in self.engines:
            for segment in engine.segments:
                for kind, piece in engine.state(segment, to_fill=to_fill):
                    yield f"{kind}.{piece.name}", piece
                filled_as_parameters = to_fill and segment.in_eight_bits
                if self.precision.needs_main_parameters and not filled_as_parameters:
                    for piece in segment.pieces(segment.main.detach()):
                        yield f"main.{piece.name}", piece

    def set_steps(self, steps: int) -> None:
        """Restore the count of updates."""
        self.steps = steps
        for engine in self.engines:
            engine.set_steps(steps)
