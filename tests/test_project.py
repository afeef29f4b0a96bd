"""The project as a whole: what importing it loads, its scripts' `--help`, and its metadata against its lock file."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.helpers import call_script

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    *sorted(ROOT.glob("tools/*.py")),
    *(p for p in (ROOT / "pretrain_gpt.py", ROOT / "finetune.py") if p.exists()),
]


def package_modules() -> list[str]:
    files = sorted((ROOT / "megalite").rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    """The arguments that setup.py gives to setuptools."""
    seen: dict[str, Any] = {}
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(setuptools, "setup", seen.update)
        runpy.run_path(str(ROOT / "setup.py"))
    return seen


@pytest.fixture(scope="module")
def locked() -> dict[str, Version]:
    """Pinned version of each package in the lock file, by canonical name."""
    pins: dict[str, Version] = {}
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            pins[canonicalize_name(requirement.name)] = Version(pin.version)
    return pins


def direct_requirements(metadata: dict[str, Any]) -> list[Requirement]:
    extras = metadata["extras_require"].values()
    return [Requirement(text) for group in (metadata["install_requires"], *extras) for text in group]


def test_importing_every_module_loads_neither_transformers_nor_the_compiler() -> None:
    code = (
        "import importlib, sys\n"
        "heavy = ('transformers', 'torch._dynamo', 'torch._inductor', 'megatron')\n"
        "guilty = {}\n"
        f"for name in {package_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        "    guilty |= {module: name for module in heavy if module in sys.modules and module not in guilty}\n"
        "print(guilty)\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_of_each_script_exits_0(script: Path) -> None:
    done = call_script(script, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_every_folder_of_the_package_is_a_package(metadata: dict[str, Any]) -> None:
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "megalite").rglob("*.py")}
    assert {".".join(folder.parts) for folder in folders} == set(metadata["packages"])


def test_the_version_is_the_packages_own(metadata: dict[str, Any]) -> None:
    assert metadata["version"] == run_python("-c", "import megalite; print(megalite.__version__)").stdout.strip()


def test_the_lock_file_pins_every_direct_dependency_within_its_range(
    metadata: dict[str, Any], locked: dict[str, Version]
) -> None:
    for requirement in direct_requirements(metadata):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def test_the_lock_file_names_no_index_no_hash_and_no_local_path() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pins = [line for line in text.splitlines() if not line.startswith("#")]
    assert not re.search(r"://|--| @ |sha256|\+", "\n".join(pins))
    assert "torch==2.13.0" in pins


def test_the_installed_torch_is_the_locked_one(locked: dict[str, Version]) -> None:
    import torch

    assert Version(Version(torch.__version__).public) == locked["torch"]


def test_no_dependency_is_called_apex(metadata: dict[str, Any], locked: dict[str, Version]) -> None:
    names = {canonicalize_name(requirement.name) for requirement in direct_requirements(metadata)}
    assert "apex" not in names | set(locked)
