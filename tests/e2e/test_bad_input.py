"""Bad input: one clear message that names flag or file, a non-zero exit, no traceback, nothing half-written.

Which mistakes are found, and in which words, is told in the rooms that find them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.token_files import random_documents, write_tokens
from tests.e2e.runs import MICRO, MOCK, checkpoint, newest, refusal, run

FILES = MICRO.replace(MOCK, "").replace("--vocab-size 46", "--vocab-size 130")
"""A network for the token files of the tests: 130 ids and EOD."""


def refused(flags: str, *words: str, processes: int = 1) -> None:
    """The run ends with 1 and one message that holds all `words`, before its first step."""
    outcome = run(flags, processes, check=False, timeout=60)
    assert outcome.code == 1, str(outcome)
    assert outcome.err.count("error:") == 1 and "Traceback" not in outcome.err, outcome.err
    assert "elapsed time per iteration" not in outcome.out
    for word in words:
        assert word in outcome.err, f"{word!r} is not in: {outcome.err}"


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of 60 documents."""
    return write_tokens(tmp_path_factory.mktemp("corpus") / "a", random_documents(60))


def test_a_missing_file_is_named_with_its_flag_before_processes_meet(tmp_path: Path, corpus: str) -> None:
    message = refusal(f"{FILES} --data-path {tmp_path}/none")
    assert "--data-path" in message and f"{tmp_path}/none.idx" in message
    for kind in ("SentencePieceTokenizer", "HuggingFaceTokenizer"):
        flags = f"--tokenizer-type {kind} --tokenizer-model {tmp_path}/no.model --data-path {corpus} --split 1,0,0"
        assert f"{tmp_path}/no.model" in refusal(f"{FILES} {flags}")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_vocabulary_too_small_for_the_data(corpus: str, processes: int) -> None:
    flags = f"{MICRO.replace(MOCK, '')} --data-path {corpus} --split 1,0,0"
    refused(flags, "47", corpus, processes=processes)


def test_a_missing_checkpoint_is_an_error_only_where_asked(tmp_path: Path) -> None:
    flags = f"{MICRO} --load {tmp_path}/none --train-iters 1"
    assert "starting a new run" in run(flags).out
    refused(f"{flags} --exit-on-missing-checkpoint", f"--load {tmp_path}/none", "--exit-on-missing-checkpoint")
    refused(f"{flags} --pretrained-checkpoint {tmp_path}/other", f"--pretrained-checkpoint {tmp_path}/other")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_or_one_of_another_network_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    flags = f"{MICRO} --save {tmp_path} --load {tmp_path} --save-interval 1"
    run(f"{flags} --train-iters 1")
    before = listing(tmp_path)
    refused(f"{flags} --num-layers 3", str(checkpoint(tmp_path, 1)), "layers.2.", "--num-layers 2", processes=2)
    assert listing(tmp_path) == before
    (shard, *_) = checkpoint(tmp_path, 1).glob("*.safetensors")
    shard.write_bytes(b"")
    before = listing(tmp_path)
    refused(flags, str(shard), "truncated", processes=2)
    assert listing(tmp_path) == before and newest(tmp_path) == 1
