"""Problems with the data flags, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config.schema import RunConfig
from megalite.data.check import check
from tests.data.token_files import random_documents, run_config, write_tokens


def test_good_flags_have_no_problem(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", random_documents(3))
    assert check(run_config(prefix)) == []
    assert check(run_config("1", prefix, "2", prefix)) == []
    assert check(run_config(train_data_path=[prefix])) == []
    assert check(run_config(mock_data=True)) == []


def test_a_missing_or_damaged_file_is_named_with_its_flag(tmp_path: Path) -> None:
    good = write_tokens(tmp_path / "good", random_documents(3))
    bad = write_tokens(tmp_path / "bad", random_documents(3))
    Path(f"{bad}.idx").write_bytes(b"PK" * 30)
    (missing, damaged) = check(run_config("1", f"{tmp_path}/none", "1", good, "2", bad))
    assert missing.startswith("--data-path: ")
    assert f"{tmp_path}/none.idx" in missing
    assert f"{bad}.idx" in damaged
    (problem,) = check(run_config(train_data_path=[good], valid_data_path=[bad]))
    assert problem.startswith("--valid-data-path: ")


@pytest.mark.parametrize(
    "config, says",
    [
        (run_config(), "nothing to train on"),
        (run_config("p", train_data_path=["q"]), "exclude each other"),
        (run_config("p", split="a"), "--split: a"),
        (run_config("p", split="0,1,1"), "nothing to train on"),
        (run_config("1", "p", "2"), "--data-path"),
    ],
)
def test_bad_flags_are_named(config: RunConfig, says: str) -> None:
    problems = check(config)
    assert len(problems) == 1
    assert says in problems[0]
