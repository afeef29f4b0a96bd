"""Models of a hub by name, with a stand-in for the hubs' libraries: nothing here reaches a network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from megalite.checkpoint.huggingface.hub import local_folder, published_name
from megalite.config.errors import UserError
from megalite.inference.load import name_of
from megalite.peft.files import base_note

LIBRARIES = {"huggingface": "huggingface_hub", "modelscope": "modelscope"}


@pytest.mark.parametrize("hub", LIBRARIES)
def test_a_name_becomes_the_folder_that_the_hubs_own_library_gives(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def snapshot_download(name: str, **patterns: list[str]) -> str:
        asked.append((name, patterns))
        return "/cache/model"

    for package in LIBRARIES.values():
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    monkeypatch.setitem(sys.modules, LIBRARIES[hub], SimpleNamespace(snapshot_download=snapshot_download))
    assert local_folder("owner/some-model.v1", hub) == "/cache/model"
    ((name, patterns),) = asked
    assert name == "owner/some-model.v1"
    read = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "additional_chat_templates/a.jinja"]
    other = ["consolidated.safetensors", "original/params.json", "original/model.safetensors", "onnx/config.json"]
    assert list(filter_repo_objects([*read, *other, "pytorch_model.bin"], **patterns)) == read


def test_a_folder_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in LIBRARIES.values():
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder("owner/model", "huggingface") == "owner/model"


def test_what_cannot_be_had_is_told_with_what_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **_: Any) -> str:
        raise OSError("no route to the hub\nand more")

    with pytest.raises(UserError, match=r"nowhere is neither a folder here nor the name of a model on a hub"):
        local_folder("nowhere", "huggingface")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UserError, match="--hub modelscope needs the package modelscope: pip install modelscope"):
        local_folder("owner/model", "modelscope")
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fail))
    with pytest.raises(
        UserError, match="be downloaded from huggingface: no route to the hub .HF_ENDPOINT sets a mirror"
    ):
        local_folder("owner/model", "huggingface")


def test_a_model_in_the_hubs_cache_goes_by_its_published_name() -> None:
    assert published_name("/root/.cache/huggingface/hub/models--owner--a--model/snapshots/0a1b") == "owner/a--model"
    assert published_name("models/own") == "models/own"


def test_a_model_in_the_hubs_cache_is_the_one_that_its_adapter_names(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "owner/tiny"}')
    cached = "/root/.cache/huggingface/hub/models--owner--{}/snapshots/0a1b"
    assert base_note(tmp_path, cached.format("tiny")) is None
    assert "for owner/tiny, but is used with owner/large: " in str(base_note(tmp_path, cached.format("large")))
    assert name_of(cached.format("tiny")) == "owner/tiny"
    assert name_of("models/tiny") == "tiny"
