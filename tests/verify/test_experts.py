"""Mixtures of experts compute what one process computes on every grid of expert-parallel ranks, with every router and
balancing; and a checkpoint goes on on another grid."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.config.entry import read_config
from megalite.config.schema import RunConfig
from megalite.distributed.launch import Environment
from megalite.distributed.layout import EXPERT, Layout
from megalite.distributed.mesh import Group, Mesh, single_process_mesh
from megalite.distributed.pool import ProcessPool
from megalite.nn.moe import dispatch
from megalite.training.prepare import prepare_config
from megalite.training.report import memory_by_stage
from megalite.training.run import build_run
from megalite.verify.configs import resolved
from megalite.verify.layouts import SHARDINGS, Variant, variants, with_experts
from megalite.verify.proof import Prover, compare
from megalite.verify.trace import Trace, trace
from tests.e2e.runs import MICRO, TOLERANCE, checkpoint, checkpoint_tensors, run, steps, written
from tests.helpers import UNFUSED
from tests.verify.networks import covering, network

Case = tuple[Variant, str, bool]  # layout, dispatcher, multi-latent attention with tokens ahead


def _config(
    variant: Variant,
    dispatcher: str = "alltoall",
    *,
    latent: bool = False,
    samples: Path | None = None,
    **fields: Any,
) -> RunConfig:
    """Of eight experts, for one process or `variant`. `samples`: a folder for questions and answers to train on."""
    depths, task = 2 if latent else 0, None if samples is None else "packed answers, all weights"
    config = network(
        variant, llama=not latent, latent=latent, ahead=depths, tied=False, steps=2, finetuning=task, folder=samples
    )
    model = config.model
    model.num_experts, model.moe_ffn_hidden_size, model.moe_token_dispatcher_type = 8, 16, dispatcher
    model.moe_shared_expert_intermediate_size, model.moe_shared_expert_gate = 24, True
    model.moe_router_load_balancing_type, model.moe_aux_loss_coeff, model.moe_z_loss_coeff = None, [0.1], 0.01
    model.init_method_std = 0.3  # so that routers decide
    for name, value in fields.items():
        setattr(model, name, value)
    return config


def _prove(pool: ProcessPool, variant: Variant, config: RunConfig, tracer: Any = trace, steps: int = 2) -> float:
    return Prover(pool, steps=steps).prove(variant.apply(config), variant.processes, tracer=tracer).worst


def _cases(processes: int) -> Iterator[Case]:
    shardings, kinds = itertools.cycle(SHARDINGS), itertools.cycle((False, False, True))
    layouts = list(variants(processes, (None, "full", "selective"), contexts=(1, 2)))
    for dispatcher in dispatch.DISPATCHERS:
        for variant in with_experts(layouts):
            ranks = variant.tp * variant.dp * variant.cp
            sharding = next(shardings) if ranks > 1 else "no_shard"
            yield dataclasses.replace(variant, sharding=sharding), dispatcher, next(kinds)


def _values(case: Case) -> list[tuple[str, Hashable]]:
    variant, dispatcher, latent = case
    return [
        ("grid", (dispatcher, variant.ep, variant.etp)),
        ("tp", (variant.tp, variant.ep > 1)),
        ("cp", (variant.cp, variant.ep > 1)),
        ("schedule", (variant.schedule, variant.ep > 1)),
        ("sharding", (variant.sharding, variant.ep > 1)),
        ("recompute", (variant.recompute, variant.ep > 1)),
        ("latent", (latent, variant.schedule)),
    ]


def _name(case: Case) -> str:
    return f"{case[0]}, {case[1]}{', latent' if case[2] else ''}"


def _run(pool: ProcessPool, case: Case) -> None:
    variant, dispatcher, latent = case
    config = _config(variant, dispatcher, latent=latent)
    if variant.recompute == "selective":
        config.training.recompute_modules = ["mlp"]
    assert _prove(pool, variant, config) <= TOLERANCE


@pytest.mark.parametrize("case", covering(list(_cases(4)), _values, 1, lambda case: case[0].processes), ids=_name)
def test_a_grid_equals_one_process(pool: ProcessPool, case: Case) -> None:
    _run(pool, case)


@pytest.mark.parametrize("sharding", SHARDINGS[1:])
def test_experts_are_shared_out_where_only_they_have_copies(pool: ProcessPool, sharding: str) -> None:
    variant = Variant(tp=2, sequence_parallel=True, etp=1, sharding=sharding)
    config = _config(variant)
    assert _prove(pool, variant, config) <= TOLERANCE
    estimates = [
        memory_by_stage(resolved(each.apply(config), 2), 131, UNFUSED, 2, torch.device("cpu"))[0]
        for each in (dataclasses.replace(variant, sharding="no_shard"), variant)
    ]
    saved = estimates[0].moments - estimates[1].moments
    layers, hidden = config.model.num_layers or 0, config.model.hidden_size or 0
    experts = layers * 8 * 3 * hidden * 16  # of SwiGLU: gate, up and down
    assert saved == 2 * 8 * experts // 2  # two moments in fp64, one half of them


@pytest.mark.full_matrix
@pytest.mark.parametrize("case", list(_cases(8)), ids=_name)
def test_every_grid_equals_one_process(pool: ProcessPool, case: Case) -> None:
    _run(pool, case)


FOUR = Variant(tp=2, sequence_parallel=True, dp=2, ep=2, etp=2)
SP = Variant(tp=2, sequence_parallel=True, ep=2, etp=1)
CP = Variant(cp=2, ep=2)
PP = Variant(pp=2, dp=2, ep=2, schedule="1f1b", recompute="full")
NO_LOSS: dict[str, Any] = {"moe_aux_loss_coeff": None}
ROUTERS: list[tuple[Variant, dict[str, Any]]] = [
    (PP, {"moe_router_load_balancing_type": ["seq_aux_loss"]}),
    (CP, {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]}),
    (
        FOUR,
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.2,
            "moe_router_load_balancing_type": ["none"],
            "moe_router_topk_scaling_factor": 2.5,
            **NO_LOSS,
        },
    ),
    (
        SP,
        {
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk": 4,
            "moe_router_pre_softmax": True,
            "moe_input_jitter_eps": 0.1,
        },
    ),
    (SP, {"moe_router_load_balancing_type": ["sinkhorn"], "moe_router_topk": 1, **NO_LOSS}),
    (CP, {"moe_expert_capacity_factor": 1.0}),
    (SP, {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position", "moe_router_dtype": "fp32"}),
    # Most have no token on any rank.
    (Variant(dp=4, ep=2, sharding="optim_grads_params"), {"num_experts": 64, "moe_ffn_hidden_size": 4}),
    (PP, {"moe_layer_freq": "[0]+[1]", "moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}),
]


@pytest.mark.parametrize(
    ("variant", "fields"), ROUTERS, ids=lambda value: str(value) if isinstance(value, Variant) else "-".join(value)
)
def test_a_router_decides_alike_in_every_layout(pool: ProcessPool, variant: Variant, fields: dict[str, Any]) -> None:
    config = _config(variant, **fields)
    config.training.micro_batch_size = 1 if fields.get("moe_router_topk") == 1 else 2
    config.training.global_batch_size = 8
    assert _prove(pool, variant, config, steps=3) <= TOLERANCE


RAGGED: list[tuple[Variant, dict[str, Any]]] = [
    (SP, {"moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]}),
    (CP, {"moe_expert_capacity_factor": 1.0}),
    (
        Variant(tp=2, sequence_parallel=True, cp=2, ep=2, etp=1),
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.2,
            "moe_router_load_balancing_type": ["global_aux_loss"],
        },
    ),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("variant", "fields"), RAGGED, ids=[str(variant) for variant, _ in RAGGED])
def test_padding_behind_samples_counts_nowhere(
    pool: ProcessPool, tmp_path: Path, variant: Variant, fields: dict[str, Any], packed: bool
) -> None:
    """Batches are cut to their longest sample, at a length that the layout allows."""
    config = _config(variant, samples=tmp_path, **fields)
    config.finetune.sft_packing = packed
    config.data.seq_length = config.model.max_position_embeddings = 40  # samples have up to 16
    config.training.micro_batch_size, config.training.global_batch_size = 2, 8
    assert _prove(pool, variant, config, steps=3) <= TOLERANCE


def test_the_sequence_loss_does_not_depend_on_micro_batches(pool: ProcessPool) -> None:
    traces = []
    for size in (1, 4):
        config = _config(Variant(), moe_router_load_balancing_type=["seq_aux_loss"])
        config.training.micro_batch_size, config.training.global_batch_size = size, 4
        (found,) = pool.run(trace, 1, resolved(config, 1).to_dict(), 2, layout=Layout())
        assert isinstance(found, Trace)
        traces.append(found)
    assert compare(*traces).worst <= TOLERANCE


# ------------------------------------------------------------------------------------------------------ planted faults

Values = dict[str, dict[str, Any]]


def _experts_of_one_rank(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """Gradients of experts aren't summed over the ranks that have copies of them."""
    along, alone = Mesh.along, single_process_mesh().world

    def without(self: Mesh, axes: tuple[str, ...]) -> Group:
        return alone if axes == EXPERT.data_axes else along(self, axes)

    with mock.patch.object(Mesh, "along", without):
        return trace(mesh, values, steps)


def _next_expert(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """What arrives is sorted one row off."""
    place = dispatch.place

    def shifted(x: Tensor, order: Tensor, rows: int) -> Tensor:
        return place(x, order.roll(1), rows)

    with mock.patch.object(dispatch, "place", shifted):
        return trace(mesh, values, steps)


def _counts_of_one_rank(mesh: Mesh, values: Values, steps: int) -> Trace | None:
    """The balancing loss counts this rank's tokens alone."""
    with mock.patch("megalite.nn.moe.router.all_reduce", lambda counts, group: counts):
        return trace(mesh, values, steps)


@pytest.mark.parametrize(
    ("variant", "tracer"),
    [
        (Variant(dp=4, ep=2), _experts_of_one_rank),
        (Variant(dp=2, ep=2), _next_expert),
        (Variant(cp=2), _counts_of_one_rank),
    ],
    ids=["copies not summed", "rows permuted", "counts of one rank"],
)
def test_a_planted_fault_is_found(pool: ProcessPool, variant: Variant, tracer: Callable[..., Trace | None]) -> None:
    config = _config(variant)
    assert _prove(pool, variant, config, tracer) > 1e-6
    assert _prove(pool, variant, config) <= TOLERANCE


# -------------------------------------------------------------------------------------------------------- checkpoints

FLAGS = (
    f"{MICRO} --disable-bias-linear --num-experts 4 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss global_aux_loss "
    "--moe-aux-loss-coeff 0.1 0.1 --moe-per-layer-logging --moe-expert-capacity-factor 1.5 "
    "--global-batch-size 8 --train-iters 6 "
)
EP4 = "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --use-distributed-optimizer"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


def test_a_checkpoint_goes_on_on_another_grid(tmp_path: Path) -> None:
    flags = f"{FLAGS} --fp64 --attention-backend unfused"

    def go(name: str, more: str, processes: int = 1) -> str:
        folder = tmp_path / name
        return run(f"{flags} --save {folder} --load {folder} --metrics-file {folder}.jsonl {more}", processes).out

    go("straight", "")
    go("moved", f"--exit-interval 2 {EP4}", 4)
    go("moved", f"--exit-interval 4 {TP2}", 2)
    out = go("moved", EP4, 4)
    straight, moved = (steps(tmp_path / f"{name}.jsonl") for name in ("straight", "moved"))
    for one, other in zip(straight, moved, strict=True):
        assert one["lm_loss"] == pytest.approx(other["lm_loss"], rel=TOLERANCE)
        assert one["moe"] == pytest.approx(other["moe"], rel=1e-9)
        assert {name.split("/")[0] for name in one["moe"]} == {"0", "1"}
    assert "1/max_over_mean" in straight[0]["moe"] and "load balancing loss:" in out and "layer 1:" in out
    last = [checkpoint_tensors(checkpoint(tmp_path / name, 6)) for name in ("straight", "moved")]
    assert last[0].keys() == last[1].keys()
    assert all(torch.allclose(last[1][name], value, rtol=1e-9, atol=1e-12) for name, value in last[0].items())


def _rewrite(mesh: Mesh, words: str) -> None:
    """Load and save."""
    config, _ = read_config(words.split(), "pretrain_gpt.py", "", mesh.world.size)
    made = build_run(prepare_config(config, Environment(mesh.rank, mesh.world.size, mesh.rank, mesh.world.size)), mesh)
    made.save()
    made.close()


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_by_bit_also_from_files_that_moved(pool: ProcessPool, tmp_path: Path) -> None:
    """Two ranks of another grid read and write the checkpoint between, without a step."""
    flags = f"{FLAGS} --bf16 --train-iters 4"

    def go(name: str, more: str, processes: int) -> None:
        folder = tmp_path / name
        run(f"{flags} --save {folder} --load {folder} --metrics-file {folder}.jsonl {more}", processes)

    go("straight", EP4, 4)
    go("stopped", f"{EP4} --exit-interval 2", 4)
    before = checkpoint_tensors(checkpoint(tmp_path / "stopped", 2))
    assert any(name.endswith("router.expert_bias") for name in before)
    assert any("router_load" in name for name in before)
    moving = f"{flags} {TP2} --load {tmp_path}/stopped --save {tmp_path}/moved"
    pool.run(_rewrite, 2, moving, layout=Layout(tp=2, etp=2, sequence_parallel=True))
    after = checkpoint_tensors(checkpoint(tmp_path / "moved", 2))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    go("moved", EP4, 4)
    fields = "lm_loss", "grad_norm"
    assert written(tmp_path / "straight.jsonl", *fields)[2:] == written(tmp_path / "moved.jsonl", *fields)
    last = [checkpoint_tensors(checkpoint(tmp_path / name, 4)) for name in ("straight", "moved")]
    assert all(torch.equal(last[1][name], value) for name, value in last[0].items())
