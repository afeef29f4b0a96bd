"""The process pool: results, errors, hangs, deaths, and that nothing outlives its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.distributed.collectives import all_reduce
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool, WorkerError, WorkerTimeout
from tests.helpers import PRELOADED

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def small_pool() -> Iterator[ProcessPool]:
    """A pool of its own, since these tests break it."""
    with ProcessPool(2, preload=PRELOADED) as workers:
        yield workers


def _coordinates(mesh: Mesh, tag: str) -> tuple[str, int, dict[str, int]]:
    return tag, mesh.rank, mesh.coordinates


def _tensors(size: int) -> dict[str, Tensor]:
    whole = torch.arange(size, dtype=torch.bfloat16)
    return {"half": whole, "view": whole[:4].view(2, 2).t(), "parameter": torch.nn.Parameter(torch.ones(3))}


def _raise_on(mesh: Mesh, rank: int) -> None:
    if mesh.rank == rank:
        raise ValueError("a broken rank")
    all_reduce(torch.ones(1), mesh.world)


def _exit(mesh: Mesh) -> None:
    if mesh.rank == 1:
        os._exit(7)
    all_reduce(torch.ones(1), mesh.world)


def _sleep_in_a_function_with_this_name(mesh: Mesh) -> None:
    if mesh.rank == 1:
        time.sleep(60)
    all_reduce(torch.ones(1), mesh.world)


def _process_id() -> int:
    return os.getpid()


def _unpicklable() -> object:
    return lambda: None


def test_results_come_in_the_order_of_ranks(pool: ProcessPool) -> None:
    layout = Layout(tp=2, pp=2)
    results = pool.run(_coordinates, 4, "tag", layout=layout)
    assert results == [("tag", rank, layout.coordinates(rank)) for rank in range(4)]


def test_tensors_come_back_by_value(pool: ProcessPool) -> None:
    results = pool.run(_tensors, 2, 100_000)
    assert torch.equal(results[1]["half"], torch.arange(100_000, dtype=torch.bfloat16))
    assert torch.equal(results[0]["view"], torch.tensor([[0, 2], [1, 3]], dtype=torch.bfloat16))
    assert isinstance(results[0]["parameter"], torch.nn.Parameter)


def test_workers_stay_between_calls(pool: ProcessPool) -> None:
    assert pool.run(_process_id, 4) == pool.run(_process_id, 4)


def test_a_world_size_that_does_not_fit_is_refused(pool: ProcessPool) -> None:
    with pytest.raises(ValueError, match="the pool has 4 workers"):
        pool.run(_process_id, 5)
    with pytest.raises(ValueError, match="the layout has 2 ranks"):
        pool.run(_coordinates, 4, "x", layout=Layout(tp=2))


def test_an_exception_gives_its_rank_and_traceback_and_the_pool_recovers(small_pool: ProcessPool) -> None:
    with pytest.raises(WorkerError, match="a broken rank") as caught:
        small_pool.run(_raise_on, 2, 1, layout=Layout(dp=2))
    assert caught.value.rank == 1
    assert "_raise_on" in caught.value.text
    assert len(set(small_pool.run(_process_id, 2))) == 2


def test_a_result_that_cannot_be_pickled_is_an_error(small_pool: ProcessPool) -> None:
    with pytest.raises(WorkerError, match="[Pp]ickle"):
        small_pool.run(_unpicklable, 1)


def test_a_dead_worker_is_named_with_its_exit_code(small_pool: ProcessPool) -> None:
    with pytest.raises(WorkerError, match="exit code 7") as caught:
        small_pool.run(_exit, 2, layout=Layout(dp=2))
    assert caught.value.rank == 1


def test_a_hang_gives_every_ranks_stack_and_the_pool_recovers(small_pool: ProcessPool) -> None:
    with pytest.raises(WorkerTimeout) as caught:
        small_pool.run(_sleep_in_a_function_with_this_name, 2, timeout=1.0, layout=Layout(dp=2))
    assert set(caught.value.stacks) == {0, 1}
    assert all("_sleep_in_a_function_with_this_name" in stack for stack in caught.value.stacks.values())
    assert "all_reduce" in caught.value.stacks[0]
    assert len(set(small_pool.run(_process_id, 2))) == 2


def test_closing_ends_the_workers_and_the_next_call_starts_new_ones(small_pool: ProcessPool) -> None:
    before = small_pool.run(_process_id, 2)
    small_pool.close()
    assert not any(map(_is_running, before))
    assert set(small_pool.run(_process_id, 2)).isdisjoint(before)
    small_pool.close()


_PARENT = """
import os, signal, sys
from megalite.distributed.pool import ProcessPool
if __name__ == "__main__":
    pool = ProcessPool(2)
    print(*pool.run(os.getpid, 2), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["killed", pytest.param("returns", marks=pytest.mark.slow)])
def test_workers_die_with_their_parent(tmp_path: Path, end: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script, end], capture_output=True, text=True, env=environment, timeout=100)
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2, done.stderr
    deadline = time.monotonic() + 30
    while any(map(_is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_running, workers))


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    # An orphan that ended may stay in the table until somebody reads its exit code.
    status = Path(f"/proc/{process_id}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
