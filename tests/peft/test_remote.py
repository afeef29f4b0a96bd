"""Adapters in object storage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megalite.checkpoint.errors import CheckpointError, attempt
from megalite.files.atomic import PENDING
from megalite.files.remote import Remote
from megalite.peft.files import read_adapter, read_class_names, write_adapter
from tests.s3 import at, down_from


@pytest.fixture
def folder() -> Iterator[Remote]:
    """An empty place in memory."""
    place = at("memory://store/adapter")
    place.remove_tree()
    yield place
    place.remove_tree()


def write(folder: Remote, value: int, classes: list[str] | None = None) -> None:
    config = {"peft_type": "LORA", "r": value, "lora_alpha": 4}
    write_adapter(str(folder), config, {"w": torch.full((1,), float(value))}, classes)


def value_of(folder: Remote) -> int:
    """Which adapter is there: all of its files say the same."""
    adapter, classes = read_adapter(folder), read_class_names(folder)
    assert adapter.config["r"] == adapter.tensors["w"].item() == len(classes or "x")
    return int(adapter.config["r"])


def test_what_is_written_is_read_back_and_nothing_else_in_the_folder_changes(folder: Remote) -> None:
    (folder / "notes.txt").write_text("mine")
    write(folder, 2, ["yes", "no"])
    write(folder, 1)
    assert value_of(folder) == 1
    assert sorted(each.name for each in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "notes.txt",
    ]


def test_a_writer_that_ends_at_any_operation_leaves_a_whole_adapter_and_the_next_one_clears_up(folder: Remote) -> None:
    seen = set()
    for operation in range(1, 200):
        folder.remove_tree()
        write(folder, 2, ["yes", "no"])
        with down_from(operation) as count:
            wrong = attempt(lambda: write(folder, 1))
        seen.add(found := value_of(folder))
        assert wrong is not None or found == 1
        if count[0] < operation:
            assert seen == {1, 2}
            return
        assert wrong is not None and f"cannot write {folder}: the store is down" in wrong
        write(folder, 3, ["a", "b", "c"])
        assert value_of(folder) == 3
        assert not (folder / PENDING).is_dir()
    raise AssertionError("it never ended well")


def test_a_folder_without_an_adapter_is_told(folder: Remote) -> None:
    with pytest.raises(CheckpointError, match="memory://store/adapter holds no adapter_config.json"):
        read_adapter(folder)
