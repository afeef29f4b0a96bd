"""The index: nothing in it runs, and whatever is wrong with it is an error that names the file."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megalite.checkpoint.checkpoint import load_checkpoint
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.metadata import INDEX_FILE, read_index
from megalite.checkpoint.storage import CHECKSUMS, find_checkpoint
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import single_process_mesh
from tests.checkpoint import logical
from tests.helpers import pieces_of

ONE = single_process_mesh()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return logical.save(ONE, tmp_path / "run", 100)


def edit(saved: Path, change: Callable[[Metadata], Any]) -> None:
    """Rewrite the index after a change."""
    metadata = pickle.loads((saved / INDEX_FILE).read_bytes())
    change(metadata)
    (saved / INDEX_FILE).write_bytes(pickle.dumps(metadata))


class Hostile:
    """Runs a command where it's unpickled."""

    def __init__(self, marker: Path, function: Any = os.system):
        self.marker, self.function = marker, function

    def __reduce__(self) -> Any:
        return self.function, (f"touch {self.marker}",)


@pytest.mark.parametrize("function", [os.system, eval, torch.load, torch.hub.load])
def test_a_pickle_that_calls_anything_is_refused_and_calls_nothing(function: Any, saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (saved / INDEX_FILE).write_bytes(pickle.dumps(Hostile(marker, function)))
    (saved / CHECKSUMS).unlink()  # as whoever means harm would
    with pytest.raises(CheckpointError, match=rf"\.metadata is not .*it refers to .*{function.__name__}"):
        read_index(saved)
    with pytest.raises(CheckpointError, match="it refers to"):
        load_checkpoint(saved, mesh=ONE, pieces=pieces_of(logical.empty(Layout(), 0)))
    with pytest.raises(CheckpointError, match="it refers to"):
        find_checkpoint(saved.parent)
    assert not marker.exists()


def test_a_dotted_name_does_not_reach_through_an_allowed_module(saved: Path) -> None:
    # Protocol 4's STACK_GLOBAL looks up "hub.load" of "torch".
    payload = b"\x80\x04\x8c\x05torch\x8c\x08hub.load\x93."
    (saved / INDEX_FILE).write_bytes(payload)
    with pytest.raises(CheckpointError, match="it refers to torch.hub.load"):
        read_index(saved)


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage", pickle.dumps({}), pickle.dumps(None)])
def test_anything_but_an_index_is_refused(content: bytes, saved: Path) -> None:
    (saved / INDEX_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is not a checkpoint's index"):
        read_index(saved)


def test_a_truncated_index_is_refused(saved: Path) -> None:
    data = (saved / INDEX_FILE).read_bytes()
    for length in range(0, len(data), len(data) // 50):
        (saved / INDEX_FILE).write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"\.metadata is not a checkpoint's index"):
            read_index(saved)


def _outside(metadata: Metadata) -> None:
    for stored in metadata.storage_data.values():
        stored.relative_path = "../" + stored.relative_path


def _negative(metadata: Metadata) -> None:
    for stored in metadata.storage_data.values():
        stored.offset = -1


def _huge(metadata: Metadata) -> None:
    for tensor in metadata.state_dict_metadata.values():
        tensor.chunks[0].sizes = torch.Size((2**40,) * len(tensor.size))  # type: ignore[union-attr]


def _no_place(metadata: Metadata) -> None:
    metadata.storage_data.popitem()


def _bytes(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"] = BytesStorageMetadata()


@pytest.mark.parametrize("change", [_outside, _negative, _huge, _no_place, _bytes])
def test_an_index_that_contradicts_itself_is_refused(change: Callable[[Metadata], None], saved: Path) -> None:
    edit(saved, change)
    with pytest.raises(CheckpointError, match=r"\.metadata is not a checkpoint's index"):
        read_index(saved)


def test_a_dropped_chunk_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    logical.save_simulated(Layout(tp=4), tmp_path / "shards")
    key = "model.layers.2.fc1.weight"
    edit(tmp_path / "shards", lambda metadata: metadata.state_dict_metadata[key].chunks.pop())  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"only parts of\n  model\.layers\.2\.fc1\.weight"):
        load_checkpoint(tmp_path / "shards", mesh=ONE, pieces=pieces_of(logical.empty(Layout(), 0)))
