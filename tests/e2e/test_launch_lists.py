"""Megatron-LM's own launch lists train here once their network is shrunk and mock data takes the place of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.launch_lists import GPT3_175B, LLAMA3_8B, LLAMA3_8B_FP8, LLAMA3_8B_SHARDING
from tests.e2e.runs import newest, run, steps

DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 130"
SHORT = "--seq-length 32 --max-position-embeddings 32 --log-interval 1 --device cpu --threads-per-rank 1"


def places(folder: Path) -> str:
    return (
        f"--save {folder}/checkpoints --load {folder}/checkpoints --tensorboard-dir {folder}/tensorboard "
        f"--metrics-file {folder}/m.jsonl"
    )


@pytest.mark.slow
def test_gpt3_175b(tmp_path: Path) -> None:
    """With all its flags but those of its data; 8 x 16 become 2 x 2."""
    begin, end = GPT3_175B.index("--data-path"), GPT3_175B.index("--log-interval")
    network = "--num-layers 2 --hidden-size 32 --num-attention-heads 4"
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    flags = f"{GPT3_175B[:begin]} {GPT3_175B[end:]} {DATA} {SHORT} {network} {layout} {places(tmp_path)}"
    outcome = run(f"{flags} --initial-loss-scale 65536 --exit-interval 2", 4)
    assert "TP 2 x PP 2 x DP 1" in outcome.out and "schedule 1f1b" in outcome.out
    recorded = steps(tmp_path / "m.jsonl")
    assert [step["global_batch_size"] for step in recorded] == [16, 16]
    assert not any(step["skipped"] for step in recorded)
    assert newest(tmp_path / "checkpoints") == 2


def test_llama3_8b_in_fp8(tmp_path: Path) -> None:
    """Made for one tensor-parallel rank, where sequence parallelism does nothing; one data-parallel rank shards nothing
    either."""
    network = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2"
    shrunk = f"--kv-channels 16 {network} {DATA} {SHORT} --global-batch-size 4 {places(tmp_path)}"
    outcome = run(f"{LLAMA3_8B} {LLAMA3_8B_FP8} {LLAMA3_8B_SHARDING} {shrunk} --exit-interval 3")
    assert [step["global_batch_size"] for step in steps(tmp_path / "m.jsonl")] == [4, 4, 4]
    assert newest(tmp_path / "checkpoints") == 3
    for flag in ("--use-mcore-models is ignored", "--sequence-parallel has no effect", "--use-distributed-optimizer"):
        assert outcome.out.count(flag) == 1, flag
