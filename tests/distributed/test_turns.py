"""Each machine's first process works before the others, which wait without a collective."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megalite.distributed import turns
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.pool import ProcessPool
from megalite.distributed.turns import first_of_machine_first

TIMEOUT = 4.0


def _in_turn(mesh: Mesh, folder: str) -> list[str]:
    """What each process finds done when its turn comes; ranks 0 and 2 are their machines' first."""

    def work() -> list[str]:
        found = sorted(path.name for path in Path(folder).iterdir())
        if mesh.rank == 2:
            time.sleep(0.3)  # the slower of the two machines
        (Path(folder) / str(mesh.rank)).touch()
        return found

    return first_of_machine_first(work, mesh, first=mesh.rank in (0, 2))


def test_the_others_begin_when_the_first_of_every_machine_is_done(pool: ProcessPool, tmp_path: Path) -> None:
    found = pool.run(_in_turn, 4, str(tmp_path), layout=Layout(dp=4))
    for rank in (1, 3):
        assert {"0", "2"} <= set(found[rank])
    for rank in (0, 2):
        assert not {"1", "3"} & set(found[rank])


def _longer_than_a_collective_may_take() -> str:
    mesh = Mesh.create(Layout(dp=2), torch.device("cpu"), backend="gloo", timeout=timedelta(seconds=TIMEOUT))

    def work() -> str:
        time.sleep(TIMEOUT + 1 if mesh.rank == 0 else 0)
        return "done"

    result = first_of_machine_first(work, mesh, first=mesh.rank == 0)
    mesh.close()
    return result


def test_waiting_has_no_timeout(pool: ProcessPool) -> None:
    assert pool.run(_longer_than_a_collective_may_take, 2) == ["done", "done"]


def _failing(mesh: Mesh) -> str:
    def work() -> None:
        raise ValueError("mine")

    try:
        first_of_machine_first(work, mesh, first=mesh.rank == 0)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_failure_of_the_first_ends_the_wait_of_the_others(pool: ProcessPool) -> None:
    first, other = pool.run(_failing, 2, layout=Layout(dp=2))
    assert first == "ValueError: mine"
    assert other.startswith("RuntimeError: remote process exited")


def test_those_that_wait_long_ask_the_store_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    pauses: list[float] = []

    def sleep(pause: float) -> None:
        pauses.append(pause)
        if sum(pauses) > 60:
            store.add("turns/key", 1)  # the other process is done

    monkeypatch.setattr(turns, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(turns, "broadcast_object", lambda *_: "key")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    mesh: Mesh = SimpleNamespace(world=SimpleNamespace(size=2))  # type: ignore[assignment]
    assert first_of_machine_first(lambda: "mine", mesh, first=False) == "mine"
    assert 60 <= len(pauses) < 70 and max(pauses) == 1.0
