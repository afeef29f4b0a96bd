"""JSON lines of examples: every mistake is told by file and line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from megalite.config.errors import UserError
from megalite.data.jsonl import read_lines


def test_lines_keep_their_numbers_over_blank_lines_byte_order_marks_and_compression(tmp_path: Path) -> None:
    text = '\ufeff{"a": 1}\r\n\n  \n{"a": "今\\n"}'.encode()
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    for name in ("a.jsonl", "a.jsonl.gz"):
        lines = list(read_lines(str(tmp_path / name), "--flag"))
        assert [(line.number, line.value) for line in lines] == [(1, {"a": 1}), (4, {"a": "今\n"})]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"[1, 2]", r":2: it must be a JSON object, not \[1, 2\]"),
        (b'{"a": "\xff"}', r":2: not UTF-8: byte 0xff at byte 8"),
        (rb'{"a": ["\ud83d"]}', r":2: it holds \\ud83d, half of a surrogate pair"),
        (rb'{"a": {"b": "\ufdd0"}}', r":2: it holds U\+FDD0, which is not a character"),
        ('{"a": "\ufdd3"}'.encode(), r":2: it holds U\+FDD3"),
        (b'{"a": [{"b": 1, "c": 2, "b": 3}]}', r':2: .*the key "b" occurs twice in an object'),
    ],
)
def test_a_bad_line_is_told_by_file_and_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'{"a": 1}\n' + content + b"\n")
    with pytest.raises(UserError, match=r"b\.jsonl" + message):
        list(read_lines(str(tmp_path / "b.jsonl"), "--flag"))


def test_a_missing_file_or_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--flag .*none\.jsonl: no such file"):
        list(read_lines(str(tmp_path / "none.jsonl"), "--flag"))
    with pytest.raises(UserError, match=r"--flag .* is a folder: give the files in it"):
        list(read_lines(str(tmp_path), "--flag"))
    for name in ("a.parquet", "a.txt.gz"):
        with pytest.raises(UserError, match="JSON lines are needed"):
            list(read_lines(str(tmp_path / name), "--flag"))


def test_a_file_that_is_one_list_gives_the_objects_and_their_lines(tmp_path: Path) -> None:
    values = [{"a": [1, "]"]}, {"b": "é\n"}, {}]
    for indent in (None, 0, 2):
        text = "\n [" + json.dumps(values, indent=indent, ensure_ascii=False)[1:] + "\n"
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        lines = list(read_lines(str(tmp_path / "a.json"), "--data"))
        assert [line.value for line in lines] == values
        signs = ("{", "{", "{}") if indent is None else ('"a"', '"b"')
        first = 0 if indent is None else 1  # where each object begins on the line before its key
        expected = [text.count("\n", 0, text.index(sign)) + 1 - first for sign in signs]
        assert [line.number for line in lines][: len(signs)] == expected
    (tmp_path / "a.json").write_text("[]")
    assert list(read_lines(str(tmp_path / "a.json"), "--data")) == []


@pytest.mark.parametrize(
    "text, message",
    [
        ('[\n{"a": 1}\n{"b": 2}]', ":3: broken JSON: Expecting ',' delimiter"),
        ('[\n{"a": 1},\n{"b"', ":3: broken JSON"),
        ('[{"a": 1}]\n{}', ":2: broken JSON: Extra data"),
        ("[\n\n5]", ":3: it must be a JSON object, not 5"),
        ('[\n{"a": 1, "a": 2}]', ':2: broken JSON: the key "a" occurs twice'),
        ('[{"a": 1},', ":1: broken JSON"),
    ],
)
def test_a_broken_list_is_told_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=re.escape("a.json" + message)):
        list(read_lines(str(tmp_path / "a.json"), "--data"))
