"""Folders that lack something, hold too much or are damaged: each is refused with the file or tensor by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.load import huggingface_to_megalite
from megalite.models.whole import build_whole
from tests.checkpoint.huggingface import folders

CASE = "llama, grouped, tied"


def refused(source: Path, tmp_path: Path) -> str:
    """The message of a conversion that fails and leaves nothing."""
    with pytest.raises(CheckpointError) as raised:
        huggingface_to_megalite(source, tmp_path / "run", build_whole)
    assert not (tmp_path / "run").exists()
    return str(raised.value)


def tensors(**change: Any) -> Callable[[Path], None]:
    return lambda source: folders.change_tensors(source, {name.replace("__", "."): t for name, t in change.items()})


def config(**change: Any) -> Callable[[Path], None]:
    return lambda source: folders.change_config(source, change)


def truncate(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def pointer(source: Path) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n"
    (source / "model.safetensors").write_text(text)


def no_config(source: Path) -> None:
    (source / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (tensors(model__layers__1__self_attn__k_proj__weight=None), "lacks\n  model.layers.1.self_attn.k_proj.weight"),
        (
            tensors(model__layers__1__self_attn__k_proj__bias=torch.zeros(16)),
            "holds tensors that config.json's network doesn't have:\n  model.layers.1.self_attn.k_proj",
        ),
        (tensors(model__norm__weight=torch.zeros(31)), "model.norm.weight: (31,), but (32,) by config.json"),
        (
            tensors(model__norm__weight=torch.zeros(32, dtype=torch.int8)),
            "quantised weights are not read):\n  model.norm.weight",
        ),
        (
            tensors(model__layers__0__mlp__up_proj__weight=torch.zeros(48, 32).bfloat16()),
            "layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight must have the same format",
        ),
        (
            tensors(lm_head__weight=torch.zeros(131, 32)),
            "is true in config.json, but lm_head.weight and model.embed_tokens.weight differ",
        ),
        (config(vocab_size=130), "model.embed_tokens.weight: (131, 32), but (130, 32) by config.json"),
        (config(num_hidden_layers=3), "lacks\n  model.layers.2.input_layernorm.weight"),
        (config(num_hidden_layers=1), "config.json's network doesn't have:\n  model.layers.1.input_layernorm.weight"),
        (pointer, "model.safetensors: a Git LFS pointer instead of the file"),
        (truncate, "model.safetensors: "),
        (pickled, "pytorch_model.bin is a pickle"),
        (no_config, "config.json: No such file"),
    ],
)
def test_what_is_wrong_is_named(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    source = folders.save(CASE, tmp_path / "hf")
    damage(source)
    message = refused(source, tmp_path)
    assert words in message
    assert str(source) in message


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    source = folders.save(CASE, tmp_path / "hf", shard_size="20KB")
    missing = sorted(source.glob("model-*.safetensors"))[1]
    missing.unlink()
    assert str(missing) in refused(source, tmp_path)


def test_an_index_that_its_files_do_not_keep_is_refused(tmp_path: Path) -> None:
    source = folders.save(CASE, tmp_path / "hf", shard_size="20KB")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text("utf-8"))
    files = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == files[0])
    index["weight_map"][name] = files[1]
    path.write_text(json.dumps(index), encoding="utf-8")
    assert f"{files[1]} lacks {name}" in refused(source, tmp_path)
    index["weight_map"][name] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index), encoding="utf-8")
    assert "'../elsewhere.safetensors', which is not a file in this folder" in refused(source, tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refused(tmp_path / "nowhere", tmp_path)
