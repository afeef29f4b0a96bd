"""Experts that start as copies of a dense MLP: every bit at any layout, and the dense model's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.checkpoint import load_checkpoint
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.upcycling import of_dense
from megalite.config.entry import fill_from_base_model
from megalite.config.errors import FlagError
from megalite.config.resolve import resolve
from megalite.config.schema import PrecisionConfig, RunConfig, TokenizerConfig
from megalite.distributed.launch import Environment
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pieces import Piece, gather, whole
from megalite.distributed.pool import ProcessPool
from megalite.models.whole import outputs
from megalite.nn.module import named_specs
from megalite.training.base_model import read_base_model
from megalite.training.prepare import prepare_config
from tests.checkpoint.huggingface import folders
from tests.checkpoint.logical import found
from tests.helpers import FP64, LLAMA, specs_and_values, tiny_config, tiny_model, tiny_tokens
from tests.inference.checkpoints import save_tiny
from tests.peft.runs import adapter_config, build

EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 48}
NETWORK: dict[str, Any] = LLAMA
IN_FP64 = PrecisionConfig(fp64=True)


def filled(mesh: Mesh, directory: Path) -> dict[str, Tensor]:
    """The whole weights of a model with experts, of which each rank filled its own. Sharded in uneven pieces, as
    data-parallel ranks share them out."""
    model = tiny_model(mesh, FP64, seed=5, **{**LLAMA, **EXPERTS, "moe_layer_freq": "[0,1]"})
    pieces = []
    for name, parameter, spec in named_specs(model):
        flat, third = parameter.detach().view(-1), parameter.numel() // 3
        pieces += [Piece(f"model.{name}", flat[a:b], a, spec) for a, b in ((0, third), (third, len(flat)))]
    load_checkpoint(directory, mesh=mesh, pieces=of_dense(pieces))
    return gather((whole(name, parameter, spec) for name, parameter, spec in named_specs(model)), mesh)


LAYOUTS = {
    "EP 2, ETP 2": Layout(tp=2, dp=2, sequence_parallel=True, ep=2, etp=2),
    "EP 4": Layout(tp=2, dp=2, sequence_parallel=True, ep=4, etp=1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_expert_is_the_dense_mlp_at_any_layout(layout: str, pool: ProcessPool, tmp_path: Path) -> None:
    dense = specs_and_values(save_tiny(tmp_path, precision=IN_FP64, **NETWORK))
    weights = pool.run(filled, 4, found(tmp_path).path, layout=LAYOUTS[layout])[0]
    for linear in ("linear_fc1", "linear_fc2"):
        experts, mlp = (f"decoder.layers.1.mlp.{part}{linear}.weight" for part in ("experts.", ""))
        assert torch.equal(weights.pop(experts), dense.pop(mlp)[1].expand(4, *dense_shape(linear)))
    router = weights.pop("decoder.layers.1.mlp.router.weight")
    assert 0.01 < router.std() < 0.03  # as it was initialised
    assert weights.keys() == dense.keys()
    for name, (_, value) in dense.items():
        assert torch.equal(weights[name], value), name


def dense_shape(linear: str) -> tuple[int, ...]:
    return (2, 48, 32) if linear == "linear_fc1" else (32, 48)


@pytest.mark.parametrize(
    "router",
    [{}, {"moe_router_topk": 3}, {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}],
)
def test_weights_that_sum_to_one_give_the_dense_logits(router: dict[str, Any], tmp_path: Path) -> None:
    dense = save_tiny(tmp_path, precision=IN_FP64, **NETWORK).eval()
    mesh = single_process_mesh()
    model = tiny_model(mesh, FP64, **{**LLAMA, **EXPERTS, **router}).eval()
    pieces = [whole(f"model.{name}", parameter, spec) for name, parameter, spec in named_specs(model)]
    load_checkpoint(found(tmp_path).path, mesh=mesh, pieces=of_dense(pieces))
    tokens = tiny_tokens(2, 12)[:, :-1]
    torch.testing.assert_close(outputs(model, tokens), outputs(dense, tokens), rtol=0, atol=1e-12)


def losses(config: RunConfig) -> float:
    run = build(config)
    loss = run.trainer.step().lm_loss
    run.save()
    run.close()
    return loss


def test_runs_start_from_a_checkpoint_and_go_on_with_their_own(tmp_path: Path) -> None:
    """The first loss is the dense model's; a second start resumes; what can't be meant is refused."""
    dense, own = str(tmp_path / "dense"), str(tmp_path / "own")
    losses(adapter_config("none", save=dense))
    experts: dict[str, Any] = {"num_experts": 4, "moe_use_upcycling": True}
    truth = losses(adapter_config("none", pretrained_checkpoint=dense))
    start = {"pretrained_checkpoint": dense, "load": own, "save": own, **experts}
    assert losses(adapter_config("none", **start)) == pytest.approx(truth, rel=1e-12)
    assert build(adapter_config("none", **start)).state.iteration == 1
    with pytest.raises(CheckpointError, match="of a dense model: --moe-use-upcycling takes its weights alone"):
        build(adapter_config("none", load=dense, **experts))
    with pytest.raises(CheckpointError, match="has experts already: leave out --moe-use-upcycling"):
        build(adapter_config("none", load=own, finetune=True, **experts))


@pytest.mark.parametrize("more", [{}, {"finetune": True}])
def test_a_folder_without_a_checkpoint_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    config = adapter_config("none", load=str(tmp_path), num_experts=4, moe_use_upcycling=True, **more)
    with pytest.raises(FlagError, match="holds no checkpoint, so the experts have no dense model to start from"):
        prepare_config(resolve(config, 1), Environment())


def test_a_hugging_face_folder_is_upcycled(tmp_path: Path) -> None:
    source = folders.save("llama, grouped, tied", tmp_path / "hf", dtype=torch.float64)
    config = adapter_config("none", load_hf=str(source), moe_use_upcycling=True, num_experts=4, eval_iters=0)
    model, tokenizer, classes, _ = read_base_model(config.finetune)
    fill_from_base_model(config, model, tokenizer, classes, {"model.num_experts", "model.moe_use_upcycling"})
    run = build(config)
    values = {name: value for stage in run.model.stages for name, (_, value) in specs_and_values(stage).items()}
    stored = folders.tensors(source)
    for layer in range(model.num_layers):
        for expert in values[f"decoder.layers.{layer}.mlp.experts.linear_fc2.weight"]:
            assert torch.equal(expert, stored[f"model.layers.{layer}.mlp.down_proj.weight"])
        assert values[f"decoder.layers.{layer}.mlp.router.weight"].std() > 0
    run.close()


def test_balancing_and_capacity_are_the_runs_choice_beside_a_folder_with_experts() -> None:
    config = RunConfig()
    config.finetune.load_hf, config.model.moe_aux_loss_coeff = "folder", [0.01]
    config.model.moe_expert_capacity_factor = 1.5
    given = {f"model.moe_{name}" for name in ("aux_loss_coeff", "router_load_balancing_type", "expert_capacity_factor")}
    fill_from_base_model(config, tiny_config(**EXPERTS), TokenizerConfig(), None, given)
    assert (config.model.moe_aux_loss_coeff, config.model.num_experts) == ([0.01], 4)
    assert config.model.moe_expert_capacity_factor == 1.5
    config.model.moe_router_load_balancing_type, config.model.moe_aux_loss_coeff = ["sinkhorn"], None
    with pytest.raises(FlagError, match="sinkhorn can't be used with --load-hf"):
        fill_from_base_model(config, tiny_config(**EXPERTS), TokenizerConfig(), None, given)


def test_a_folder_with_experts_is_not_upcycled() -> None:
    config = RunConfig()
    config.finetune.load_hf, config.model.moe_use_upcycling, config.model.num_experts = "folder", True, 4
    with pytest.raises(FlagError, match="--load-hf folder has experts already"):
        fill_from_base_model(config, tiny_config(**EXPERTS), TokenizerConfig(), None, {"model.num_experts"})
