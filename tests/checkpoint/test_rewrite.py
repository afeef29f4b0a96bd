"""Tensors written again, in other files or in one: every bit is the checkpoint's, as the libraries read it."""

from __future__ import annotations

import json
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.checkpoint import rewrite, storage
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.index import read_index
from megalite.checkpoint.rewrite import reshard, write_single_file
from megalite.checkpoint.storage import CheckpointDirectory
from megalite.config.errors import FlagError, UserError
from megalite.distributed.layout import Layout
from tests.checkpoint import logical
from tests.checkpoint.huggingface.folders import assert_equal
from tests.checkpoint.logical import found

WIDE = Layout(tp=4, pp=2)


def saved(root: Path, layout: Layout = WIDE) -> CheckpointDirectory:
    """A checkpoint as the ranks of a layout write it."""
    folder = root / storage.directory_name(7)
    logical.save_simulated(layout, folder)
    storage.write_documents(folder, storage.documents(logical.config(), {"training": {"iteration": 7}}))
    (root / storage.TRACKER).write_text("7")
    return found(root)


def damage(source: CheckpointDirectory) -> Path:
    """Spoil a stretch of a data file; the file."""
    data = next(source.path.glob("*.safetensors"))
    content = data.read_bytes()
    half = len(content) // 2
    data.write_bytes(content[:half] + bytes(byte ^ 1 for byte in content[half:]))
    return data


@pytest.mark.parametrize("files", [1, 3, 1000])
def test_every_bit_is_the_same_in_any_number_of_files(files: int, tmp_path: Path) -> None:
    source = saved(tmp_path / "run")
    assert reshard(source, tmp_path / "new", files=files) == tmp_path / "new" / "iter_0000007"
    target = found(tmp_path / "new")
    assert (target.iteration, target.note) == (7, "")
    index = read_index(target)
    assert all(len(chunks) == 1 for chunks in index.chunks.values())
    assert index.tensors == read_index(source).tensors
    assert len(index.files) == len(list(target.path.glob("*.safetensors"))) == min(files, len(index.chunks))
    for layout in (Layout(), WIDE):
        logical.check_simulated(layout, target.path)
    for name in storage.DOCUMENTS:
        assert (target.path / name).read_bytes() == (source.path / name).read_bytes()


def test_what_was_kept_of_the_base_model_comes_along(tmp_path: Path) -> None:
    source = saved(tmp_path / "run")
    (tmp_path / "run" / "huggingface").mkdir()
    (tmp_path / "run" / "huggingface" / "tokenizer.json").write_text("{}")
    reshard(source, tmp_path / "new")
    assert (tmp_path / "new" / "huggingface" / "tokenizer.json").read_text() == "{}"


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    source = saved(tmp_path / "run")
    with pytest.raises(CheckpointError, match="already holds checkpoints: choose a new folder"):
        reshard(source, tmp_path / "run")
    data = damage(source)
    with pytest.raises(CheckpointError, match=data.name):
        reshard(source, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def expected(*, optimizer: bool) -> dict[str, Tensor]:
    """All that the checkpoint holds, by the names wanted."""
    return {
        key.removeprefix("model."): logical.truth(key, shape, logical.dtype_of(key))
        for key, shape in logical.logical_shapes().items()
        if optimizer or key.startswith("model.")
    }


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_the_libraries_read_every_bit(suffix: str, optimizer: bool, tmp_path: Path) -> None:
    source, out = saved(tmp_path / "run"), tmp_path / "new" / f"model{suffix}"
    line = write_single_file(source, out, optimizer=optimizer)
    ours = load_file(out) if suffix == ".safetensors" else torch.load(out, weights_only=True)
    theirs = expected(optimizer=optimizer)
    assert_equal(ours, theirs)
    assert f"{out}: {len(theirs)} tensors" in line
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_tensors_lie_without_gaps_at_multiples_of_their_format(tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    write_single_file(saved(tmp_path / "run"), out, optimizer=True)
    content = out.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt", "iteration": "7"}
    places = sorted((*entry["data_offsets"], entry["dtype"]) for entry in header.values())
    assert length % 8 == places[0][0] == 0
    assert all(begin == end for (_, end, _), (begin, _, _) in pairwise(places))
    assert all(begin % {"F32": 4, "BF16": 2}[dtype] == 0 for begin, _, dtype in places)
    assert places[-1][1] == len(content) - 8 - length


def test_one_tensor_is_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is gone when the next is read."""
    alive: list[weakref.ref[Tensor]] = []
    read = rewrite.read_logical

    def watched(*arguments: Any) -> Tensor:
        assert all(reference() is None for reference in alive)
        tensor = read(*arguments)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(rewrite, "read_logical", watched)
    write_single_file(saved(tmp_path / "run"), tmp_path / "model.safetensors")
    assert len(alive) == len(expected(optimizer=False))


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "run"), tmp_path / "model.safetensors"
    out.write_text("old")
    data = damage(source)
    with pytest.raises(UserError, match=data.name):
        write_single_file(source, out, optimizer=True)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]
    write_single_file(saved(tmp_path / "sound"), out)
    assert_equal(load_file(out), expected(optimizer=False))


def test_a_name_of_no_known_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match=r"model.bin: the name must end in .safetensors, .pt, .pth"):
        write_single_file(saved(tmp_path / "run"), tmp_path / "model.bin")
