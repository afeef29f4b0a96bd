"""The embedded default corpus: real text, the same at every build, held out by whole files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.config.errors import UserError
from tools.lib.stdlib_corpus import build_corpus, corpus_files, is_held_out, stdlib_folder


def rows(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def test_the_standard_library_gives_megabytes_of_text_split_by_file(tmp_path: Path) -> None:
    made = build_corpus(str(tmp_path / "corpus"))
    train, valid = rows(made.train), rows(made.valid)
    assert (len(train), len(valid)) == (made.train_documents, made.valid_documents)
    assert 3e6 < made.train_bytes < 20e6
    assert 0.005 < made.valid_bytes / made.train_bytes < 0.15
    paths = [row["path"] for row in train + valid]
    assert len(set(paths)) == len(paths)
    assert [row["path"] for row in train] == sorted(row["path"] for row in train)
    assert all(is_held_out(row["path"]) for row in valid)
    assert not any(is_held_out(row["path"]) for row in train)
    for row in valid:
        assert row["text"] == (stdlib_folder() / row["path"]).read_text("utf-8-sig")
    parts = {part for path in paths for part in path.split("/")}
    assert parts & {"site-packages", "test", "tests", "__pycache__"} == set()
    assert "asyncio" in parts
    assert "encodings/cp037.py" not in paths
    assert made.train_bytes == sum(len(row["text"].encode()) for row in train)
    again = build_corpus(str(tmp_path / "again"))
    assert Path(again.train).read_bytes() == Path(made.train).read_bytes()


def test_what_is_no_language_is_left_out(tmp_path: Path) -> None:
    files = {
        "good.py": b"x = 1\r\n",
        "copy.py": b"x = 1\n",
        "latin.py": b"# caf\xe9\n",
        "empty.py": b" \n",
        "made.py": b"# This file is generated.\nx = 2\n",
        "encodings/map.py": b"decoding_map = {}\n",
        "pkg/tests/t.py": b"y = 3\n",
        "pkg/mod.py": "z = '文'\n".encode(),
        "notes.txt": b"no Python\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert list(corpus_files(tmp_path)) == [("copy.py", "x = 1\n"), ("pkg/mod.py", "z = '文'\n")]


def test_adding_a_file_moves_no_other(tmp_path: Path) -> None:
    def split(names: list[str]) -> tuple[set[str], set[str]]:
        source = tmp_path / f"src{len(names)}"
        source.mkdir()
        for name in names:
            (source / name).write_text(f"# {name}\n")
        made = build_corpus(str(tmp_path / f"out{len(names)}"), source, least_bytes=1)
        return {row["path"] for row in rows(made.train)}, {row["path"] for row in rows(made.valid)}

    names = [f"m{n}.py" for n in range(100)]
    train, valid = split(names)
    more_train, more_valid = split([*names, "new.py"])
    assert (more_train - {"new.py"}, more_valid - {"new.py"}) == (train, valid)
    assert 0 < len(valid) < 20


def test_a_folder_without_sources_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.py").write_text("x = 1\n")
    for source, message in ((tmp_path / "few", "zipped or stripped"), (tmp_path / "python311.zip", "--source")):
        with pytest.raises(UserError, match=message):
            build_corpus(str(tmp_path / "out"), source)
    assert not (tmp_path / "out").exists()
