"""The corpus tools as commands: what they print and write, their exit statuses, and what a killed one leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.data.indexed_dataset import IndexedDataset
from tests.data.corpora import SAMPLES, write_jsonl
from tests.e2e.runs import NEEDS_PROC, living, wait_for
from tests.helpers import call_script

ROOT = Path(__file__).resolve().parent.parent.parent
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")


def command(tool: str, *words: object) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, words)]


def call(tool: str, *words: object) -> subprocess.CompletedProcess[str]:
    return call_script(ROOT / "tools" / f"{tool}.py", *words)


def fails(status: int, tool: str, *words: object) -> str:
    """The one line on stderr of a command that ends with this status."""
    done = call(tool, *words)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"{tool}.py: error: ")
    return lines[0]


def test_from_corpus_to_inspected_tokens(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", SAMPLES * 5)
    done = call("train_tokenizer", "--input", source, "--vocab-size", 400, "--output-prefix", tmp_path / "tok")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"--tokenizer-model {tmp_path}/tok.model" in done.stdout
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tmp_path / "tok.model")
    for name in ("a", "b"):
        words = ("--input", source, "--output-prefix", tmp_path / "parts" / name, "--append-eod", *tokenizer)
        done = call("preprocess_data", *words, "--workers", 2, "--partitions", 2)
        assert done.returncode == 0, done.stderr
        assert f"text: {len(SAMPLES) * 5} documents" in done.stdout
    done = call("merge_datasets", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "all")
    assert done.returncode == 0, done.stderr
    assert f"2 parts, {len(SAMPLES) * 10} documents" in done.stdout
    done = call("inspect_dataset", "--input", tmp_path / "all", *tokenizer, "--documents", 1, "--tokens", 1000)
    assert done.returncode == 0, done.stderr
    data = IndexedDataset(str(tmp_path / "all"))
    assert f"dtype uint16, {len(data)} sequences, {len(data)} documents, {data.num_tokens:,} tokens" in done.stdout
    assert f"document 0, text: {SAMPLES[0]!r}" in done.stdout
    assert "document 1" not in done.stdout


def test_the_embedded_corpus_is_built(tmp_path: Path) -> None:
    done = call("build_corpus", "--output", tmp_path / "corpus")
    assert done.returncode == 0, done.stderr
    assert "train.jsonl" in done.stdout
    assert {"text", "path"} == set(json.loads((tmp_path / "corpus" / "valid.jsonl").open().readline()))
    assert "give a folder of .py files" in fails(1, "build_corpus", "--output", tmp_path, "--source", tmp_path / "none")


def test_bad_flags_exit_2_with_one_line(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", ["1 2"])
    needed = ("--input", source, "--output-prefix", tmp_path / "o")
    assert "did you mean --append-eod?" in fails(2, "preprocess_data", *needed, *NULL, "--append-eos")
    assert "--workers: 0 must be at least 1" in fails(2, "preprocess_data", *needed, *NULL, "--workers", 0)
    assert "--vocab-size" in fails(2, "train_tokenizer", *needed, "--vocab-size", "many")
    assert "--output" in fails(2, "build_corpus")
    assert list(tmp_path.glob("o*")) == []


def test_bad_input_exits_1_with_one_line_that_names_file_and_line(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", ["1 2", "3 x"])
    words = ("--output-prefix", tmp_path / "o", *NULL)
    assert f"{source}:2: " in fails(1, "preprocess_data", "--input", source, *words, "--workers", 2)
    assert "absent.idx" in fails(1, "merge_datasets", "--input", "absent", "--output-prefix", tmp_path / "o")
    assert list(tmp_path.glob("o*")) == []
    done = call("preprocess_data", "--input", source, *words, "--on-error", "skip")
    assert (done.returncode, done.stderr.count("skipped")) == (0, 1)
    assert "1 bad skipped" in done.stdout


def test_a_reader_that_leaves_early_is_no_error_message(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", ["1 " * 2000] * 50)
    assert call("preprocess_data", "--input", source, "--output-prefix", tmp_path / "o", *NULL).returncode == 0
    words = command("inspect_dataset", "--input", tmp_path / "o_text_document", "--documents", 50, "--tokens", 2000)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.fixture
def working(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A preprocessing whose two workers are busy."""
    source = write_jsonl(tmp_path / "c.jsonl", ["1 2 3 " * 50_000] * 100)
    words = ("--input", source, "--output-prefix", tmp_path / "o", *NULL, "--workers", 2, "--log-interval", 1)
    with subprocess.Popen(
        command("preprocess_data", *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        process.stderr.readline()  # the first progress line
        assert len(processes_of(process.pid)) >= 3
        yield process


@NEEDS_PROC
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGKILL, -9)],
)
def test_a_stopped_run_leaves_no_process_and_no_output(
    working: subprocess.Popen[bytes], tmp_path: Path, number: int, status: int
) -> None:
    if number == signal.SIGINT:
        os.killpg(working.pid, number)  # as a terminal does: the workers get it too
    else:
        working.send_signal(number)
    _, errors = working.communicate(timeout=60)
    assert working.returncode == status
    assert b"Traceback" not in errors
    wait_for(lambda: processes_of(working.pid) == [], 30)
    assert list(tmp_path.glob("o*.idx")) == []
    if number != signal.SIGKILL:
        assert list(tmp_path.glob("o*")) == []


@NEEDS_PROC
def test_a_killed_worker_is_an_error_and_not_a_hang(working: subprocess.Popen[bytes], tmp_path: Path) -> None:
    os.kill(max(processes_of(working.pid)), signal.SIGKILL)
    _, errors = working.communicate(timeout=60)
    assert working.returncode == 1
    assert errors.splitlines()[-1].startswith(b"preprocess_data.py: error: a worker process was killed near ")
    assert list(tmp_path.glob("o*")) == []


def processes_of(leader: int) -> list[int]:
    """Live processes of a session."""
    return [pid for pid, session, _ in living() if session == leader]


def test_the_tools_run_from_anywhere_without_installing(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command("build_corpus", "--help"), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
