"""Checkpoints of older versions, in torch.distributed.checkpoint's format: they load bit for bit; nothing in their
index runs, and whatever is wrong with it is an error that names the file.

`dcp/` holds one that such a version wrote, of a few tensors of `logical` as two tensor-parallel ranks have them.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megalite.checkpoint.checkpoint import load_checkpoint
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.index import read_index, stored_tensors
from megalite.checkpoint.rewrite import reshard
from megalite.checkpoint.storage import CHECKSUMS, find_checkpoint
from megalite.checkpoint.torch_dist import INDEX_FILE
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import single_process_mesh
from tests.checkpoint import logical
from tests.helpers import pieces_of

ONE = single_process_mesh()


OLD = Path(__file__).parent / "dcp"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "run")) / "iter_0000007"


def load(saved: Path) -> None:
    keys = stored_tensors(saved).keys()
    tensors = [item for item in logical.empty(Layout(), 0) if item[0] in keys]
    assert len(tensors) == len(keys) == 4
    load_checkpoint(saved, mesh=ONE, pieces=pieces_of(tensors))
    logical.assert_true(tensors)


def test_every_bit_comes_back_and_is_written_again_in_the_new_format(tmp_path: Path) -> None:
    load(logical.found(OLD).path)
    new = reshard(logical.found(OLD), tmp_path / "new")
    assert (new / "index.json").exists()
    load(new)


def test_a_flipped_bit_in_a_tensor_is_found(saved: Path) -> None:
    needle = logical.truth("optimizer.main.layers.0.fc2.weight", (6, 8), torch.float32)[:, :4].numpy().tobytes()
    victim = next(path for path in saved.glob("*.distcp") if needle in path.read_bytes())
    bad = bytearray(victim.read_bytes())
    bad[bad.index(needle) + 5] ^= 1
    victim.write_bytes(bad)
    with pytest.raises(CheckpointError, match="damaged: wrong checksum"):
        load(saved)


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
        load(saved)
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


def test_a_dropped_chunk_is_an_error_that_names_the_key(saved: Path) -> None:
    key = "model.layers.0.fc1.weight"
    edit(saved, lambda metadata: metadata.state_dict_metadata[key].chunks.pop())  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"only parts of\n  model\.layers\.0\.fc1\.weight"):
        load(saved)
