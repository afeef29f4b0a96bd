"""Files written anew hold the same bits, however many there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint import storage
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.metadata import read_index
from megalite.checkpoint.reshard import reshard
from megalite.checkpoint.storage import CheckpointDirectory, find_checkpoint
from megalite.distributed.layout import Layout
from tests.checkpoint import logical

WIDE = Layout(tp=4, pp=2)


def saved(root: Path, layout: Layout = WIDE) -> CheckpointDirectory:
    """A checkpoint as the ranks of a layout write it."""
    folder = root / storage.directory_name(7)
    logical.save_simulated(layout, folder)
    storage.write_documents(folder, storage.documents(logical.config(), {"training": {"iteration": 7}}))
    (root / storage.TRACKER).write_text("7")
    return found(root)


def found(root: Path) -> CheckpointDirectory:
    checkpoint = find_checkpoint(root)
    assert checkpoint is not None
    return checkpoint


def damage(source: CheckpointDirectory) -> Path:
    """Spoil a stretch of a data file; the file."""
    data = next(source.path.glob("*.distcp"))
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
    assert index.tensors() == read_index(source).tensors()
    assert len(index.files) == len(list(target.path.glob("*.distcp"))) == min(files, len(index.chunks))
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
