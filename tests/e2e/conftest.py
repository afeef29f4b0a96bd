"""Runs of one process, which several files compare other layouts with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import T0, outputs, program


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T0 in float64, started by hand."""
    folder = tmp_path_factory.mktemp("reference")
    program(f"{T0} --fp64 {outputs(folder)}")
    return folder
