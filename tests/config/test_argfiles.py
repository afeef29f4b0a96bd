"""`@FILE`: the words of a file as a shell would read them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megalite.config.argfiles import expand_argument_files
from megalite.config.errors import FlagError
from megalite.config.flags import parse_flags


def expand(folder: Path, text: str) -> list[str]:
    (folder / "run.args").write_text(text, encoding="utf-8")
    return expand_argument_files([f"@{folder / 'run.args'}"])


@pytest.mark.parametrize(
    "text, words",
    [
        ("--a 1 --b 2\n--c\n", ["--a", "1", "--b", "2", "--c"]),
        ("# don't stop\n--a 1 # the 'rest\n--b", ["--a", "1", "--b"]),
        ("--a c#_text_document --b#c", ["--a", "c#_text_document", "--b#c"]),
        ("--a 'x # y' \"# z\" \\# w", ["--a", "x # y", "# z", "#", "w"]),
        ("--a 'two words' \"and 'two'\" es\\ caped ''", ["--a", "two words", "and 'two'", "es caped", ""]),
        ("--a 1 \\\n  --b 2 \\\n", ["--a", "1", "--b", "2"]),
        ("\ufeff--a\r\n--b\r\n", ["--a", "--b"]),
        ("--name 中文", ["--name", "中文"]),
        ("", []),
        ("#", []),
    ],
)
def test_a_file_is_read_as_a_shell_reads_words(tmp_path: Path, text: str, words: list[str]) -> None:
    assert expand(tmp_path, text) == words


def test_quoting_agrees_with_shlex_where_there_are_no_comments(tmp_path: Path) -> None:
    words = ["--a", "it's", 'a "b"', "back\\slash", "#x", "a#b", "$HOME", "tab\there", "@"]
    assert expand(tmp_path, shlex.join(words)) == words


def test_a_file_includes_another_relative_to_itself(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.args").write_text("--seed 1 --bf16", encoding="utf-8")
    (tmp_path / "sub" / "run.args").write_text("@../base.args --seed 2", encoding="utf-8")
    words = expand_argument_files(["--x", f"@{tmp_path}/sub/run.args", "--y"])
    assert words == ["--x", "--seed", "1", "--bf16", "--seed", "2", "--y"]


def test_one_file_may_be_included_twice_but_not_by_itself(tmp_path: Path) -> None:
    (tmp_path / "a.args").write_text("--bf16", encoding="utf-8")
    assert expand(tmp_path, "@a.args @a.args") == ["--bf16", "--bf16"]
    with pytest.raises(FlagError, match=r"@run.args includes itself"):
        expand(tmp_path, "--x @run.args")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="nowhere.args.*No such file"):
        expand_argument_files(["@nowhere.args"])
    with pytest.raises(FlagError, match="run.args: no closing quotation"):
        expand(tmp_path, "--a 'b")
    (tmp_path / "bin.args").write_bytes(b"\xff\xfe--a")
    with pytest.raises(FlagError, match="bin.args is not UTF-8 text"):
        expand_argument_files([f"@{tmp_path}/bin.args"])


def test_flags_after_a_file_override_it(tmp_path: Path) -> None:
    (tmp_path / "run.args").write_text("--num-layers 2 --seed 3", encoding="utf-8")
    config, explicit, _ = parse_flags([f"@{tmp_path}/run.args", "--seed", "4"], "p", "d")
    assert (config.model.num_layers, config.training.seed) == (2, 4)
    assert explicit == {"model.num_layers", "training.seed"}
