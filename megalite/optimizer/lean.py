"""AdamW whose states are held in few bits.

Key idea: an element's update is a function of its gradient, its state and its place. A rank goes through the boxes that
it holds in chunks, so the wide numbers of a few elements exist at a time; random bits for rounding are those of the
element's place in the logical tensor, and a scale follows from the largest magnitude on any rank. So the result depends
on no layout, and a run resumes bit for bit.

The arithmetic is AdamW's (Loshchilov and Hutter 2019) in the wide dtype; moments are used before they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.distributed import random
from megalite.distributed.collectives import all_reduce
from megalite.distributed.mesh import Mesh
from megalite.distributed.param_spec import Box, ParamSpec
from megalite.distributed.pieces import Code, Piece
from megalite.optimizer.segments import Segment
from megalite.precision.policy import Precision
from megalite.precision.states import fitting_scale, state_formats

CHUNK = 1 << 20
"""Elements updated at a time: bounds the temporaries, some ten wide or 64-bit numbers each."""
KINDS = ("main", "exp_avg", "exp_avg_sq")
_BITS = 17  # of the 53 of a hash: a uniform number for each of the three kinds, as fine as fp32 is in bf16


@dataclass(frozen=True)
class _Chunk:
    """Elements `low` to `high` of a segment, which lie side by side in a box of the parameter `number`. `start`: their
    place in its flattened local tensor."""

    segment: Segment
    number: int
    spec: ParamSpec
    box: Box
    start: int
    low: int
    high: int

    def of(self, flat: Tensor) -> Tensor:
        """These of a tensor of the segment's length."""
        return flat[self.low : self.high]

    def places(self) -> Tensor:
        """Where they are in the flattened logical tensor, int64."""
        rest = torch.arange(self.start, self.start + self.high - self.low, device=self.segment.main.device)
        if self.spec.local_shape == self.spec.shape:
            return rest
        places, stride, box = torch.zeros_like(rest), 1, self.box
        dims = zip(self.spec.local_shape, self.spec.shape, box.local_start, box.global_start, strict=True)
        for local, logical, here, there in reversed(list(dims)):
            places += (rest % local + (there - here)) * stride
            rest = rest // local
            stride *= logical
        return places


Values = Callable[[_Chunk], Mapping[str, Tensor]]
"""New wide numbers of a chunk's states, by kind."""


class LeanAdam:
    """Steps all segments of a rank, of either device. Every rank has one: scales are agreed by all. `seed`: of the
    rounding."""

    def __init__(
        self,
        config: OptimizerConfig,
        precision: Precision,
        mesh: Mesh,
        segments: Sequence[Segment],
        names: Sequence[str],
        seed: int,
    ):
        """`names`: of all logical parameters. Collective over the world."""
        self.segments, self.mesh, self._config, self._wide = segments, mesh, config, precision.wide
        self._formats = state_formats(precision.states)
        shown = ("main gradients", "main parameters", "first moments", "second moments")
        lean = [f"{kind} in {name}" for kind, name in zip(shown, precision.states, strict=True) if name != "fp32"]
        self.description = f"torch AdamW, not fused, {', '.join(lean)}"
        self.steps = 0
        self._scaled = [kind for kind, format in self._formats.items() if format is not None and format.scaled]
        self._scales = {kind: [1.0] * len(names) for kind in self._scaled}
        self._numbers = {name: number for number, name in enumerate(names)}
        self._keys = torch.stack([random.fold(seed, "update", name) for name in names] or [random.fold(seed)])
        self._states = {segment.main: self._zeros(segment) for segment in segments}
        self._filled: dict[Tensor, dict[str, Tensor]] = {}
        self._chunks = [chunk for segment in segments for chunk in self._cut(segment)]
        self.loaded(with_state=False)

    def _zeros(self, segment: Segment) -> dict[str, Tensor]:
        """A segment's states besides the main parameters, where these are its own."""
        length, device = segment.stop - segment.start, segment.main.device
        return {
            kind: torch.zeros(length, dtype=self._wide if format is None else format.dtype, device=device)
            for kind, format in self._formats.items()
            if kind != "main" or kind in self._scaled
        }

    def _cut(self, segment: Segment) -> Iterator[_Chunk]:
        flat = torch.empty(segment.stop - segment.start, device="meta")
        for piece in segment.pieces(flat):
            for box, run, start in piece.runs():
                first = int(run.storage_offset())
                for low in range(0, run.numel(), CHUNK):
                    high = min(low + CHUNK, run.numel())
                    number = self._numbers[piece.name]
                    yield _Chunk(segment, number, piece.spec, box, start + low, first + low, first + high)

    def moments(self, segment: Segment) -> dict[str, Tensor]:
        return dict(self._states[segment.main])

    def state(self, segment: Segment, *, to_fill: bool = False) -> Iterator[tuple[str, Piece]]:
        for kind, flat in self._states[segment.main].items():
            scaled = kind in self._scaled
            if scaled and to_fill:
                flat = torch.zeros(len(flat), dtype=self._wide, device=flat.device)
                self._filled.setdefault(segment.main, {})[kind] = flat
            for piece in segment.pieces(flat):
                code = Code(self._wide, partial(self._decode, kind, self._numbers[piece.name]))
                yield kind, piece._replace(code=code) if scaled and not to_fill else piece

    def set_steps(self, steps: int) -> None:
        self.steps = steps

    def loaded(self, *, with_state: bool) -> None:
        if not with_state:
            kinds = [kind for kind in self._scaled if kind == "main"]
            self._write(kinds, lambda chunk: {"main": chunk.of(chunk.segment.main).to(self._wide)})
        else:
            filled = self._filled

            def values(chunk: _Chunk) -> dict[str, Tensor]:
                return {kind: chunk.of(flat) for kind, flat in filled[chunk.segment.main].items()}

            self._write(self._scaled, values)
        self._filled = {}

    @torch.no_grad()
    def step(self, factor: float, rates: Mapping[str, float], weight_decay: float) -> None:
        self.steps += 1

        def values(chunk: _Chunk) -> dict[str, Tensor]:
            treatment = chunk.segment.treatment
            decay = weight_decay if treatment.decays else 0.0
            return self._updated(chunk, factor, rates[treatment.lr_group], decay)

        self._write(KINDS, values)
        for chunk in self._chunks if "main" in self._scaled else ():
            main = self._decode("main", chunk.number, chunk.of(self._stored(chunk.segment, "main")))
            chunk.of(chunk.segment.main.detach()).copy_(main)

    def _updated(self, chunk: _Chunk, factor: float, rate: float, decay: float) -> dict[str, Tensor]:
        beta1, beta2 = self._config.adam_beta1, self._config.adam_beta2
        main, first, second = (
            self._decode(kind, chunk.number, chunk.of(self._stored(chunk.segment, kind))) for kind in KINDS
        )
        gradient = chunk.of(chunk.segment.gradient).to(self._wide) * factor
        first = beta1 * first + (1.0 - beta1) * gradient
        second = beta2 * second + (1.0 - beta2) * gradient.square()
        root = (second / (1.0 - beta2**self.steps)).sqrt() + self._config.adam_eps
        main = (1.0 - rate * decay) * main - rate / (1.0 - beta1**self.steps) * first / root
        return {"main": main, "exp_avg": first, "exp_avg_sq": second}

    def _stored(self, segment: Segment, kind: str) -> Tensor:
        return self._states[segment.main].get(kind, segment.main.detach())

    def _decode(self, kind: str, number: int, stored: Tensor) -> Tensor:
        format = self._formats[kind]
        wide = stored.to(self._wide) if format is None else format.decode(stored, self._wide)
        return wide * self._scales[kind][number] if kind in self._scaled else wide

    @torch.no_grad()
    def _write(self, kinds: Sequence[str], values: Values) -> None:
        """Store new numbers. Collective over the world where any kind is scaled: then `values` is called twice, since
        numbers are rounded only once the scale of the whole parameter is known."""
        scales = self._fit([kind for kind in kinds if kind in self._scaled], values)
        keys, bits = random.fold(self._keys, self.steps), torch.empty(0)
        rounds = any(self._formats[kind] is not None for kind in kinds)
        for chunk in self._chunks if kinds else ():
            new = values(chunk)
            if rounds:
                bits = random.bits(keys[chunk.number], chunk.places())
            for kind in kinds:
                numbers, format = new[kind], self._formats[kind]
                if format is not None:
                    mine = bits >> _BITS * KINDS.index(kind) & (1 << _BITS) - 1
                    scale = scales[kind][chunk.number] if format.scaled else 1.0
                    numbers = format.encode(numbers / scale, mine.to(self._wide) * 2.0**-_BITS)
                chunk.of(self._stored(chunk.segment, kind)).copy_(numbers)
        self._scales |= scales

    def _fit(self, kinds: Sequence[str], values: Values) -> dict[str, list[float]]:
        """The scale of each logical parameter, by kind."""
        if not kinds:
            return {}
        largest = torch.zeros(len(kinds), len(self._keys), dtype=self._wide, device=self.mesh.device)
        for chunk in self._chunks:
            new = values(chunk)
            here = torch.stack([new[kind].abs().max() for kind in kinds]).to(self.mesh.device)
            largest[:, chunk.number] = torch.maximum(largest[:, chunk.number], here)
        all_reduce(largest, self.mesh.world, "max")
        formats = (self._formats[kind] for kind in kinds)
        tops = [format.largest for format in formats if format is not None]
        scales = torch.stack([fitting_scale(row, top) for row, top in zip(largest, tops, strict=True)])
        return dict(zip(kinds, scales.tolist(), strict=True))  # one transfer
