"""The picture of a schedule: one box an action, at the right place, and one line for a mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalite.config.errors import UserError
from tests.helpers import call_script, load_tool
from tests.pipeline.test_timeline import write_run

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "plot_schedule.py"


def test_a_simulated_schedule_is_drawn_as_png(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    words = ("--schedule", "interleaved", "--stages", 4, "--chunks", 2, "--microbatches", 8)
    done = call_script(TOOL, *words, "--out", picture)
    assert done.returncode == 0, done.stderr
    assert "makespan 28.5, bubble 15.8%" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["picture.png"]


def test_a_measured_run_is_drawn_below_its_prediction_as_svg(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    picture = tmp_path / "picture.svg"
    words = ("--schedule", "1f1b", "--microbatches", 3, "--timeline", tmp_path, "--measured-costs")
    done = call_script(TOOL, *words, "--out", picture)
    assert done.returncode == 0, done.stderr
    assert "1f1b, 2 stages, 3 microbatches: makespan 21 ms" in done.stdout
    assert "step 2 of 2: makespan 21.5 ms" in done.stdout
    boxes = re.findall(r'<g id="patch_\d+">', picture.read_text())
    assert len(boxes) >= 2 * 2 * 6  # two panels, two ranks, three forwards and three backwards


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--out"),
        (("--out", "x.png"), "give --schedule, --timeline or both"),
        (("--out", "x.png", "--schedule", "zb-h2", "--stages", "2", "--microbatches", "2"), "zb-h1"),
        (("--out", "x.png", "--schedule", "1f1b", "--microbatches", "2"), "--stages"),
        (("--out", "x.png", "--schedule", "1f1b", "--stages", "0", "--microbatches", "2"), "above 0"),
        (("--out", "x.jpg", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2"), r"\.png or \.svg"),
        (
            ("--out", "x.png", "--schedule", "interleaved", "--stages", "4", "--chunks", "2", "--microbatches", "6"),
            "6 microbatches",
        ),
    ],
)
def test_bad_flags_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        load_tool(TOOL).main(list(words))
    assert list(tmp_path.iterdir()) == []
