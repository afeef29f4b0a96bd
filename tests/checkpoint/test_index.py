"""The index: whatever is wrong with it is an error that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.checkpoint import load_checkpoint
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.index import INDEX_FILE, read_index
from megalite.checkpoint.tensor_file import blocks_of
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import single_process_mesh
from tests.checkpoint import logical
from tests.helpers import pieces_of

ONE = single_process_mesh()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return logical.save(ONE, tmp_path / "run", 100)


def edit(saved: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the index after a change of its tensors."""
    values = json.loads((saved / INDEX_FILE).read_text())
    change(values["tensors"])
    (saved / INDEX_FILE).write_text(json.dumps(values))


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage", b"{}", b"null", b"[]", b'{"format": "megalite 3"}'])
def test_anything_but_an_index_is_refused(content: bytes, saved: Path) -> None:
    (saved / INDEX_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index\.json is not a checkpoint's index"):
        read_index(saved)


def test_a_truncated_index_is_refused(saved: Path) -> None:
    data = (saved / INDEX_FILE).read_bytes()
    for length in range(0, len(data), len(data) // 50):
        (saved / INDEX_FILE).write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"index\.json is not a checkpoint's index"):
            read_index(saved)


START, SIZES, FILE, OFFSET = range(4)


def _set(field: int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        chunk = tensors["model.layers.2.fc2.weight"]["chunks"][0]
        chunk[field] = value

    return change


def _drop(tensors: dict[str, Any]) -> None:
    tensors["model.layers.2.fc2.weight"]["chunks"][0].pop()


def _unknown(tensors: dict[str, Any]) -> None:
    tensors["model.layers.2.fc2.weight"]["dtype"] = "F7"


def _negative(tensors: dict[str, Any]) -> None:
    tensors["model.layers.2.fc2.weight"]["shape"] = [-6, -8]


@pytest.mark.parametrize(
    "change",
    [
        _set(FILE, "../rank00000_0.safetensors"),
        _set(FILE, "/etc/passwd"),
        _set(FILE, 5),
        _set(OFFSET, -1),
        _set(OFFSET, 1.5),
        _set(SIZES, [2**40, 2**40]),
        _set(SIZES, [6]),
        _set(START, [-1, 0]),
        _set(START, "00"),
        _drop,
        _unknown,
        _negative,
    ],
)
def test_an_index_that_contradicts_itself_is_refused(change: Callable[[dict[str, Any]], None], saved: Path) -> None:
    edit(saved, change)
    with pytest.raises(CheckpointError, match=r"index\.json is not a checkpoint's index"):
        read_index(saved)


def test_a_dropped_chunk_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    logical.save_simulated(Layout(tp=4), tmp_path / "shards")
    edit(tmp_path / "shards", lambda tensors: tensors["model.layers.2.fc1.weight"]["chunks"].pop())
    with pytest.raises(CheckpointError, match=r"only parts of\n  model\.layers\.2\.fc1\.weight"):
        load_checkpoint(tmp_path / "shards", mesh=ONE, pieces=pieces_of(logical.empty(Layout(), 0)))


@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 3), (2, 4, 3), (2, 1, 9, 3), (3, 0, 2)])
@pytest.mark.parametrize("block", [1, 12, 40, 1000])
def test_blocks_are_successive_runs_that_cover_a_tensor(shape: tuple[int, ...], block: int) -> None:
    blocks = list(blocks_of(shape, 4, block))
    place = 0
    for start, sizes in blocks:
        strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
        assert sum(a * n for a, n in zip(start, strides, strict=True)) == place, (start, sizes)
        last = sum((a + n - 1) * stride for a, n, stride in zip(start, sizes, strides, strict=True))
        assert last + 1 - place == prod(sizes), "one run"
        assert prod(sizes) * 4 <= max(block, 4 * (shape[-1] if shape else 1))
        place += prod(sizes)
    assert place == prod(shape)
