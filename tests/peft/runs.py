"""Short runs that train an adapter in any layout, as functions for the workers of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megalite.config.resolve import resolve
from megalite.config.schema import RunConfig
from megalite.distributed.launch import Environment
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pieces import gather
from megalite.distributed.pool import ProcessPool
from megalite.nn.module import specs_of
from megalite.training.diagnostics import gather_gradients
from megalite.training.prepare import prepare_config
from megalite.training.run import Run, build_run
from megalite.verify.configs import resolved
from megalite.verify.trace import Trace, stir
from tests.helpers import set_fields
from tests.verify.networks import FOUR_LAYERS, network


@dataclass(frozen=True)
class Outcome(Trace):
    """What a rank saw. `before`, `after`: frozen local parameters. `adapter`: the trained ones after the last step,
    whole. `held`: bytes that the optimizer keeps."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    adapter: dict[str, Tensor]
    held: dict[str, int]


def adapter_config(peft: str, *, llama: bool = True, **overrides: Any) -> RunConfig:
    """The proof network with an adapter, in fp64, not resolved; `overrides` are fields of any section."""
    config = network(FOUR_LAYERS, llama=llama, tied=overrides.pop("tied", False), dropout=overrides.pop("dropout", 0.0))
    config.model.init_method_std = 0.1  # so that an adapter shows in the loss
    config.peft.peft = peft
    if peft == "lora":
        config.peft.lora_rank = 3
    else:
        config.peft.num_virtual_tokens = 4
    config.model.max_position_embeddings = 32
    config.training.global_batch_size = 4
    config.precision.fp64 = overrides.pop("fp64", True)
    return set_fields(config, **overrides)


def build(config: RunConfig) -> Run:
    """A run of an unresolved configuration in this process."""
    return build_run(prepare_config(resolve(config, 1), Environment()), single_process_mesh())


def run_of(mesh: Mesh, values: dict[str, dict[str, Any]]) -> Run:
    """A rank's run of a resolved configuration."""
    size = mesh.world.size
    return build_run(prepare_config(RunConfig.from_dict(values), Environment(mesh.rank, size, mesh.rank, size)), mesh)


def _frozen(run: Run) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p, _ in specs_of(run.model.stages) if not p.requires_grad}


def train(mesh: Mesh, values: dict[str, dict[str, Any]], steps: int, directory: str | None = None) -> Outcome:
    """Some steps of a resolved configuration, then the adapter saved to `directory`."""
    run = run_of(mesh, values)
    if run.state.iteration == 0:
        stir(run)
    before = _frozen(run)
    gradients: dict[str, Tensor] = {}
    run.trainer.on_first_gradients = lambda scale: gradients.update(gather_gradients(run.optimizer, mesh, scale))
    records = [run.trainer.step() for _ in range(steps)]
    run.save()
    run.optimizer.finish_gathers()
    pieces = run.optimizer.parameter_pieces
    if directory is not None:
        assert run.model.adapter is not None
        run.model.adapter.stage(directory, pieces().values(), mesh)(mesh.world)
    adapter = gather(pieces().values(), mesh)
    outcome = Outcome(
        [record.lm_loss for record in records],
        [record.grad_norm for record in records],
        gradients,
        before,
        _frozen(run),
        adapter,
        run.optimizer.held_bytes(),
    )
    run.close()
    return outcome


def run_adapter(
    pool: ProcessPool, config: RunConfig, world_size: int, *, steps: int = 2, directory: str | None = None
) -> list[Outcome]:
    """`train` on every rank of an unresolved configuration."""
    given = resolved(config, world_size)
    layout = Layout.from_config(given.layout, world_size)
    return pool.run(train, world_size, given.to_dict(), steps, directory, layout=layout, timeout=110)
