"""Bad input: one clear message that names flag or file, a non-zero exit, no traceback, nothing half-written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megalite.files.owner import OWNER, owning
from tests.data.token_files import random_documents, write_tokens
from tests.e2e.runs import MICRO, MOCK, Outcome, checkpoint, checkpoint_tensors, newest, refusal, run, steps

FILES = MICRO.replace(MOCK, "").replace("--vocab-size 46", "--vocab-size 130")
"""A network for the token files of the tests: 130 ids and EOD."""


def refused(flags: str, code: int, *words: str, processes: int = 1) -> Outcome:
    """The run ends with `code` and one message that holds all `words`, before its first step."""
    outcome = run(flags, processes, check=False, timeout=60)
    assert outcome.code == code, str(outcome)
    assert outcome.err.count("error:") == 1 and "Traceback" not in outcome.err, outcome.err
    assert "elapsed time per iteration" not in outcome.out
    for word in words:
        assert word in outcome.err, f"{word!r} is not in: {outcome.err}"
    return outcome


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -------------------------------------------------------------------------------------------------------------- data


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Prefix of 60 documents."""
    return Path(write_tokens(tmp_path / "corpus", random_documents(60)))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "suffix"),
    [
        pytest.param(lambda prefix: prefix.with_suffix(".idx").unlink(), ".idx", id="no index"),
        pytest.param(lambda prefix: prefix.with_suffix(".bin").unlink(), ".bin", id="no tokens"),
        pytest.param(lambda prefix: cut(prefix.with_suffix(".bin"), 100), ".bin", id="truncated tokens"),
        pytest.param(lambda prefix: cut(prefix.with_suffix(".idx"), 60), ".idx", id="truncated index"),
        pytest.param(lambda prefix: prefix.with_suffix(".idx").write_bytes(b"NOTANIDX" * 99), ".idx", id="wrong magic"),
    ],
)
def test_a_damaged_file_of_tokens_is_named(damage: Callable[[Path], object], suffix: str, corpus: Path) -> None:
    damage(corpus)
    before = listing(corpus.parent)
    message = refusal(f"{FILES} --data-path {corpus} --split 1,0,0")
    assert "--data-path" in message and f"{corpus}{suffix}" in message
    assert listing(corpus.parent) == before


def test_a_corpus_shorter_than_one_sample_is_repeated_and_an_empty_one_refused(tmp_path: Path) -> None:
    """Training goes through a short corpus as often as needed; nothing can be made of none."""
    short = write_tokens(tmp_path / "short", [np.arange(20)])
    outcome = run(f"{FILES} --data-path {short} --split 1,0,0 --train-iters 2 --metrics-file {tmp_path}/m.jsonl")
    assert len(steps(tmp_path / "m.jsonl")) == 2
    assert "20" in outcome.out
    empty = write_tokens(tmp_path / "empty", [[], []])
    refused(f"{FILES} --data-path {empty} --split 1,0,0", 1, "train", empty)


def test_a_corpus_shorter_than_a_whole_validation_needs(tmp_path: Path, corpus: Path) -> None:
    short = write_tokens(tmp_path / "short", [np.arange(20)])
    paths = f"--train-data-path {corpus} --valid-data-path {short} --full-validation --eval-iters 1"
    refused(f"{FILES} {paths}", 1, "valid", short, "20 tokens", "33")


def test_an_empty_split(tmp_path: Path) -> None:
    """20 documents, of which a share of 1/10000 is none; this once made an endless loop."""
    few = write_tokens(tmp_path / "few", random_documents(20))
    refused(f"{FILES} --data-path {few} --split 9998,1,1 --eval-iters 1", 1, "valid", "--split 9998,1,1")


def test_a_split_of_nothing_for_training(corpus: Path) -> None:
    message = refusal(f"{FILES} --data-path {corpus} --split 0,1,1")
    assert "train" in message and "--split" in message


def test_a_vocabulary_too_small_for_the_data(corpus: Path) -> None:
    flags = f"{MICRO.replace(MOCK, '')} --data-path {corpus} --split 1,0,0"
    refused(flags, 1, "47", str(corpus))
    refused(flags, 1, "47", str(corpus), processes=2)


def test_a_vocabulary_too_small_for_a_late_token(tmp_path: Path) -> None:
    """Found when it is read, by whichever process reads it, before it can index past the embedding."""
    documents = random_documents(3000, low=300, high=400)
    documents[2999][:] = 140
    late = write_tokens(tmp_path / "late", documents)
    outcome = run(
        f"{FILES} --data-path {late} --split 1,0,0 --train-iters 8000 --global-batch-size 64 --micro-batch-size 64 "
        "--num-layers 1 --hidden-size 8 --hidden-dropout 0 --attention-dropout 0 --num-workers 1 --log-interval 1000",
        check=False,
    )
    assert outcome.code == 1
    assert outcome.err.count("error:") == 1 and "140" in outcome.err and "131" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_tokenizer_file_that_is_not_there(tmp_path: Path, corpus: Path) -> None:
    for kind in ("SentencePieceTokenizer", "HuggingFaceTokenizer"):
        flags = f"--tokenizer-type {kind} --tokenizer-model {tmp_path}/no.model --data-path {corpus} --split 1,0,0"
        assert f"{tmp_path}/no.model" in refusal(f"{FILES} {flags}")


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(f"{MICRO} --train-iters 2 --save {folder} --save-interval 1")
    return folder


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Path:
    """A copy of iteration 2 alone, to damage."""
    for name, content in listing(saved).items():
        if "0000001" not in name:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
    assert newest(tmp_path) == 2
    return tmp_path


def test_a_missing_checkpoint_is_an_error_only_where_asked(tmp_path: Path) -> None:
    flags = f"{MICRO} --load {tmp_path}/none --train-iters 1"
    assert "starting a new run" in run(flags).out
    refused(f"{flags} --exit-on-missing-checkpoint", 1, f"--load {tmp_path}/none", "--exit-on-missing-checkpoint")
    refused(f"{flags} --pretrained-checkpoint {tmp_path}/other", 1, f"--pretrained-checkpoint {tmp_path}/other")
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_shard_is_named(damaged: Path) -> None:
    shard = max(checkpoint(damaged, 2).glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-200])
    before = listing(damaged)
    refused(f"{MICRO} --load {damaged} --save {damaged} --save-interval 1", 1, str(shard))
    assert listing(damaged) == before


def test_a_missing_shard_is_named(damaged: Path) -> None:
    shard = max(checkpoint(damaged, 2).glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.unlink()
    refused(f"{MICRO} --load {damaged}", 1, str(shard))


def test_a_flipped_bit_is_noticed(damaged: Path) -> None:
    weights = checkpoint_tensors(checkpoint(damaged, 2))["model.embedding.word_embeddings.weight"].numpy().tobytes()
    found = [path for path in checkpoint(damaged, 2).glob("*.distcp") if weights in path.read_bytes()]
    assert len(found) == 1
    content = bytearray(found[0].read_bytes())
    content[content.index(weights) + 77] ^= 16
    found[0].write_bytes(content)
    refused(f"{MICRO} --load {damaged}", 1, str(found[0]))


def test_an_unreadable_training_state(damaged: Path) -> None:
    (checkpoint(damaged, 2) / "training_state.json").write_text("{")
    refused(f"{MICRO} --load {damaged}", 1, "training_state.json")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param("--hidden-size 64", ["--hidden-size 32"], id="width"),
        pytest.param("--num-layers 3", ["layers.2.", "--num-layers 2"], id="more layers"),
        pytest.param("--num-layers 1", ["layers.1.", "--num-layers 2"], id="fewer layers"),
        pytest.param("--vocab-size 60", ["word_embeddings", "--vocab-size 46"], id="vocabulary"),
        pytest.param(
            "--max-position-embeddings 64", ["position_embeddings", "--max-position-embeddings 32"], id="positions"
        ),
        pytest.param("--untie-embeddings-and-output-weights", ["output_layer"], id="untied"),
        pytest.param("--swiglu", ["linear_fc1"], id="swiglu"),
    ],
)
def test_a_checkpoint_of_another_network(flags: str, words: list[str], saved: Path) -> None:
    before = listing(saved)
    refused(f"{MICRO} --load {saved} --train-iters 3 --save {saved} --save-interval 1 {flags}", 1, str(saved), *words)
    assert listing(saved) == before


def test_the_head_count_of_another_network_is_noticed(saved: Path) -> None:
    """Equal numbers of elements, another cut."""
    refused(f"{MICRO} --load {saved} --num-attention-heads 4", 1, "linear_qkv", "--num-attention-heads 2")


def test_two_ranks_refuse_a_damaged_checkpoint_alike(damaged: Path) -> None:
    for shard in checkpoint(damaged, 2).glob("*.distcp"):
        shard.write_bytes(b"")
    refused(f"{MICRO} --load {damaged}", 1, "truncated", processes=2)


def test_a_step_that_was_never_saved(saved: Path) -> None:
    refused(f"{MICRO} --load {saved} --ckpt-step 7", 1, "--ckpt-step 7", "1, 2")


def test_a_folder_that_another_run_saves_in(tmp_path: Path) -> None:
    with owning(tmp_path / OWNER, "--save of this test"):
        before = listing(tmp_path)
        words = (f"--save {tmp_path} is used by another run", f"process {os.getpid()} on host")
        refused(f"{MICRO} --save {tmp_path} --save-interval 1", 1, *words)
        assert listing(tmp_path) == before
    run(f"{MICRO} --save {tmp_path} --save-interval 1 --train-iters 1")
    assert OWNER not in listing(tmp_path)


def test_the_checkpoint_of_the_fixture_is_whole(saved: Path) -> None:
    """None of the tests above wrote into it."""
    assert newest(saved) == 2
    assert all(tensor.isfinite().all() for tensor in checkpoint_tensors(checkpoint(saved, 2)).values())


# ----------------------------------------------------------------------------------------------------- output folders


@pytest.mark.parametrize(
    "flag", ["--metrics-file {}/file/m.jsonl", "--tensorboard-dir {}/file/tb", "--timeline {}/file/t"]
)
def test_a_place_for_output_that_can_not_be_made(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refusal(f"{MICRO} --train-iters 1 {flag.format(tmp_path)}")
    assert flag.split()[0] in message and f"{tmp_path}/file" in message
