"""`tools/convert_checkpoint.py` from its flags to what it writes and prints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file

from megalite.config.errors import FlagError, UserError
from megalite.nn.module import named_specs
from tests.checkpoint.huggingface import folders
from tests.helpers import call_script, load_tool
from tests.inference.checkpoints import save_tiny

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool(SCRIPT)


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


def test_what_a_checkpoint_holds_is_told_to_people_and_programs(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny(tmp_path, iteration=10)
    save_tiny(tmp_path, iteration=20)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")  # which is noted, but not in the middle of JSON
    number = sum(parameter.numel() for parameter in model.parameters())
    assert tool.main(["inspect", "--load", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert "loading the newest complete one" in err
    assert (facts["iteration"], facts["total_parameters"], facts["precision"]) == (20, number, "fp32")
    assert len(facts["parameters"]) == len(list(model.parameters()))
    assert tool.main(["inspect", "--load", str(tmp_path), "--ckpt-step", "10"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"parameters: {number:,} in {len(facts['parameters'])} tensors" in out
    assert all(entry["name"] in out for entry in facts["parameters"])


def test_one_file_and_other_files_hold_the_same_tensors(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny(tmp_path / "run")
    assert tool.main(["reshard", "--load", str(tmp_path / "run"), "--save", str(tmp_path / "new"), "--files", "4"]) == 0
    assert f"{tmp_path}/run/iter_0000010 = {tmp_path}/new/iter_0000010" in capsys.readouterr().out
    assert len(list((tmp_path / "new" / "iter_0000010").glob("*.safetensors"))) == 4
    for name, words in (("weights", []), ("all", ["--optimizer"])):
        out = tmp_path / f"{name}.safetensors"
        assert tool.main(["to-torch", "--load", str(tmp_path / "new"), "--out", str(out), *words]) == 0
        assert str(out) in capsys.readouterr().out
    weights, everything = (load_file(tmp_path / f"{name}.safetensors") for name in ("weights", "all"))
    folders.assert_equal(weights, {name: parameter.detach() for name, parameter, _ in named_specs(model)})
    state = {f"optimizer.exp_avg.{name}": tensor for name, tensor in weights.items()}  # as `save_tiny` makes it
    folders.assert_equal(everything, weights | state)


def test_an_average_has_the_last_iterations_number(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20):
        save_tiny(tmp_path / "run", iteration=step)
    words = ["--load", str(tmp_path / "run"), "--save", str(tmp_path / "new"), "--steps", "20", "10"]
    assert tool.main(["average", *words]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/new/iter_0000020 = average of iterations 10, 20\n"


def test_the_command_fails_with_one_line_and_status_1(tmp_path: Path) -> None:
    arguments = ["hf-to-megalite", "--hf", str(tmp_path / "nowhere"), "--save", str(tmp_path / "run")]
    done = call_script(SCRIPT, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"convert_checkpoint.py: error: {tmp_path}/nowhere is neither a folder here nor ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["hf-to-meglite"],
            "unknown command hf-to-meglite; valid: hf-to-megalite, megatron-to-megalite,",
        ),
        (["hf-to-megalite", "--hf", "a"], "--save"),
        (["megalite-to-hf", "--load", "a", "--hg", "b"], "--hf"),
        (["reshard", "--load", "a", "--save", "b", "--files", "0"], "--files 0 must be at least 1"),
        (["average", "--load", "a", "--save", "b", "--steps", "3", "3"], "--steps 3 3: give two iterations or more"),
        (["megatron-to-megalite", "--hf", "a", "--save", "b"], "--megatron"),
    ],
)
def test_bad_flags_are_named(tool: ModuleType, arguments: list[str], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        tool.main(arguments)


def test_a_folder_without_checkpoints_is_named(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--load {tmp_path}/none holds no checkpoint"):
        tool.main(["megalite-to-hf", "--load", str(tmp_path / "none"), "--hf", str(tmp_path / "hf")])
