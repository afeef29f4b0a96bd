"""Loading a folder at any layout, and saving from there: every bit of it comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.checkpoint.huggingface.export import megalite_to_huggingface
from megalite.checkpoint.huggingface.load import load_huggingface
from megalite.checkpoint.storage import Retention
from megalite.config.schema import LayoutConfig, RunConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pieces import Piece, whole
from megalite.distributed.pool import ProcessPool
from megalite.models.gpt import GPTStage
from megalite.models.stages import stage_spans
from megalite.nn.module import Build, specs_of
from megalite.precision.policy import Precision
from tests.checkpoint.huggingface import folders
from tests.checkpoint.logical import found
from tests.helpers import FP32, UNFUSED, save_checkpoint

LAYOUTS = {"TP 4": Layout(tp=4), "TP 2, PP 2": Layout(tp=2, pp=2)}


def stages_of(mesh: Mesh, source: Path, precision: Precision = FP32) -> tuple[RunConfig, list[GPTStage]]:
    """This rank's chunks, every element 7."""
    found = read_huggingface_config(source)
    layout = LayoutConfig(tensor_model_parallel_size=mesh.layout.tp, pipeline_model_parallel_size=mesh.layout.pp)
    config = RunConfig(model=found.model, layout=layout)
    build = Build(config.model, mesh, precision)
    stages = [GPTStage(build, found.vocab_size, span, UNFUSED) for span in stage_spans(config)[mesh.pp.rank]]
    for _, parameter, _ in specs_of(stages):
        parameter.data.fill_(7.0)
    return config, stages


def pieces_of(stages: list[GPTStage]) -> list[Piece]:
    return [whole(f"model.{name}", parameter, spec) for name, parameter, spec in specs_of(stages)]


def load_and_save(mesh: Mesh, source: Path, root: Path) -> None:
    config, stages = stages_of(mesh, source)
    load_huggingface(source, mesh=mesh, pieces=pieces_of(stages))
    for name, parameter, spec in specs_of(stages):
        inside = torch.zeros(spec.local_shape, dtype=torch.bool)
        for box in spec.boxes:
            inside[box.local_slices] = True
        assert bool((parameter[~inside] == 7.0).all()), f"{name}: padding was touched"
    kwargs = {"config": config, "training_state": {}, "retain": Retention()}
    save_checkpoint(root, 1, mesh=mesh, pieces=pieces_of(stages), **kwargs)  # type: ignore[arg-type]


EXPERT_LAYOUTS = {
    "EP 2, ETP 2": Layout(tp=2, dp=2, sequence_parallel=True, ep=2, etp=2),
    "PP 2, EP 2": Layout(pp=2, dp=2, ep=2, etp=1),
}
_WITH_EXPERTS = [
    (case, layout) for case in ("mixtral", "qwen2 moe", "deepseek v3, experts") for layout in EXPERT_LAYOUTS
]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *((case, layout) for case in ("gpt2", "llama, grouped, tied", "qwen3", "glm") for layout in LAYOUTS),
        *_WITH_EXPERTS,
    ],
)
def test_bits_survive_any_layout(case: str, layout: str, pool: ProcessPool, tmp_path: Path) -> None:
    source = folders.save(case, tmp_path / "hf", shard_size="30KB")
    pool.run(load_and_save, 4, source, tmp_path / "run", layout=(LAYOUTS | EXPERT_LAYOUTS)[layout])
    megalite_to_huggingface(found(tmp_path / "run"), tmp_path / "back")
    folders.assert_equal(folders.tensors(tmp_path / "back"), folders.tensors(source))


@pytest.mark.parametrize("case", ["gpt2", "llama, wide heads, all biases", "glm"])
def test_a_part_of_a_parameter_can_be_loaded_alone(case: str, tmp_path: Path) -> None:
    source = folders.save(case, tmp_path / "hf")
    mesh = single_process_mesh()
    (_, stages), (_, others) = stages_of(mesh, source), stages_of(mesh, source)
    load_huggingface(source, mesh=mesh, pieces=pieces_of(stages))
    ranges = []
    for name, parameter, spec in specs_of(others):
        flat, third = parameter.detach().view(-1), parameter.numel() // 3
        ranges += [Piece(name, flat[:third], 0, spec), Piece(name, flat[third:-1], third, spec)]
        ranges.append(Piece(name, flat[-1:], flat.numel() - 1, spec))
    load_huggingface(source, mesh=mesh, pieces=ranges)
    for (name, one, _), (_, other, _) in zip(specs_of(stages), specs_of(others), strict=True):
        assert torch.equal(one, other), name


def refused(mesh: Mesh, source: Path) -> str:
    _, stages = stages_of(mesh, source)
    with pytest.raises(CheckpointError) as raised:
        load_huggingface(source, mesh=mesh, pieces=pieces_of(stages))
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.0.mlp.up_proj.bias", torch.zeros(48, 32), "model.layers.0.mlp.up_proj.bias"),
        ("model.layers.2.mlp.up_proj.weight", torch.zeros(48, 32), "model.layers.2.mlp.up_proj.weight"),
        ("lm_head.weight", torch.zeros(48, 32), "lm_head.weight"),
        ("model.layers.1.mlp.up_proj.weight", None, "lacks\n  model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_all_ranks_refuse_a_tensor_that_none_wants_and_name_one_that_any_misses(
    name: str, tensor: torch.Tensor | None, message: str, pool: ProcessPool, tmp_path: Path
) -> None:
    source = folders.save("llama, grouped, tied", tmp_path / "hf")
    folders.change_tensors(source, {name: tensor})
    messages = pool.run(refused, 4, source, layout=Layout(tp=2, pp=2))
    assert len(set(messages)) == 1
    assert message in messages[0]
