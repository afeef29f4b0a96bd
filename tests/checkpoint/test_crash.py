"""Whenever a save is killed, a complete checkpoint can be found and loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def run_crashes(kind: str, folder: Path) -> list[str]:
    """Lines of `crash.py`, one a trial."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.crash", kind, str(folder)],
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def test_twenty_kills_at_random_moments_each_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    lines = run_crashes("random", tmp_path)
    assert len(lines) == 20
    assert len(set(lines)) > 5, lines


def test_a_kill_at_any_event_on_the_disk_leaves_a_complete_checkpoint_and_the_next_save_clears_up(
    tmp_path: Path,
) -> None:
    lines = run_crashes("events", tmp_path)
    assert len(lines) > 25, lines
    assert lines[-1] == f"events {len(lines) - 1}"
