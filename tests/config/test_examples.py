"""The files in examples/ parse, can run in their world, and README.md says truly which of them run today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalite.config.check import check, not_built
from megalite.config.entry import fill_from_preset
from megalite.config.flags import parse_flags
from megalite.config.schema import RunConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHARED = {"llama_common.args", "small.args"}  # included by others, put behind other flags
# Flags that a program adds to an example.
MOCK = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "130"]
ADDED = {"quickstart.args": MOCK, "chinese/model.args": MOCK}
RUNS = sorted(path.name for path in EXAMPLES.glob("*.args") if path.name not in SHARED)


def read(name: str) -> tuple[RunConfig, int, list[str]]:
    """The example's configuration, the processes that its header names, and its notes."""
    found = re.search(r"^# World size: (\d+)$", (EXAMPLES / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert found is not None, f"{name} has no line '# World size: N'"
    config, explicit, notes = parse_flags([f"@{EXAMPLES / name}", *ADDED.get(name, [])], "pretrain_gpt.py", "d")
    fill_from_preset(config, explicit)
    return config, int(found.group(1)), notes


@pytest.mark.parametrize("name", [*RUNS, "chinese/model.args"])
def test_an_example_can_run_in_its_world(name: str) -> None:
    config, world_size, notes = read(name)
    assert check(config, world_size) == []
    assert notes == []
    if name not in ADDED:
        command = f"torchrun --nproc-per-node {world_size} pretrain_gpt.py @examples/{name}"
        assert f"#   {command}\n" in (EXAMPLES / name).read_text(encoding="utf-8")


def test_the_readme_says_which_examples_are_refused_today() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+\.args)` \|.*\| (.*) \|$", text, flags=re.MULTILINE))
    assert sorted(rows) == RUNS
    for name, today in rows.items():
        refusals = not_built(read(name)[0])
        assert today.startswith("refused: " if refusals else "works"), name
    assert all(name in text for name in SHARED)
