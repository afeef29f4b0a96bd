"""Reading corpora: which documents a file holds, and that whatever is wrong is told by file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import zstandard

from megalite.config.errors import FlagError, UserError
from megalite.data.text_input import (
    Document,
    Problem,
    check_keys,
    expand_inputs,
    kind_of,
    parse_chunk,
    read_chunks,
    read_documents,
)


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def texts(
    path: str, keys: Sequence[str] = ("text",), text_documents: str = "file", chunk_bytes: int = 1 << 20
) -> list[str]:
    found = []
    for chunk in read_chunks([path], text_documents, chunk_bytes):
        for item in parse_chunk(chunk, keys):
            assert isinstance(item, Document), item
            found += item.texts
    return found


def items(path: str, chunk_bytes: int = 1 << 20) -> list[Document | Problem]:
    return [item for chunk in read_chunks([path], "file", chunk_bytes) for item in parse_chunk(chunk, ("text",))]


LINES = [{"text": f"document {n} 文 " + "x" * (n * 37 % 211), "n": n} for n in range(300)]
JSONL = "".join(json.dumps(line, ensure_ascii=n % 2 == 0) + "\n" for n, line in enumerate(LINES)).encode()
WANTED = [line["text"] for line in LINES]


def test_json_lines_are_the_same_plain_and_compressed(tmp_path: Path) -> None:
    frames = zstandard.ZstdCompressor().compress(JSONL[:5000]) + zstandard.ZstdCompressor().compress(JSONL[5000:])
    gz_members = gzip.compress(JSONL[:777]) + gzip.compress(JSONL[777:])
    for name, content in (("a.jsonl", JSONL), ("a.jsonl.gz", gz_members), ("a.jsonl.zst", frames), ("a.json", JSONL)):
        assert texts(write(tmp_path / name, content)) == WANTED


@pytest.mark.parametrize("chunk_bytes", [1, 100, 4096, 1 << 20])
def test_the_size_of_chunks_changes_no_document_and_no_line_number(tmp_path: Path, chunk_bytes: int) -> None:
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + JSONL)
    found = items(path, chunk_bytes)
    assert [item.line for item in found] == list(range(1, 301))
    assert texts(path, chunk_bytes=chunk_bytes) == WANTED
    sizes = [len(chunk.data) for chunk in read_chunks([path], chunk_bytes=chunk_bytes)]
    assert len(sizes) == 1 or max(sizes) <= 2 * max(chunk_bytes, 400)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_progress_adds_up_to_the_size_on_disk(tmp_path: Path, suffix: str) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path = write(tmp_path / f"a.jsonl{suffix}", pack(JSONL))
    assert sum(chunk.progress for chunk in read_chunks([path], chunk_bytes=1000)) == Path(path).stat().st_size


def test_line_ends_marks_and_blank_lines_are_no_documents(tmp_path: Path) -> None:
    lines = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\n   \n{"text": "c"}\n\n'
    assert items(write(tmp_path / "a.jsonl", lines)) == [Document(1, ("a",)), Document(3, ("b",)), Document(5, ("c",))]
    assert items(write(tmp_path / "b.jsonl", b'{"text": "no newline at the end"}')) == [
        Document(1, ("no newline at the end",))
    ]
    assert items(write(tmp_path / "c.jsonl", b"")) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "broken JSON: .*delimiter .column 13"),
        (b'{"text": "a"} {"text": "b"}', "broken JSON: Extra data"),
        (b"plain words", "broken JSON"),
        (b"[" * 100_000, "broken JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", "broken JSON"),
        (b'{"body": "a", "id": 1}', "no key 'text'.*--json-keys.*'body', 'id'"),
        (b"{}", "no key 'text'.*none"),
        (b'{"text": null}', "'text' is null, not a string"),
        (b'{"text": 5}', "'text' is 5, not a string"),
        (b'{"text": true}', "'text' is true, not a string"),
        (b'{"text": ["a"]}', "'text' is ..a.., not a string"),
        (b'{"text": {"a": 1}}', "'text' is {.a.: 1}, not a string"),
        (b'["text"]', "JSON object with the key 'text' is needed, not ..text.."),
        (b"null", "JSON object .* not null"),
        (b'"text"', 'JSON object .* not "text"'),
        (b'{"text": "\\ud83d alone"}', r"holds \\ud83d, half of a surrogate pair"),
        (b'{"text": "caf\xe9"}', "not UTF-8: byte 0xe9 at byte 14"),
    ],
)
def test_a_bad_line_is_a_problem_at_its_number(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", b'{"text": "fine"}\n\n' + line + b'\n{"text": "\\ud83d\\ude00 whole"}\n')
    good, bad, after = items(path, chunk_bytes=1)
    assert (good, after) == (Document(1, ("fine",)), Document(4, ("\U0001f600 whole",)))
    assert isinstance(bad, Problem)
    assert bad.line == 3
    with pytest.raises(UserError, match=f"bad.jsonl:3: .*{message}"):
        list(read_documents([path], ["text"]))


def test_plain_text_is_one_document_a_file_or_paragraphs_or_lines(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf\r\n  one\r\ntwo\r\n \t \r\n\r\nthree \xe6\x96\x87\nfour"
    path = write(tmp_path / "a.txt", content)
    assert texts(path) == ["\n  one\ntwo\n \t \n\nthree 文\nfour"]
    assert texts(path, text_documents="paragraph") == ["  one\ntwo", "three 文\nfour"]
    assert texts(path, text_documents="line") == ["  one", "two", "three 文", "four"]
    assert texts(write(tmp_path / "a.txt.gz", gzip.compress(content))) == texts(path)


@pytest.mark.parametrize("chunk_bytes", [1, 3, 10, 1000])
def test_paragraphs_and_their_lines_do_not_depend_on_chunks(tmp_path: Path, chunk_bytes: int) -> None:
    content = b"a\nb\n\n\nc\n \t\r\n\nd\n\n" + b"e\n" * 9 + b"\nf"
    path = write(tmp_path / "a.txt", content)
    found = [i for chunk in read_chunks([path], "paragraph", chunk_bytes) for i in parse_chunk(chunk, ["text"])]
    assert found == [
        Document(1, ("a\nb",)),
        Document(5, ("c",)),
        Document(8, ("d",)),
        Document(10, ("e\n" * 8 + "e",)),
        Document(20, ("f",)),
    ]


def test_invalid_utf8_in_plain_text_is_told_by_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"fine\nfine\nb\xffd\n")
    with pytest.raises(UserError, match="a.txt:3: not UTF-8: byte 0xff at byte 2 of the line"):
        list(read_documents([path], ["text"]))
    path = write(tmp_path / "wide.txt", "wide".encode("utf-16"))
    with pytest.raises(UserError, match=r"wide.txt: this is UTF-16; convert it to UTF-8"):
        list(read_documents([path], ["text"]))


@pytest.mark.parametrize("cut", [5, 20, 500])
def test_a_truncated_or_broken_compressed_file_is_an_error(tmp_path: Path, cut: int) -> None:
    for name, packed in (("a.jsonl.gz", gzip.compress(JSONL)), ("a.jsonl.zst", zstandard.compress(JSONL))):
        with pytest.raises(UserError, match=f"{name}: the compressed file ends too early"):
            list(read_chunks([write(tmp_path / name, packed[:cut])]))
        with pytest.raises(UserError, match=name):
            list(read_chunks([write(tmp_path / name, packed[:cut] + b"\x00\xff\x13" * 9 + packed[cut + 27 :])]))
        with pytest.raises(UserError, match=name):
            list(read_chunks([write(tmp_path / name, b"not compressed at all")]))


def test_inputs_keep_their_order_and_patterns_are_sorted(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt", "sub/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    relative = [str(Path(p).relative_to(tmp_path)) for p in expand_inputs([f"{tmp_path}/c.txt", f"{tmp_path}/*.jsonl"])]
    assert relative == ["c.txt", "a.jsonl", "b.jsonl"]
    assert len(expand_inputs([f"{tmp_path}/**/*.jsonl"])) == 3
    with_pattern_characters = write(tmp_path / "part[1].jsonl", JSONL)
    assert expand_inputs([with_pattern_characters]) == [with_pattern_characters]


def test_inputs_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", JSONL)
    with pytest.raises(UserError, match=r"--input .*nothing\*: no such file"):
        expand_inputs([path, str(tmp_path / "nothing*")])
    with pytest.raises(UserError, match="is a folder"):
        expand_inputs([str(tmp_path)])
    with pytest.raises(UserError, match=r"names .*a.jsonl twice"):
        expand_inputs([path, str(tmp_path / "*.jsonl")])
    with pytest.raises(UserError, match=r"\.parquet is not supported"):
        kind_of("data.parquet")


def test_keys_must_differ_and_plain_text_has_one() -> None:
    check_keys(["a.jsonl"], ["a", "b"])
    check_keys(["a.txt"], ["body"])
    for paths, keys in ((["a.jsonl"], ["a", "a"]), (["a.jsonl", "b.txt"], ["a", "b"]), (["a.jsonl"], [])):
        with pytest.raises(FlagError, match="--json-keys"):
            check_keys(paths, keys)
