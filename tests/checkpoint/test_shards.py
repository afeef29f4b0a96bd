"""Data files that are damaged, and disks that are full: every rank hears of it, with rank and file."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from megalite.checkpoint import shards
from megalite.checkpoint.checkpoint import load_checkpoint
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.index import read_index
from megalite.checkpoint.planner import plan_reads
from megalite.checkpoint.storage import TRACKER
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.param_spec import ParamSpec, Place, cut
from megalite.distributed.pool import ProcessPool
from tests.checkpoint import logical
from tests.helpers import NamedTensor, pieces_of

ONE = single_process_mesh()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return logical.save(ONE, tmp_path / "run", 100)


def message_of_load(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(directory, mesh=ONE, pieces=pieces_of(logical.empty(Layout(), 0)))
    return str(caught.value)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_deleted_shard_is_named(saved: Path) -> None:
    victim = sorted(saved.glob("*.safetensors"))[1]
    victim.unlink()
    assert message_of_load(saved) == f"{victim}: No such file or directory"


@pytest.mark.parametrize("length", [0, 1, 1000, -1])
def test_a_truncated_shard_is_named(length: int, saved: Path) -> None:
    victim = sorted(saved.glob("*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:length])
    assert message_of_load(saved).startswith(f"{victim} is truncated: ")


def test_a_flipped_bit_anywhere_in_the_tensors_is_found(saved: Path) -> None:
    needle = logical.truth("optimizer.main.layers.2.fc2.weight", (6, 8), torch.float32).numpy().tobytes()
    places = [path for path in saved.glob("*.safetensors") if needle in path.read_bytes()]
    assert len(places) == 1
    victim, good = places[0], places[0].read_bytes()
    start = good.index(needle)
    for position in (start, start + len(needle) // 2, start + len(needle) - 1):
        bad = bytearray(good)
        bad[position] ^= 1
        victim.write_bytes(bad)
        assert message_of_load(saved).startswith(f"{victim}: damaged: wrong checksum")


def test_garbage_of_the_right_size_is_named(saved: Path) -> None:
    victim = sorted(saved.glob("*.safetensors"))[0]
    victim.write_bytes(b"\x55" * victim.stat().st_size)
    assert message_of_load(saved).startswith(f"{victim}: ")


@pytest.mark.parametrize("limit", [0, 100, 2000, 8000, 12_000])
def test_a_full_disk_fails_the_save_and_leaves_all_as_it_was(limit: int, tmp_path: Path) -> None:
    root = tmp_path / "run"
    logical.save(ONE, root, 1)
    before = sorted(path.name for path in root.iterdir())
    with file_size_limit(limit), pytest.raises(CheckpointError, match="iter_0000002.*not saved.*File too large"):
        logical.save(ONE, root, 2)
    assert sorted(path.name for path in root.iterdir()) == before
    before_it = logical.found(root)
    assert (before_it.iteration, before_it.note) == (1, "")
    logical.assert_true(logical.load(ONE, before_it.path))
    logical.save(ONE, root, 2)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=r"not saved: .*'.*run'"):
        logical.save(ONE, tmp_path / "run", 2)


def _large(mesh: Mesh) -> list[NamedTensor]:
    """A tensor cut over the tensor-parallel ranks, of 100 kB a rank."""
    spec = ParamSpec((mesh.tp.size, 25_000), (1, 25_000), cut((mesh.tp.size, 25_000), 0, Place(mesh.layout, mesh.rank)))
    return [("model.w", torch.full((1, 25_000), float(mesh.rank)), spec)]


def _save_with_one_full_disk(mesh: Mesh, root: Path) -> str:
    logical.save(mesh, root, 1, _large(mesh))
    with file_size_limit(50_000 if mesh.rank == 2 else resource.RLIM_INFINITY):
        with pytest.raises(CheckpointError) as caught:
            logical.save(mesh, root, 2, _large(mesh))
    return str(caught.value)


def test_one_ranks_full_disk_is_every_ranks_same_error(tmp_path: Path, pool: ProcessPool) -> None:
    messages = pool.run(_save_with_one_full_disk, 4, tmp_path, layout=Layout(tp=4))
    assert len(set(messages)) == 1
    assert "rank 2: " in messages[0]
    assert "iter_0000002.tmp/rank00002_0.safetensors: File too large" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "1"
    tensor = torch.zeros(4, 25_000)
    spec = ParamSpec((4, 25_000), (4, 25_000), cut((4, 25_000), 0, Place(Layout(), 0)))
    load_checkpoint(tmp_path / "iter_0000001", mesh=ONE, pieces=pieces_of([("model.w", tensor, spec)]))
    assert torch.equal(tensor, torch.arange(4.0)[:, None].expand(4, 25_000))


def _load_damaged(mesh: Mesh, directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(directory, mesh=mesh, pieces=pieces_of(_large(mesh)))
    return str(caught.value)


def test_one_ranks_damaged_shard_is_every_ranks_same_error(tmp_path: Path, pool: ProcessPool) -> None:
    pool.run(_save_large, 4, tmp_path, layout=Layout(tp=4))
    path = tmp_path / "iter_0000001"
    victim = path / "rank00003_0.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    messages = pool.run(_load_damaged, 4, path, layout=Layout(tp=4))
    assert set(messages) == {messages[0]}
    assert messages[0].startswith(f"rank 3: {victim}: damaged")


def _save_large(mesh: Mesh, root: Path) -> None:
    logical.save(mesh, root, 1, _large(mesh))


def _read_together(mesh: Mesh, directory: Path) -> int:
    """Load in many turns; how many bytes this rank read."""
    tensors = logical.empty(mesh.layout, mesh.rank)
    reads = plan_reads(pieces_of(tensors), read_index(directory)).reads
    with mock.patch.object(shards, "ROUND", 300):
        count = shards.read_shards_together(directory, reads, mesh)
    logical.assert_true(tensors)
    return count


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2), Layout(tp=4), Layout(pp=2, dp=2)], ids=str)
def test_every_byte_is_read_from_the_disk_by_one_rank(layout: Layout, saved: Path, pool: ProcessPool) -> None:
    counts = pool.run(_read_together, 4, saved, layout=layout)
    index = read_index(saved)
    assert sum(counts) == sum(chunk.nbytes for chunks in index.chunks.values() for chunk in chunks)
    assert max(counts) < 0.35 * sum(counts)
