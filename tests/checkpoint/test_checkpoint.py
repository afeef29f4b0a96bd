"""Saving and loading whole: any layout reads any other's bits, and what doesn't fit is named."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.checkpoint import load_checkpoint, read_checkpoint_config, read_training_state
from megalite.checkpoint.errors import CheckpointError, agree, attempt, on_first_rank
from megalite.checkpoint.index import INDEX_FILE, read_index
from megalite.checkpoint.planner import owned_chunks
from megalite.config.errors import FlagError
from megalite.config.schema import RunConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.param_spec import ParamSpec, Place, replicated
from megalite.distributed.pool import ProcessPool
from tests.checkpoint import logical
from tests.e2e.runs import checkpoint_tensors
from tests.helpers import NamedTensor, pieces_of

ONE = single_process_mesh()
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=8), Layout(pp=4), Layout(dp=3), Layout(tp=4, pp=2, cp=2)]


def name_of(layout: Layout) -> str:
    return f"tp{layout.tp}-pp{layout.pp}-dp{layout.dp}-cp{layout.cp}"


def plain_spec(shape: tuple[int, ...]) -> ParamSpec:
    return ParamSpec(shape, shape, replicated(shape, Place(Layout(), 0)))


def entry(key: str, tensor: Tensor) -> NamedTensor:
    return key, tensor, plain_spec(tuple(tensor.shape))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one process."""
    return logical.save(ONE, tmp_path / "run", 100)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_any_layout_reads_what_another_wrote(layout: Layout, tmp_path: Path) -> None:
    logical.save_simulated(layout, tmp_path / "shards")
    for reader in (Layout(), Layout(tp=4, pp=2, dp=2)):
        logical.check_simulated(reader, tmp_path / "shards")


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4, pp=2)], ids=name_of)
def test_the_safetensors_library_reads_the_logical_tensors(layout: Layout, tmp_path: Path) -> None:
    logical.save_simulated(layout, tmp_path / "shards")
    for key, tensor in checkpoint_tensors(tmp_path / "shards").items():
        assert tuple(tensor.shape) == logical.logical_shapes()[key]
        assert torch.equal(tensor, logical.truth(key, tuple(tensor.shape), logical.dtype_of(key))), key


@pytest.mark.parametrize("layout", [Layout(dp=3), Layout(tp=2, dp=2, cp=2)], ids=name_of)
def test_replicas_share_the_writing_evenly_and_nothing_is_written_twice(layout: Layout) -> None:
    written: dict[int, int] = {}
    places = set()
    for rank in range(layout.world_size):
        chunks = owned_chunks(pieces_of(logical.filled(layout, rank)), logical.mesh_of(layout, rank))
        written[rank] = sum(chunk.read().nbytes for chunk in chunks)
        places |= {(chunk.key, chunk.start) for chunk in chunks}
        assert all(not chunk.read().isnan().any() for chunk in chunks), "padding"
    sizes = (shape for shape in logical.logical_shapes().items())
    total = sum(torch.Size(shape).numel() * logical.dtype_of(key).itemsize for key, shape in sizes)
    assert sum(written.values()) == total
    owners = range(layout.tp)  # places in a replica
    for place in owners:
        group = [written[rank] for rank in layout.group_of(place, "dp", "cp")]
        assert max(group) - min(group) <= 131 * logical.HIDDEN * 4


def _pass_on(mesh: Mesh, source: Path | None, root: Path) -> None:
    """Save what the layout before left, padding still 7; the first in the row the truth."""
    tensors = None if source is None else logical.load(mesh, source)
    logical.assert_true(tensors or [])
    logical.save(mesh, root, 1, tensors)


@pytest.mark.parametrize(
    "chain",
    [
        [Layout(tp=4), Layout(tp=2), Layout()],
        [Layout(pp=2), Layout(), Layout(pp=4), Layout(tp=2, pp=2)],
        [Layout(dp=4), Layout(dp=2), Layout(dp=3)],
    ],
    ids=["tp", "pp", "dp"],
)
def test_bits_survive_a_chain_of_layouts(chain: list[Layout], pool: ProcessPool, tmp_path: Path) -> None:
    source: Path | None = None
    for i, layout in enumerate(chain):
        pool.run(_pass_on, layout.world_size, source, tmp_path / str(i), layout=layout)
        checkpoint = logical.found(tmp_path / str(i))
        assert checkpoint.note == ""
        source = checkpoint.path
    logical.assert_true(logical.load(ONE, source))


def test_configuration_and_training_state_come_back_equal(tmp_path: Path) -> None:
    config = RunConfig()
    config.model.hidden_size, config.learning_rate.lr, config.data.data_path = 64, 1.1e-4, ["0.3", "a", "0.7", "b"]
    state = {"iteration": 7, "loss": 0.1 + 0.2, "seed": 2**63 + 1, "nested": {"skipped": None, "name": "数"}}
    path = logical.save(ONE, tmp_path, 7, [entry("model.w", torch.ones(2))], run=config, state=state)
    assert read_checkpoint_config(path) == config
    assert read_training_state(path) == state


def test_loading_unpickles_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    logical.assert_true(logical.load(ONE, saved))


def test_the_index_names_no_place_of_the_machine_that_wrote_it(saved: Path) -> None:
    assert str(saved.parent.parent).encode() not in (saved / INDEX_FILE).read_bytes()


def test_dtypes_are_converted_to_the_readers(saved: Path) -> None:
    wide = logical.empty(Layout(), 0, torch.float64)
    load_checkpoint(saved, mesh=ONE, pieces=pieces_of(wide))
    logical.assert_true(wide)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_every_dtype_survives_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.arange(24).reshape(4, 6).to(dtype)
    key, tensor, spec = entry("model.w", value)
    path = logical.save(ONE, tmp_path, 1, [(key, tensor, spec)])
    loaded = torch.zeros_like(value)
    load_checkpoint(path, mesh=ONE, pieces=pieces_of([(key, loaded, spec)]))
    assert torch.equal(loaded, value)


def test_a_parameter_that_requires_a_gradient_is_filled_in_place(saved: Path) -> None:
    tensors = [(key, torch.nn.Parameter(tensor), spec) for key, tensor, spec in logical.empty(Layout(), 0)]
    load_checkpoint(saved, mesh=ONE, pieces=pieces_of(tensors))
    logical.assert_true([(key, tensor.detach(), spec) for key, tensor, spec in tensors])


@pytest.mark.parametrize("prefix", ["model.", "optimizer.main."])
def test_weights_alone_or_the_optimizers_copy_of_them_can_be_read(prefix: str, saved: Path) -> None:
    wanted = [item for item in logical.empty(Layout(), 0) if item[0].startswith(prefix)]
    load_checkpoint(saved, mesh=ONE, pieces=pieces_of(wanted))
    logical.assert_true(wanted)


def test_optimizer_state_that_was_not_saved_is_named_with_the_flag_that_does_without(tmp_path: Path) -> None:
    weights = [item for item in logical.filled(Layout(), 0) if item[0].startswith("model.")]
    path = logical.save(ONE, tmp_path, 1, weights)
    with pytest.raises(CheckpointError, match=r"lacks\n  optimizer\.exp_avg\.embedding\.weight(.|\n)*--no-load-optim"):
        load_checkpoint(path, mesh=ONE, pieces=pieces_of(logical.empty(Layout(), 0)))


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("model.layers.4.norm.weight", (6,), r"lacks\n  model\.layers\.4\.norm\.weight\n.*--num-layers 4"),
        (
            "model.layers.0.norm.weight",
            (8,),
            r"layers\.0\.norm\.weight: \(6,\) in the checkpoint, \(8,\) in the run(.|\n)*cause.*--hidden-size 6",
        ),
        (
            "model.embedding.weight",
            (140, logical.HIDDEN),
            r"\(131, 6\) in the checkpoint, \(140, 6\) in the run(.|\n)*cause: another tokenizer or --vocab-size",
        ),
    ],
    ids=["missing", "shape", "vocabulary"],
)
def test_what_the_checkpoint_lacks_or_has_in_another_shape_is_named_with_the_likely_flag(
    key: str, shape: tuple[int, ...], message: str, saved: Path
) -> None:
    tensors = [item for item in logical.empty(Layout(), 0) if item[0] != key]
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved, mesh=ONE, pieces=pieces_of([*tensors, entry(key, torch.zeros(shape))]))


def test_parameters_that_nobody_wants_are_named_unless_asked(saved: Path) -> None:
    fewer = [item for item in logical.empty(Layout(), 0) if ".layers.3." not in item[0]]
    with pytest.raises(CheckpointError, match=r"network doesn't have:\n  layers\.3\.fc1\.weight(.|\n)*--num-layers 4"):
        load_checkpoint(saved, mesh=ONE, pieces=pieces_of(fewer))
    load_checkpoint(saved, mesh=ONE, pieces=pieces_of(fewer), strict=False)
    logical.assert_true(fewer)


def test_long_lists_of_keys_are_cut_short(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="and 10 more"):
        load_checkpoint(saved, mesh=ONE, pieces=pieces_of(logical.empty(Layout(), 0)[:0]))


def test_boxes_that_leave_a_gap_are_never_saved(tmp_path: Path) -> None:
    key, tensor, spec = entry("model.w", torch.ones(4))
    box = dataclasses.replace(spec.boxes[0], shape=(3,))
    with pytest.raises(CheckpointError, match="not saved: model.w: 1 chunks hold 3 of 4 elements"):
        logical.save(ONE, tmp_path, 1, [(key, tensor, dataclasses.replace(spec, boxes=(box,)))])


def test_a_training_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        logical.save(ONE, tmp_path / "run", 1, [], state={"tensor": torch.ones(1)})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("telepathy", True, r"config\.json.*model\.telepathy"),
        ("num_layers", "12", r"config\.json .*model\.num_layers is '12', not a whole number"),
    ],
)
def test_a_stored_configuration_that_is_not_one_is_refused_by_file_and_field(
    name: str, value: object, message: str, saved: Path
) -> None:
    values = json.loads((saved / "config.json").read_text())
    values["model"][name] = value
    (saved / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint_config(saved)


def _lost_key(mesh: Mesh, directory: Path) -> str:
    """Only stage 1 wants a layer that isn't there."""
    tensors = logical.empty(mesh.layout, mesh.rank)
    if mesh.pp.rank == 1:
        tensors.append(entry("model.layers.9.norm.weight", torch.zeros(6)))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(directory, mesh=mesh, pieces=pieces_of(tensors))
    return str(caught.value)


def test_all_ranks_raise_what_one_rank_misses(saved: Path, pool: ProcessPool) -> None:
    messages = pool.run(_lost_key, 2, saved, layout=Layout(pp=2))
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: ")
    assert "layers.9.norm.weight" in messages[0]


def test_a_rank_that_owns_little_makes_no_empty_file(tmp_path: Path, pool: ProcessPool) -> None:
    pool.run(_save_one, 4, tmp_path, layout=Layout(dp=4))
    path = tmp_path / "iter_0000001"
    files = [file.name for file in path.glob("*.safetensors")]
    assert len(files) == 1
    assert list(read_index(path).files) == files


def _save_one(mesh: Mesh, root: Path) -> None:
    spec = ParamSpec((4,), (4,), replicated((4,), Place(mesh.layout, mesh.rank)))
    logical.save(mesh, root, 1, [("model.w", torch.ones(4), spec)])


@pytest.mark.cuda
def test_tensors_on_a_gpu_are_saved_and_filled(tmp_path: Path) -> None:
    mesh = single_process_mesh("cuda")
    on_gpu = [(key, tensor.cuda(), spec) for key, tensor, spec in logical.filled(Layout(), 0)]
    path = logical.save(mesh, tmp_path, 1, on_gpu)
    loaded = [(key, tensor.cuda(), spec) for key, tensor, spec in logical.empty(Layout(), 0)]
    load_checkpoint(path, mesh=mesh, pieces=pieces_of(loaded))
    logical.assert_true([(key, tensor.cpu(), spec) for key, tensor, spec in loaded])


def _bad_flag() -> None:
    raise FlagError("--save x: bad")


def _messages(mesh: Mesh) -> tuple[str, str]:
    with pytest.raises(CheckpointError) as first:
        on_first_rank(_bad_flag, mesh.world)
    with pytest.raises(CheckpointError) as last:
        agree(attempt(_bad_flag) if mesh.rank == 1 else None, mesh.world)
    return str(first.value), str(last.value)


def test_a_bad_flag_that_one_rank_alone_finds_is_raised_on_all(pool: ProcessPool) -> None:
    assert pool.run(_messages, 2, layout=Layout(dp=2)) == [("--save x: bad", "rank 1: --save x: bad")] * 2
