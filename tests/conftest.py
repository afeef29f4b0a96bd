"""Fixtures for the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from megalite.distributed.pool import ProcessPool
from tests.helpers import PRELOADED
from tests.s3 import serving

POOL_SIZE, FULL_POOL_SIZE = 4, 8  # processes of the suite's layouts, and of the full matrices


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[ProcessPool]:
    """The session's worker processes, started by the first test that calls them."""
    with ProcessPool(FULL_POOL_SIZE if _is_full(pytestconfig) else POOL_SIZE, preload=PRELOADED) as workers:
        yield workers


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The address of a bucket on a server of the S3 protocol, which the environment names while the session runs."""
    with serving() as environment, mock.patch.dict(os.environ, environment):
        import s3fs

        s3fs.S3FileSystem().mkdir("tests")
        yield "s3://tests"


def _is_full(config: pytest.Config) -> bool:
    """Whether the run asks for the full matrices."""
    return "not full_matrix" not in config.option.markexpr


@pytest.fixture(autouse=True)
def _one_thread_and_no_luck() -> None:
    """Some CPU kernels sum in another order with more threads; a test draws the same data in any order of tests."""
    torch.set_num_threads(1)
    torch.manual_seed(20260131)


def pytest_configure(config: pytest.Config) -> None:
    """megatron-core, which some tests take as the truth, speaks of what it lacks when it is imported."""
    for kind in ("UserWarning", "DeprecationWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}:megatron.*")
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script_method` is deprecated")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` need a device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)
