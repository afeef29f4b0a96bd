"""`tools/convert_checkpoint.py` from its flags to what it writes and prints."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megalite.config.errors import FlagError, UserError
from tests.checkpoint.huggingface import folders

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_tool", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_and_back_with_the_largest_difference(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folders.save("qwen3", tmp_path / "hf")
    root, back = tmp_path / "run", tmp_path / "back"
    assert tool.main(["hf-to-megalite", "--hf", str(source), "--save", str(root)]) == 0
    assert tool.main(["megalite-to-hf", "--load", str(root), "--hf", str(back)]) == 0
    folders.assert_equal(folders.tensors(back), folders.tensors(source))
    out = capsys.readouterr().out
    assert f"{root}/iter_0000000 = {source}" in out
    assert f"{root}/iter_0000000 = {back}" in out
    differences = re.findall(r"largest difference ([0-9.e-]+) ", out)
    assert len(differences) == 2
    assert all(float(one) < 2e-5 for one in differences)


def test_the_comparison_can_be_left_out(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folders.save("gpt2", tmp_path / "hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    arguments = ["hf-to-megalite", "--hf", str(source), "--save", str(tmp_path / "run"), "--no-compare"]
    assert tool.main(arguments) == 0
    assert "difference" not in capsys.readouterr().out


def test_the_command_fails_with_one_line_and_status_1(tmp_path: Path) -> None:
    arguments = ["hf-to-megalite", "--hf", str(tmp_path / "nowhere"), "--save", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"convert_checkpoint.py: error: {tmp_path}/nowhere/config.json: No such file or directory\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf-to-meglite"], "unknown command hf-to-meglite; valid: hf-to-megalite, megalite-to-hf, reshard, inspect"),
        (["hf-to-megalite", "--hf", "a"], "--save"),
        (["megalite-to-hf", "--load", "a", "--hg", "b"], "--hf"),
    ],
)
def test_bad_flags_are_named(tool: ModuleType, arguments: list[str], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        tool.main(arguments)


def test_a_folder_without_checkpoints_is_named(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--load {tmp_path}/none holds no checkpoint"):
        tool.main(["megalite-to-hf", "--load", str(tmp_path / "none"), "--hf", str(tmp_path / "hf")])


@pytest.mark.parametrize(
    ("command", "flags"),
    {
        "hf-to-megalite": "--hf --save --no-compare",
        "megalite-to-hf": "--load --ckpt-step --hf --no-compare",
        "reshard": "--load --ckpt-step --save --files",
        "inspect": "--load --ckpt-step --json",
        "to-torch": "--load --ckpt-step --out --optimizer",
    }.items(),
)
def test_each_command_shows_its_flags(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], command: str, flags: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(f"  {flag}" in out for flag in flags.split())
    assert tool.main([]) == 0
    assert f"  {command} " in capsys.readouterr().out
