"""Saves in the background: they hold the state of their step, in order, and a failure reaches all ranks at one step."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.checkpoint import Planned, plan
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.saver import Saver, Staging
from megalite.checkpoint.storage import TRACKER
from megalite.config.schema import RunConfig
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Group, Mesh, single_process_mesh
from megalite.distributed.param_spec import ParamSpec, Place, cut
from megalite.distributed.pool import ProcessPool
from tests.checkpoint.one_tensor import KEEP_ALL, ONE, SPEC, names, value_of
from tests.checkpoint.test_shards import file_size_limit
from tests.helpers import pieces_of


def planned(root: Path, iteration: int, tensor: torch.Tensor, mesh: Mesh = ONE, spec: ParamSpec = SPEC) -> Planned:
    return plan(
        root,
        iteration,
        mesh=mesh,
        pieces=pieces_of([("model.w", tensor, spec)]),
        config=RunConfig(),
        training_state={"iteration": iteration},
        retain=KEEP_ALL,
    )


def test_a_checkpoint_holds_the_state_of_its_step_whatever_comes_after(tmp_path: Path) -> None:
    said: list[str] = []
    saver, tensor, free = Saver(ONE, said.append, background=True), torch.full((100,), 1.0), threading.Event()
    saver.submit(lambda group: free.wait(), "first")
    saver.poll()
    assert said == []  # the writer is busy, and nobody waits for it
    free.set()
    saver.save(planned(tmp_path, 1, tensor))
    tensor.fill_(2.0)
    saver.save(planned(tmp_path, 2, tensor))
    tensor.fill_(3.0)
    saver.wait()
    assert [value_of(tmp_path / f"iter_000000{n}") for n in (1, 2)] == [1.0, 2.0]
    assert (tmp_path / TRACKER).read_text() == "2"
    assert said == ["first", *(f"saved {tmp_path}/iter_000000{n}" for n in (1, 2))]


def test_copies_lie_in_the_same_memory_from_save_to_save(tmp_path: Path) -> None:
    staging, tensor = Staging(torch.device("cpu")), torch.arange(100.0)
    chunks = planned(tmp_path, 1, tensor).chunks
    first = [chunk.read() for chunk in staging.copy(chunks)]
    tensor.neg_()
    second = [chunk.read() for chunk in staging.copy(chunks)]
    assert [copy.data_ptr() for copy in first] == [copy.data_ptr() for copy in second]
    assert torch.equal(second[0], -torch.arange(100.0))


def _fail(group: Group) -> None:
    raise ValueError("a mistake")


def test_a_mistake_of_one_rank_alone_is_raised_at_its_next_step() -> None:
    saver = Saver(ONE, print, background=True)
    saver.submit(_fail, "never said")
    with pytest.raises(ValueError, match="a mistake"):
        saver.wait()


def _save_until_it_fails(mesh: Mesh, root: Path) -> tuple[int, str]:
    """The step, of many, at which the failure of the save of step 2 is raised on this rank."""
    saver = Saver(mesh, print, background=True)
    spec = ParamSpec((2, 25_000), (1, 25_000), cut((2, 25_000), 0, Place(mesh.layout, mesh.rank)))
    tensor = torch.full((1, 25_000), float(mesh.rank))
    saver.save(planned(root, 1, tensor, mesh, spec))
    saver.wait()
    with file_size_limit(50_000 if mesh.rank == 1 else -1):
        saver.save(planned(root, 2, tensor, mesh, spec))
        for step in range(100_000):
            try:
                saver.poll()
            except CheckpointError as error:
                return step, str(error)
    raise AssertionError("it was silent")


def test_a_full_disk_on_one_rank_ends_all_at_one_step_with_one_message(tmp_path: Path, pool: ProcessPool) -> None:
    found = pool.run(_save_until_it_fails, 2, tmp_path, layout=Layout(tp=2))
    assert len(set(found)) == 1
    assert "iter_0000002 was not saved: rank 1: " in found[0][1] and "File too large" in found[0][1]
    assert names(tmp_path) == ["iter_0000001", TRACKER]


@pytest.mark.cuda
def test_tensors_on_a_gpu_are_copied_to_page_locked_memory(tmp_path: Path) -> None:
    mesh = single_process_mesh("cuda")
    tensor = torch.full((100,), 5.0, device="cuda")
    saver = Saver(mesh, print, background=True)
    saver.save(planned(tmp_path, 1, tensor, mesh))
    tensor.fill_(6.0)
    saver.wait()
    assert value_of(tmp_path / "iter_0000001") == 5.0
