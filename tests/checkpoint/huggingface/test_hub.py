"""Models of a hub by name, with a stand-in for the hubs' libraries: nothing here reaches a network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.checkpoint.huggingface.hub import local_folder, published_name
from megalite.config.errors import UserError

LIBRARIES = {"huggingface": "huggingface_hub", "modelscope": "modelscope"}


@pytest.mark.parametrize("hub", LIBRARIES)
def test_a_name_becomes_the_folder_that_the_hubs_own_library_gives(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return "/cache/model"

    for package in LIBRARIES.values():
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    monkeypatch.setitem(sys.modules, LIBRARIES[hub], SimpleNamespace(snapshot_download=snapshot_download))
    assert local_folder("owner/some-model.v1", hub) == "/cache/model"
    ((name, patterns),) = asked
    assert name == "owner/some-model.v1"
    assert "*.safetensors" in patterns


def test_a_folder_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in LIBRARIES.values():
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder("owner/model", "huggingface") == "owner/model"


def test_what_cannot_be_had_is_told_with_what_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **_: Any) -> str:
        raise OSError("no route to the hub\nand more")

    with pytest.raises(UserError, match=r"nowhere is no folder here, nor the name of a model on a hub \(OWNER/NAME\)"):
        local_folder("nowhere", "huggingface")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UserError, match="--hub modelscope needs the package modelscope: pip install modelscope"):
        local_folder("owner/model", "modelscope")
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fail))
    with pytest.raises(UserError, match="doesn't give it: no route to the hub .HF_ENDPOINT names a mirror, or try"):
        local_folder("owner/model", "huggingface")


def test_a_model_in_the_hubs_cache_goes_by_its_published_name() -> None:
    assert published_name("/root/.cache/huggingface/hub/models--owner--a--model/snapshots/0a1b") == "owner/a--model"
    assert published_name("models/own") == "models/own"
