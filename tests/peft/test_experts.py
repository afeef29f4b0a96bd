"""LoRA in models with experts: beside attention, dense MLPs and shared experts; routed experts stay as they are."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.export import megalite_to_huggingface
from megalite.checkpoint.huggingface.families import ARCHITECTURES
from megalite.checkpoint.huggingface.parts import gate_and_up, same
from megalite.config.check_peft import lora_parts, peft_problems
from megalite.config.entry import fill_from_base_model
from megalite.config.errors import FlagError, UserError
from megalite.config.resolve import resolve
from megalite.config.schema import RunConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.pieces import whole
from megalite.distributed.pool import ProcessPool
from megalite.inference.load import load_for_generation, load_huggingface_for_generation
from megalite.models.gpt import plain_tokens
from megalite.models.whole import outputs
from megalite.nn.module import named_specs
from megalite.peft import convert
from megalite.peft.adapter import plan_adapter
from megalite.training.base_model import read_base_model
from megalite.verify.proof import Prover
from tests.checkpoint.huggingface import folders
from tests.checkpoint.logical import found
from tests.helpers import FP64, load_tool, tiny_model, tiny_tokens
from tests.peft.runs import adapter_config, build, run_adapter

MERGE = load_tool(Path(__file__).resolve().parents[2] / "tools" / "merge_adapter.py")

EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
    "moe_layer_freq": "[0,1,1,0]",
    "moe_router_load_balancing_type": ["seq_aux_loss"],
    "moe_aux_loss_coeff": [0.1],
}
LINEARS = 7  # of a layer: q, k, v, o, gate, up, down
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def lora_config(**overrides: Any) -> RunConfig:
    return adapter_config("lora", **{"lora_target_modules": ["all-linear"], **EXPERTS, **overrides})


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ({"expert_model_parallel_size": 2}, 2),
        ({**TP, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 2),
        (TP, 2),
        ({"pipeline_model_parallel_size": 2}, 2),
        ({**TP, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}, 4),
    ],
    ids=["EP 2", "TP 2, EP 2", "TP 2", "PP 2", "TP 2, DP 2, EP 2, ETP 2"],
)
def test_every_layout_equals_one_process(pool: ProcessPool, layout: dict[str, Any], world: int) -> None:
    difference = Prover(pool, steps=2).prove(lora_config(**layout), world)
    assert difference.worst <= 1e-10, difference


def test_adapters_beside_shared_experts_learn_and_experts_stay(pool: ProcessPool) -> None:
    outcome = run_adapter(pool, lora_config(), 1, steps=1)[0]
    assert len(outcome.adapter) == 4 * LINEARS * 2
    assert sum(".mlp.shared_experts." in name for name in outcome.adapter) == 2 * 3 * 2
    assert all(gradient.abs().max() > 0 for gradient in outcome.gradients.values())
    assert any(".mlp.experts." in name for name in outcome.before)
    assert all(torch.equal(outcome.before[name], outcome.after[name]) for name in outcome.before)


def test_a_resumed_run_equals_a_straight_one(pool: ProcessPool, tmp_path: Path) -> None:
    given = lora_config(fp64=False, expert_model_parallel_size=2)
    straight = run_adapter(pool, given, 2, steps=2)[0]
    given.checkpoint.save = str(tmp_path / "run")
    first = run_adapter(pool, given, 2, steps=1)[0]
    given.checkpoint.load = given.checkpoint.save
    second = run_adapter(pool, given, 2, steps=1)[0]
    assert [*first.losses, *second.losses] == straight.losses
    assert all(torch.equal(second.adapter[name], straight.adapter[name]) for name in straight.adapter)


ROUTED = {"lora_target_modules": ["q_proj,experts.gate_up_proj,experts.down_proj"]}


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ({"expert_model_parallel_size": 2}, 2),
        (TP, 2),
        ({**TP, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}, 4),
        ({"expert_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads"}, 4),
        ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}, 2),
        ({"expert_model_parallel_size": 2, **RECOMPUTE}, 2),
    ],
    ids=["EP 2", "ETP 2", "EP 2, ETP 2", "EP 2, DP 4, sharded", "PP 2, zb-h1", "EP 2, recompute"],
)
def test_adapters_of_routed_experts_equal_one_process(pool: ProcessPool, layout: dict[str, Any], world: int) -> None:
    difference = Prover(pool, steps=2).prove(lora_config(**ROUTED, **layout), world)
    assert difference.worst <= 1e-10, difference


def test_an_adapter_of_an_expert_is_its_product_added_to_the_experts_matrix() -> None:
    config, mesh = resolve(lora_config(**ROUTED, moe_aux_loss_coeff=0.0), 1), single_process_mesh()
    model, tokens = tiny_model(mesh, FP64, **vars(config.model)), tiny_tokens(2, 16)[:, :-1]
    plan = plan_adapter(config.peft, config.model, 131, mesh.world)
    plan.apply([model], mesh=mesh, precision=FP64, seed=1)
    trained = {name: p for name, p, _ in named_specs(model) if p.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter.data, std=0.3)
    # A token is sent to half of the experts.
    each = {name: p.numel() // (2 if ".mlp.experts." in name else 1) for name, p in trained.items()}
    assert plan.work(head=False).matmul == sum(each.values())
    beside, without = model(tokens, plain_tokens(tokens)), 0
    for layer in model.decoder.layers.values():
        for linear in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2) if layer.number in (1, 2) else ():
            a, b = (p for name, p in linear.lora.named_parameters())
            factor = linear.lora.settings.scale
            linear.weight.data += torch.einsum("e...r,eri->e...i", b, a) * factor
            linear.lora, without = None, without + 1
    assert without == 4
    assert torch.allclose(model(tokens, plain_tokens(tokens)), beside, rtol=0, atol=1e-10)


def test_routed_experts_alone_leave_no_mlp_as_a_target() -> None:
    config = lora_config(moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False, moe_layer_freq="1")
    assert lora_parts(config.model, ["all-linear"]) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    config.peft.lora_target_modules, config.peft.save_adapter = ["experts.down_proj"], "folder"
    (problem,) = peft_problems(config)
    assert problem.startswith("--save-adapter folder with --lora-target-modules experts.down_proj")
    config.peft.lora_target_modules, config.peft.save_adapter = ["q_proj", "up_proj"], None
    (problem,) = peft_problems(config)
    assert problem == (
        "--lora-target-modules up_proj is not the name of a linear layer; valid for this network: q_proj, k_proj, "
        "v_proj, o_proj, experts.gate_up_proj, experts.down_proj; or all-linear alone"
    )


def test_an_adapter_that_is_saved_comes_back_bitwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With Llama's names for dense layers, and DeepSeek's for shared experts."""
    ours, theirs = "decoder.layers.{n}.mlp.shared_experts", "model.layers.{n}.mlp.shared_experts"
    up = gate_and_up(f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
    names = {f"{ours}.linear_fc1.weight": up, f"{ours}.linear_fc2.weight": same(f"{theirs}.down_proj.weight")}
    llama = ARCHITECTURES["llama"]
    with_experts = replace(llama, names={**llama.names, **names})
    monkeypatch.setattr(convert, "architecture_of", lambda model, vocab_size: with_experts)

    config, mesh = resolve(lora_config(), 1), single_process_mesh()
    plan = plan_adapter(config.peft, config.model, 131, mesh.world)
    assert "PEFT takes down_proj, gate_proj, up_proj for targets in the routed ones" in plan.caution
    model = tiny_model(mesh, FP64, **vars(config.model))
    plan.apply([model], mesh=mesh, precision=FP64, seed=1)
    trained = {name: p for name, p, _ in named_specs(model) if p.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter.data)
    assert plan.work(head=False).matmul == sum(p.numel() for p in trained.values())
    pieces = [whole(*entry) for entry in named_specs(model) if entry[0] in trained]
    plan.stage(str(tmp_path / "saved"), pieces, mesh)(mesh.world)

    again = plan_adapter(replace(config.peft, load_adapter=str(tmp_path / "saved")), config.model, 131, mesh.world)
    assert again.scales == plan.scales
    assert again.values.keys() == trained.keys()
    assert all(torch.equal(value, trained[name]) for name, value in again.values.items())


def test_adapters_of_a_checkpoint_are_merged_into_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of routed experts too, for which there is no folder of an adapter."""
    base, root, merged = tmp_path / "hf", tmp_path / "run", tmp_path / "new"
    folders.save("mixtral", base, dtype=torch.float64)
    targets = {"lora_target_modules": ["q_proj", "v_proj", *ROUTED["lora_target_modules"][0].split(",")[1:]]}
    config = adapter_config("lora", load_hf=str(base), save=str(root), eval_iters=0, lora_alpha=7, **targets)
    fill_from_base_model(config, *read_base_model(config.finetune)[:3], set())
    run = build(config)
    for parameter in (p for p in run.model.stages[0].parameters() if p.requires_grad):
        torch.nn.init.normal_(parameter.data, std=0.3)
    tokens = torch.randint(131, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        beside = outputs(run.model.stages[0].eval(), tokens)
    run.save()
    run.close()
    assert MERGE.main(["--load", str(root), "--hf", str(merged)]) == 0
    assert "rounding error: largest" in capsys.readouterr().out
    loaded = load_huggingface_for_generation(str(merged))
    with torch.no_grad():
        assert torch.allclose(outputs(loaded.model, tokens), beside, rtol=0, atol=1e-10)
    after = folders.tensors(merged)
    changed = {name for name, value in folders.tensors(base).items() if not torch.equal(value, after[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "w1", "w2", "w3"}


def test_a_checkpoint_of_an_adapter_says_how_to_use_it(tmp_path: Path) -> None:
    config = lora_config(**ROUTED, save=str(tmp_path))
    run = build(config)
    run.save()
    run.close()
    command = f"python tools/merge_adapter.py --load-hf MODEL --load {tmp_path} --hf "
    with pytest.raises(UserError, match=re.escape(command)):
        load_for_generation(str(tmp_path))
    source = found(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(command)):
        megalite_to_huggingface(source, tmp_path / "hf")
    with pytest.raises(CheckpointError, match="give it with --load-hf"):
        MERGE.main(["--load", str(tmp_path), "--hf", str(tmp_path / "hf")])
    with pytest.raises(FlagError, match="give the adapter as --adapter, or as the checkpoint"):
        MERGE.main(["--load-hf", "folder", "--hf", str(tmp_path / "hf")])
