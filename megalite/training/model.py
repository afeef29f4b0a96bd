"""The model that a run trains: this rank's chunks of it, what is trained beside frozen weights, and the optimizer.

Key idea: a checkpoint is of this, and a proof or a planner needs no more to know what a rank holds and does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor, nn

from megalite.config.schema import RunConfig
from megalite.distributed.layout import DOMAINS
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import Code, Piece, whole
from megalite.estimate.model import AdapterWork, training_flops_per_token
from megalite.models.gpt import GPTStage, units_of
from megalite.models.stages import stage_spans
from megalite.nn.attention_backend import AttentionBackend
from megalite.nn.linear import ParallelLinear
from megalite.nn.module import Build, initialize_pieces, specs_of
from megalite.nn.moe.balance import LoadBalance
from megalite.nn.moe.router import Router
from megalite.nn.recompute import Recompute
from megalite.optimizer.optimizer import Optimizer
from megalite.optimizer.sharding import Sharding
from megalite.optimizer.transport import Transport
from megalite.peft.adapter import AdapterPlan, plan_adapter
from megalite.precision.fp8 import Fp8, Fp8Products, Fp8Scaling
from megalite.precision.policy import Precision
from megalite.training.base_model import base_names


@dataclass
class TrainedModel:
    """`vocab_size`: ids that it has rows for. `classes`: a classifier's, in order. `adapter`: None where all is
    trained. `base_names`: parameters whose values come from the folder of `--load-hf`."""

    config: RunConfig
    mesh: Mesh
    precision: Precision
    vocab_size: int
    classes: Sequence[str] | None
    stages: list[GPTStage]
    adapter: AdapterPlan | None
    optimizer: Optimizer
    scaling: Fp8Scaling
    balance: LoadBalance
    base_names: set[str]

    def entries(self, *, state: bool, frozen: bool, to_fill: bool = False) -> Iterator[Piece]:
        """What a checkpoint holds as tensors; `state`: with the optimizer's; `frozen`: with weights that aren't
        trained; `to_fill`: to be loaded by writing into them."""
        trained = self.optimizer.parameter_pieces()
        for name, parameter, spec in specs_of(self.stages):
            piece = trained.get(name)
            if piece is None and frozen and not parameter.requires_grad:
                piece = whole(name, parameter, spec)
            if piece is None:  # all of a sharded parameter is elsewhere
                continue
            if piece.flat.dtype != (compute := self.precision.compute) and not (to_fill or spec.keeps_dtype):
                piece = piece._replace(code=Code(compute, partial(Tensor.to, dtype=compute)))
            yield piece._replace(name=f"model.{name}")
        if state:
            kinds = self.optimizer.named_state(to_fill=to_fill), self.scaling.state(), self.balance.state()
            for key, piece in itertools.chain(*kinds):
                yield piece._replace(name=f"optimizer.{key}")

    @cached_property
    def adapter_work(self) -> AdapterWork | None:
        """What an adapter adds to the work for a token."""
        return None if self.adapter is None else self.adapter.work(head=self.classes is not None)

    def flops_per_token(self, seq_length: float) -> float:
        """Of forward and backward, in sequences of this mean length."""
        outputs = self.vocab_size if self.classes is None else len(self.classes)
        return training_flops_per_token(self.config.model, outputs, seq_length, self.adapter_work)


def build_stages(
    config: RunConfig,
    mesh: Mesh,
    precision: Precision,
    vocab_size: int,
    backend: AttentionBackend,
    classes: int | None,
    *,
    without_values: bool = False,
) -> list[GPTStage]:
    """A rank's chunks, not initialised. On the device `meta` they have shapes and no memory."""
    recompute = Recompute.from_config(config.training)
    stages = []
    for span in stage_spans(config)[mesh.pp.rank]:
        build = Build(
            config.model,
            mesh,
            precision,
            recompute=recompute,
            without_values=without_values,
            compile=config.training.compile,
        )
        stages.append(GPTStage(build, vocab_size, span, backend, classes))
    return stages


def build_model(
    config: RunConfig,
    mesh: Mesh,
    *,
    vocab_size: int,
    backend: AttentionBackend,
    classes: Sequence[str] | None,
    transport: Transport | None = None,
) -> TrainedModel:
    """Build and initialise a rank's part. `transport`: for the optimizer's data-parallel collectives, in place of the
    mesh's own. Collective over the world."""
    copies = max(mesh.along(domain.data_axes).size for domain in DOMAINS)
    sharding = Sharding.from_config(config.layout, config.optimizer, copies)
    come_and_go = sharding.parameters and config.peft.peft == "none"  # frozen ones are not sharded
    fp8 = Fp8.from_config(config.precision, mesh.device, keeps=not come_and_go, measures=config.logging.log_fp8_stats)
    precision = Precision.from_config(config.precision, fp8)
    # Sharded parameters get values from their shards, those stored in eight bits from main parameters.
    without_values = come_and_go or config.precision.fp8_param_gather
    outputs = None if classes is None else len(classes)
    stages = build_stages(config, mesh, precision, vocab_size, backend, outputs, without_values=without_values)
    folder, seed = config.finetune.load_hf, config.training.seed
    from_base = set()
    if folder is not None:
        names = (name for name, _, _ in specs_of(stages))
        from_base = base_names(folder, names, upcycled=config.model.moe_use_upcycling)
    if not without_values:
        _initialize((whole(*named) for named in specs_of(stages)), from_base, seed)
    adapter = None
    if config.peft.peft != "none":
        adapter = plan_adapter(config.peft, config.model, vocab_size, mesh.world, outputs)
        adapter.apply(stages, mesh=mesh, precision=precision, seed=seed)
    scaling = Fp8Scaling({name: products for name, _, products in fp8_weights(stages)}, mesh)
    optimizer = Optimizer(units_of(stages), mesh, precision, config.optimizer, sharding, transport, scaling, seed)
    if without_values:
        _initialize(optimizer.parameter_pieces().values(), from_base, seed)
        optimizer.parameters_loaded(with_state=False)
    balance = LoadBalance(routers(stages), mesh, config.model.moe_router_bias_update_rate)
    return TrainedModel(
        config, mesh, precision, vocab_size, classes, stages, adapter, optimizer, scaling, balance, from_base
    )


def routers(parts: Iterable[nn.Module]) -> dict[int, Router]:
    """The routers of a rank, by the number of their layer."""
    return {each.number: each for part in parts for each in part.modules() if isinstance(each, Router)}


def fp8_weights(parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter, Fp8Products]]:
    """(name, weight, products) of the linear layers that compute in FP8; in stages the names are global."""
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, ParallelLinear) and isinstance(module.products, Fp8Products):
                yield f"{name}.weight", module.weight, module.products


def _initialize(pieces: Iterable[Piece], loaded: set[str], seed: int) -> None:
    """Fill what is held of the parameters, with zeros those that are `loaded` later."""
    pieces = list(pieces)
    for piece in pieces:
        piece.flat.zero_()
    initialize_pieces((piece for piece in pieces if piece.name not in loaded), seed)
