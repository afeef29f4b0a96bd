"""Every combination that can't work is refused in words that name the flag, its value and what would be valid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.config.check import check, without_effect
from megalite.config.fields import all_fields, section_names
from megalite.config.flags import parse_flags
from megalite.config.schema import RunConfig
from tests.config.launch_lists import SMALL


def given(words: str, *, without: str = "") -> RunConfig:
    """The small run and further flags, without some fields of it (paths with blanks between)."""
    config = parse_flags([*SMALL.split(), *words.split()], "p", "d", section_names())[0]
    fields = all_fields()
    for path in without.split():
        section, name = path.split(".")
        setattr(getattr(config, section), name, fields[path].default)
    return config


def test_the_small_run_has_no_problems() -> None:
    for world_size in (1, 2, 4):
        assert check(given(""), world_size) == []
    assert without_effect(given("")) == []


GOOD = [
    ("--swiglu --normalization RMSNorm --apply-layernorm-1p", 1),
    ("--group-query-attention --num-query-groups 2", 1),
    ("--num-query-groups 4", 1),
    ("--num-attention-heads 3 --kv-channels 16", 1),
    ("--position-embedding-type rope --rotary-percent 0.5 --use-rope-scaling", 1),
    ("--position-embedding-type none", 1),
    ("--position-embedding-type yarn --yarn-beta-slow 2 --yarn-mscale 1 --yarn-mscale-all-dim 0.5", 1),
    ("--position-embedding-type dynamic --rope-scaling-factor 2 --yarn-original-max-position-embeddings 16", 1),
    ("--position-embedding-type longrope --kv-channels 4 --longrope-short-factor 1 1 --longrope-long-factor 1 2", 1),
    ("--multi-latent-attention --position-embedding-type yarn --q-lora-rank 32 --qk-layernorm", 1),
    ("--multi-latent-attention --position-embedding-type rope --num-attention-heads 5", 1),
    ("--mtp-num-layers 2 --position-embedding-type rope --pipeline-model-parallel-size 2", 2),
    ("--mtp-num-layers 0", 1),
    ("--window-size 16,0", 1),
    ("--window-size -1,-1", 1),
    ("--tensor-model-parallel-size 2 --sequence-parallel", 4),
    ("--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2", 4),
    ("--pipeline-model-parallel-size 4", 4),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule interleaved", 2),
    ("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 2", 3),
    ("--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 0", 2),
    (
        "--num-layers 6 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
        4,
    ),
    ("--context-parallel-size 2", 2),
    ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
    ("--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather", 2),
    ("--rampup-batch-size 2 2 60", 1),
    ("--rampup-batch-size 8 2 60", 1),
    ("--step-batch-size-schedule 0:4 1K:8", 2),
    ("--lr-warmup-iters 3 --lr-decay-style cosine --min-lr 1e-4", 1),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 5", 1),
    ("--lr-warmup-fraction 0.1", 1),
    ("--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1", 1),
    ("--fp16 --loss-scale 128", 1),
    ("--bf16 --grad-reduce-in-bf16", 1),
    (
        "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype bf16 --exp-avg-dtype fp8 "
        "--exp-avg-sq-dtype fp16 --optimizer-cpu-offload",
        2,
    ),
    ("--fp16 --use-precision-aware-optimizer --main-params-dtype fp16", 1),
    ("--fp64 --use-precision-aware-optimizer --main-params-dtype bf16 --exp-avg-sq-dtype fp8", 1),
    ("--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4", 1),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
    ("--recompute-activations --recompute-modules core_attn mlp", 1),
    ("--save folder --save-interval 2 --save-retain-interval 4 --keep-last-checkpoints 2", 1),
    ("--load folder --ckpt-step 4 --finetune --exit-on-missing-checkpoint", 1),
    ("--pretrained-checkpoint folder --finetune", 1),
    ("--profile --profile-step-start 3 --profile-step-end 5", 1),
    ("--lr 0", 1),
    ("--peft lora", 1),
    ("--peft prefix --num-virtual-tokens 4 --seq-length 60", 1),
    (
        "--peft prefix --num-virtual-tokens 6 --position-embedding-type rope --tensor-model-parallel-size 4 "
        "--sequence-parallel",
        4,
    ),
]


@pytest.mark.parametrize("words, world_size", GOOD)
def test_what_can_run_somewhere_has_no_problems(words: str, world_size: int) -> None:
    assert check(given(words), world_size) == []


def refused() -> Iterator[tuple[str, int, str]]:
    """Flags, processes and what is said of them, from `refused.txt`."""
    base = SMALL
    for line in Path(__file__).with_name("refused.txt").read_text(encoding="utf-8").splitlines():
        if line == "without --mock-data":
            base = SMALL.replace("--mock-data", "")
        elif not line.startswith("#"):
            world_size, words, problem = line.split(" | ")
            yield f"{base} {words}", int(world_size), problem


@pytest.mark.parametrize(
    "words, world_size, problem", list(refused()), ids=lambda value: str(value).split("--log-interval 1")[-1]
)
def test_what_cannot_run_is_refused_in_one_line(words: str, world_size: int, problem: str) -> None:
    problems = check(parse_flags(words.split(), "p", "d", section_names())[0], world_size)
    assert any(problem in line for line in problems), problems
    assert all(re.search(r"--[a-z]", line) and "\n" not in line for line in problems)


MISSING = [
    ("model.num_layers", "--num-layers is missing (or --preset, which gives the network)"),
    ("model.hidden_size", "--hidden-size is missing (or --preset, which gives the network)"),
    ("model.num_attention_heads", "--num-attention-heads is missing (or --preset, which gives the network)"),
    (
        "model.max_position_embeddings",
        "--max-position-embeddings is missing: learned positions need the longest sequence",
    ),
    ("data.seq_length", "--seq-length is missing"),
    ("training.micro_batch_size", "--micro-batch-size is missing"),
    ("training.train_iters", "--train-iters or --train-samples is missing"),
    ("learning_rate.lr", "--lr is missing"),
    ("data.mock_data", "no data is given: give one of --mock-data; --data-path; --data-args-path; --train-data-path, "),
    ("tokenizer.vocab_size", "--tokenizer-type NullTokenizer needs --vocab-size"),
    ("tokenizer.tokenizer_type", "--tokenizer-type GPT2BPETokenizer (the default) needs --vocab-file"),
]


@pytest.mark.parametrize("path, problem", MISSING)
def test_what_is_missing_is_named(path: str, problem: str) -> None:
    assert check(given("", without=path), 1)[0].startswith(problem)


def test_an_empty_path_is_an_unset_variable() -> None:
    config = given("--save x --save-interval 1")
    config.checkpoint.save = ""
    assert check(config, 1) == ["--save is empty: leave it out or give it a value"]


def test_a_value_that_no_flag_would_let_in_is_refused_too() -> None:
    config = given("")
    config.optimizer.optimizer = "muon"
    assert check(config, 1) == ["--optimizer muon: not one of adam, sgd"]


def test_a_setting_that_does_nothing_beside_the_others_is_said() -> None:
    words = "--position-embedding-type dynamic --yarn-beta-fast 2 --rope-attention-factor 2 --rope-scaling-factor 2"
    assert without_effect(given(words)) == [
        "--rope-attention-factor 2.0 has no effect without --position-embedding-type yarn or --position-embedding-type "
        "longrope",
        "--yarn-beta-fast 2.0 has no effect without --position-embedding-type yarn",
    ]
    words = "--bf16 --initial-loss-scale 65536 --tiktoken-pattern v2 --sgd-momentum 0.5 --tensorboard-log-interval 2"
    assert without_effect(given(words)) == [
        "--initial-loss-scale 65536.0 has no effect without --fp16",
        "--tiktoken-pattern v2 has no effect with --tokenizer-type NullTokenizer",
        "--sgd-momentum 0.5 has no effect without --optimizer sgd",
        "--tensorboard-log-interval 2 has no effect without --tensorboard-dir",
    ]
    assert without_effect(given("--fp16 --initial-loss-scale 65536 --optimizer sgd --sgd-momentum 0.5")) == []
    assert without_effect(given("--use-precision-aware-optimizer --exp-avg-dtype bf16")) == []
    (line,) = without_effect(given("--use-precision-aware-optimizer"))
    assert line.startswith("--use-precision-aware-optimizer has no effect without")
    (line,) = without_effect(given("--bf16 --fp8-format hybrid --fp8-amax-history-len 1024"))
    assert line == "--fp8-amax-history-len 1024 has no effect without --fp8-amax-compute-algo max"
    (line,) = without_effect(given("--bf16 --fp8-format hybrid --fp8-amax-compute-algo max"))
    assert line == "--fp8-amax-compute-algo max has no effect with --fp8-amax-history-len 1"
    history = "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
    assert without_effect(given(f"--bf16 --fp8-format hybrid {history}")) == []
    statistics = "--bf16 --fp8-format hybrid --log-fp8-stats"
    (line,) = without_effect(given(statistics))
    assert line == "--log-fp8-stats has no effect without --metrics-file or --tensorboard-dir"
    assert without_effect(given(f"{statistics} --metrics-file m")) == []
    assert without_effect(given(f"{statistics} --tensorboard-dir d")) == []


EXPERTS = "--disable-bias-linear --num-experts 4"
IDLE_OF_EXPERTS = [
    (
        "--moe-router-load-balancing-type seq_aux_loss",
        "--moe-router-load-balancing-type seq_aux_loss has no effect without --moe-aux-loss-coeff above 0",
    ),
    (
        "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0",
        "--moe-aux-loss-coeff 0.1 0.0 has no effect on global_aux_loss, whose weight is 0",
    ),
    ("--moe-token-dispatcher-type alltoall", "has no effect where every rank holds all experts"),
    (
        "--mtp-num-layers 1 --mtp-loss-scaling-factor 0",
        "--mtp-num-layers 1 has no effect with --mtp-loss-scaling-factor 0: these layers learn nothing",
    ),
    ("--moe-token-drop-policy position", "has no effect without --moe-expert-capacity-factor"),
]


@pytest.mark.parametrize("words, said", IDLE_OF_EXPERTS)
def test_a_setting_of_experts_that_does_nothing_is_said(words: str, said: str) -> None:
    (line,) = without_effect(given(f"{EXPERTS} {words}"))
    assert said in line


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--moe-router-load-balancing-type sinkhorn",
        "--moe-router-load-balancing-type none",
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
        "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2",
        "--moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --sequence-parallel",
    ],
)
def test_a_setting_of_experts_that_matters_has_no_note(words: str) -> None:
    assert without_effect(given(f"{EXPERTS} {words}")) == []
