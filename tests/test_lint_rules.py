"""Each of the project's lint rules fires on a snippet that breaks it, and stays silent on one that doesn't."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lint_rules import FLOORS, check_project, check_source

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megalite/nn/a.py", "import megalite.models.gpt"),
        ("megalite/nn/a.py", "from megalite.models import gpt"),
        ("megalite/nn/a.py", "from megalite import models"),
        ("megalite/nn/a.py", "from ..models.gpt import GPT"),
        ("megalite/nn/sub/a.py", "from ...models import GPT"),
        ("megalite/nn/__init__.py", "from .. import models"),
        ("megalite/nn/a.py", "def f():\n    from megalite.training import loop"),
        ("megalite/config/a.py", "from megalite.estimate import flops"),
        ("megalite/data/a.py", "from megalite.pipeline import runtime"),
        ("megalite/__init__.py", "from megalite.config.schema import RunConfig"),
        ("megalite/attic/a.py", "x = 1"),
    ],
)
def test_an_import_that_is_not_downwards_is_found(path: str, source: str) -> None:
    assert len(check_source(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megalite/nn/a.py", "from megalite.distributed.groups import Layout"),
        ("megalite/nn/a.py", "from megalite.nn.norm import RMSNorm\nfrom .linear import Linear\nfrom . import rotary"),
        ("megalite/nn/a.py", "from megalite import __version__\nimport torch.distributed"),
        ("megalite/training/a.py", "import megalite.models.gpt\nfrom ..inference import generate"),
        ("tools/a.py", "from megalite.planner import search\nimport megalite.config.flags"),
    ],
)
def test_imports_within_a_room_and_downwards_are_allowed(path: str, source: str) -> None:
    assert check_source(path, source) == []


@pytest.mark.parametrize("room", ["nn", "models", "optimizer"])
@pytest.mark.parametrize(
    "source",
    [
        "import torch\ny = x.to(torch.float32)",
        "import torch\ny = x.to(torch.float)",
        "import torch as t\ny = x.to(t.float32)",
        "from torch import float32",
        "y = x.float()",
        "y = (a @ b).float().sum()",
    ],
)
def test_a_literal_fp32_is_found_in_rooms_with_a_wide_dtype(room: str, source: str) -> None:
    assert len(check_source(f"megalite/{room}/a.py", source)) == 1


def test_other_dtypes_python_floats_and_other_rooms_are_free() -> None:
    free = "import torch\ny = x.to(torch.float64)\nz = x.to(policy.wide)\nw: float = float(3)\nv = torch.bfloat16\n"
    assert check_source("megalite/nn/a.py", free) == []
    assert check_source("megalite/precision/a.py", "import torch\nwide = torch.float32\ny = x.float()") == []


@pytest.mark.parametrize("module", ["torch", "numpy", "torch.distributed", "tqdm"])
def test_config_imports_only_the_standard_library(module: str) -> None:
    assert len(check_source("megalite/config/a.py", f"import {module}")) == 1
    assert len(check_source("megalite/config/a.py", f"def f():\n    from {module} import x")) == 1
    assert check_source("megalite/config/a.py", "import json\nfrom megalite.config.errors import UserError") == []
    assert check_source("megalite/data/a.py", f"import {module}") == []


@pytest.mark.parametrize("path", ["pretrain_gpt.py", "finetune.py", "tools/plan.py"])
def test_an_entry_point_has_fewer_than_80_lines(path: str) -> None:
    assert len(check_source(path, "x = 1\n" * 80)) == 1
    assert check_source(path, "x = 1\n" * 79) == []
    assert check_source("megalite/data/a.py", "x = 1\n" * 80) == []


def test_a_file_that_does_not_parse_is_found() -> None:
    assert len(check_source("megalite/nn/a.py", "def f(:\n")) == 1


def test_findings_name_file_line_and_both_floors() -> None:
    (finding,) = check_source("megalite/nn/a.py", "import torch\nimport megalite.models.gpt")
    assert str(finding) == "megalite/nn/a.py:2: nn (level 3) imports models (level 4), not a lower level"


def test_a_broken_rule_in_a_project_folder_is_found(tmp_path: Path) -> None:
    bad = tmp_path / "megalite" / "config" / "deep" / "a.py"
    bad.parent.mkdir(parents=True)
    bad.write_text("import numpy\n", encoding="utf-8")
    assert [finding.path for finding in check_project(tmp_path)] == ["megalite/config/deep/a.py"]


def test_this_project_keeps_its_rules() -> None:
    assert [str(finding) for finding in check_project(ROOT)] == []


def test_every_room_of_the_package_has_a_floor() -> None:
    rooms = {file.parent.name for file in (ROOT / "megalite").glob("*/__init__.py")}
    assert rooms <= set(FLOORS)
