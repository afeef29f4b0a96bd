"""One file of a checkpoint's tensors: what the libraries read from it is the checkpoint's, bit for bit."""

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

from megalite.checkpoint import single_file
from megalite.checkpoint.single_file import write_single_file
from megalite.config.errors import FlagError, UserError
from tests.checkpoint import logical
from tests.checkpoint.test_reshard import damage, saved


def expected(*, optimizer: bool) -> dict[str, Tensor]:
    """All that the checkpoint holds, by the names wanted."""
    return {
        key.removeprefix("model."): logical.truth(key, shape, logical.dtype_of(key))
        for key, shape in logical.logical_shapes().items()
        if optimizer or key.startswith("model.")
    }


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


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
    read = single_file.read_logical

    def watched(*arguments: Any) -> Tensor:
        assert all(reference() is None for reference in alive)
        tensor = read(*arguments)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(single_file, "read_logical", watched)
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
