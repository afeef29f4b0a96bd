"""Runs of one process, which several files compare other layouts with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import DOCUMENTS, DROPOUT, LLAMA, T0, outputs, program, run


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T0 in float64, started by hand."""
    folder = tmp_path_factory.mktemp("reference")
    program(f"{T0} --fp64 {outputs(folder)}")
    return folder


@pytest.fixture(scope="session")
def dropout_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with dropout in all its places."""
    folder = tmp_path_factory.mktemp("dropout")
    run(f"{T0} {DROPOUT} --fp64 {outputs(folder)} --num-workers 0")
    return folder


@pytest.fixture(scope="session")
def llama_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network in Llama's style, untied, on data with document masks, with dropout."""
    folder = tmp_path_factory.mktemp("llama")
    run(f"{T0} {LLAMA} {DROPOUT} {DOCUMENTS} --fp64 {outputs(folder)} --num-workers 0")
    return folder
