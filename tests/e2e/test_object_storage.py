"""Runs whose checkpoints are in object storage, against a real server of the S3 protocol."""

from __future__ import annotations

import os
import random
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from s3fs import S3FileSystem
from safetensors.torch import load

from megalite.checkpoint.storage import OWNER
from megalite.files.owner import owning
from megalite.files.remote import place
from megalite.peft.files import WEIGHTS_FILE
from tests.data.chat_files import pairs, write_lines
from tests.data.token_files import write_tokens
from tests.e2e.runs import (
    MICRO,
    MOCK,
    ROOT,
    Forked,
    Outcome,
    assert_same_checkpoint,
    checkpoint,
    refusal,
    run,
    wait_for,
    written,
)
from tests.e2e.test_finetune import COMMON, save_base
from tests.helpers import load_tool
from tests.s3 import at, environment, fetch, put


def go(save: str, flags: str, processes: int = 1, **how: Any) -> Outcome:
    more = {"environment": environment()} if processes > 1 else {}
    return run(f"{MICRO} --save {save} --load {save} --metrics-file {save}/m.jsonl {flags}", processes, **more, **how)


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (1, "--async-save"),
        pytest.param(2, "--async-save --use-distributed-optimizer --num-workers 1", marks=pytest.mark.slow),
    ],
)
def test_a_run_in_object_storage_is_the_run_on_the_disk_and_resumes_like_it(
    bucket: str, tmp_path: Path, processes: int, flags: str
) -> None:
    address, disk = f"{bucket}/same{processes}", tmp_path / "disk"
    flags = f"--bf16 --train-iters 4 --save-interval 2 --keep-last-checkpoints 2 {flags}"
    go(str(disk), flags, processes)
    go(address, f"{flags} --exit-interval 2", processes)
    go(address, flags, processes)
    here = fetch(address, tmp_path / "fetched")
    assert written(here / "m.jsonl") == written(disk / "m.jsonl")
    assert [path.name for path in sorted(here.iterdir())] == [path.name for path in sorted(disk.iterdir())]
    for iteration in (2, 4):
        assert_same_checkpoint(checkpoint(here, iteration), checkpoint(disk, iteration))


def test_a_run_reads_its_data_from_object_storage_as_from_the_disk(bucket: str, tmp_path: Path) -> None:
    documents = [np.arange(40 + n) % 46 for n in range(20)]
    prefix = write_tokens(tmp_path / "corpus", documents)
    for suffix in (".bin", ".idx"):
        put(Path(prefix + suffix), f"{bucket}/data")
    flags = f"{MICRO.replace(MOCK, '')} --train-iters 2 --split 1,0,0 --data-cache-path {tmp_path}/cache"
    for name, path in (("disk", prefix), ("store", f"{bucket}/data/corpus")):
        run(f"{flags} --data-path {path} --metrics-file {tmp_path}/{name}.jsonl")
    assert written(tmp_path / "store.jsonl") == written(tmp_path / "disk.jsonl")


@pytest.mark.parametrize("trial", [0, *(pytest.param(trial, marks=pytest.mark.slow) for trial in range(1, 20))])
def test_a_run_killed_at_any_moment_resumes_and_ends_as_if_nothing_had_been(
    bucket: str, tmp_path: Path, trial: int
) -> None:
    """Killed twice: every third time right in a save, as soon as its first file is there."""
    draw, save, last = random.Random(trial), f"{bucket}/killed{trial}", 12 if trial else 4
    flags = f"--train-iters {last} --save-interval 1 --keep-last-checkpoints 2 {'--async-save' if trial % 2 else ''}"
    for kill in range(2 if trial else 1):
        forked = start(save, flags)
        wait_for(lambda at_least=3 * kill + 2: begun(save) >= at_least or not forked.members())  # noqa: B023
        if trial % 3:
            time.sleep(draw.random() * 0.5)
        forked.kill()
    go(save, flags)
    go(str(tmp_path), flags)
    here = fetch(save, tmp_path / "fetched")
    assert written(here / "m.jsonl") == written(tmp_path / "m.jsonl")
    assert_same_checkpoint(checkpoint(here, last), checkpoint(tmp_path, last))


def start(save: str, flags: str) -> Forked:
    flags = f"{MICRO} --save {save} --load {save} --metrics-file {save}/m.jsonl {flags}"
    return Forked(flags, 1, None, environment())


def begun(address: str) -> int:
    """The newest iteration of which a file is there."""
    found = at(address).glob("iter_*")
    return max((int(each.name[5:]) for each in found), default=0)


def test_two_runs_in_one_place_are_told(bucket: str) -> None:
    save = f"{bucket}/taken"
    with owning(at(save) / OWNER, "it"):
        outcome = go(save, "--train-iters 1", check=False)
    assert outcome.code == 1
    assert f"--save {save} is used by another run (process {os.getpid()} on host" in outcome.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensorboard-dir s3://tests/tb", "--tensorboard-dir s3://tests/tb: this takes a path on this machine"),
        ("--save s3://", "s3:// names no place: give one like s3://BUCKET/FOLDER"),
        ("--save nostore://tests/run", "nostore://tests/run: Protocol not known: nostore"),
        ("--load s3://nobucket/run --exit-on-missing-checkpoint", None),
    ],
)
def test_what_is_no_place_is_told_before_anything_starts(bucket: str, flags: str, message: str | None) -> None:
    if message is not None:
        assert message in refusal(f"{MICRO} {flags}")
    else:
        assert "holds no checkpoint" in run(f"{MICRO} {flags}", check=False).err


@pytest.mark.slow  # it is asked again and again
def test_without_credentials_or_server_the_message_says_so(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    S3FileSystem.clear_instance_cache()
    try:
        assert "Could not connect to the endpoint" in refusal(f"{MICRO} --save {bucket}/nowhere")
    finally:
        S3FileSystem.clear_instance_cache()


@pytest.mark.slow
def test_an_adapter_and_a_checkpoint_in_object_storage_are_used_like_those_on_the_disk(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, data = save_base(tmp_path / "base", num_hidden_layers=2), write_lines(tmp_path / "sft.jsonl", pairs(12))
    flags = f"{COMMON} --load-hf {base} --sft-data {data} --peft lora --train-iters 2 --eval-iters 0 --lr 2e-2"
    adapters = {}
    for root in (f"{tmp_path}/disk", f"{bucket}/tuned"):
        places = f"--save {root}/run --load {root}/run --save-adapter {root}/adapter"
        run(f"{flags} {places} --exit-interval 1", script="finetune")
        run(f"{flags} {places}", script="finetune")
        run(f"{flags} --load-adapter {root}/adapter --save-adapter {root}/second", script="finetune")
        adapters[root] = [load((place(f"{root}/{name}") / WEIGHTS_FILE).read_bytes()) for name in ("adapter", "second")]
    for here, there in zip(*adapters.values(), strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in here)

    def tool(name: str, words: str) -> str:
        capsys.readouterr()
        assert load_tool(ROOT / "tools" / name).main(shlex.split(words)) == 0
        return capsys.readouterr().out

    generate = f"--load-hf {base} --prompt hello --max-new-tokens 4 --device cpu --adapter"
    assert tool("generate.py", f"{generate} {bucket}/tuned/adapter") == tool(
        "generate.py", f"{generate} {tmp_path}/disk/adapter"
    )
    tool("merge_adapter.py", f"--load-hf {base} --adapter {bucket}/tuned/adapter --hf {tmp_path}/merged")
    assert "iteration 2" in tool("convert_checkpoint.py", f"inspect --load {bucket}/tuned/run")
    tool("convert_checkpoint.py", f"reshard --load {bucket}/tuned/run --save {bucket}/tuned/again")
    assert "iteration 2" in tool("convert_checkpoint.py", f"inspect --load {bucket}/tuned/again")


def test_a_model_is_generated_from_and_exported_out_of_object_storage(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_base(tmp_path / "base", num_hidden_layers=2)
    convert, generate = load_tool(ROOT / "tools" / "convert_checkpoint.py"), load_tool(ROOT / "tools" / "generate.py")
    written = []
    for root in (f"{tmp_path}/run", f"{bucket}/model"):
        convert.main(shlex.split(f"hf-to-megalite --hf {base} --save {root} --no-compare"))
        capsys.readouterr()
        generate.main(shlex.split(f"--load {root} --prompt hello --max-new-tokens 4 --device cpu"))
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] != ""
    convert.main(shlex.split(f"megalite-to-hf --load {bucket}/model --hf {tmp_path}/exported --no-compare"))
    assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
