"""Every combination that can't work is refused in words that name the flag, its value and what would be valid."""

from __future__ import annotations

import re

import pytest

from megalite.config.check import check, not_built, without_effect
from megalite.config.fields import all_fields
from megalite.config.flags import parse_flags
from megalite.config.schema import RunConfig
from tests.config.launch_lists import SMALL


def given(words: str, *, without: str = "") -> RunConfig:
    """The small run and further flags, without some fields of it (paths with blanks between)."""
    config = parse_flags([*SMALL.split(), *words.split()], "p", "d")[0]
    fields = all_fields()
    for path in without.split():
        section, name = path.split(".")
        setattr(getattr(config, section), name, fields[path].default)
    return config


def test_the_small_run_has_no_problems() -> None:
    for world_size in (1, 2, 4):
        assert check(given(""), world_size) == []
    assert not_built(given("")) == []
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
    ("--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4", 1),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
    ("--recompute-activations --recompute-modules core_attn mlp", 1),
    ("--save folder --save-interval 2 --save-retain-interval 4 --keep-last-checkpoints 2", 1),
    ("--load folder --ckpt-step 4 --finetune --exit-on-missing-checkpoint", 1),
    ("--pretrained-checkpoint folder --finetune", 1),
    ("--profile --profile-step-start 3 --profile-step-end 5", 1),
    ("--lr 0", 1),
]


@pytest.mark.parametrize("words, world_size", GOOD)
def test_what_can_run_somewhere_has_no_problems(words: str, world_size: int) -> None:
    assert check(given(words), world_size) == []


@pytest.mark.parametrize("data", ["corpus", "a b c", "0.3 a 0.7 b", "30 a 70 b", "1e-9 a 1 b", "0 a 1 b", "./1 2b"])
def test_a_blend_is_prefixes_or_weights_and_prefixes(data: str) -> None:
    assert check(given(f"--data-path {data}", without="data.mock_data"), 1) == []
    assert check(given(f"--train-data-path {data} --valid-data-path v", without="data.mock_data"), 1) == []


BAD = [
    # values
    ("--num-layers 0", 1, "--num-layers 0: must be at least 1"),
    ("--hidden-size -64", 1, "--hidden-size -64: must be at least 1"),
    ("--lr nan", 1, "--lr nan: not a finite number"),
    ("--lr inf", 1, "--lr inf: not a finite number"),
    ("--lr -1e-3", 1, "--lr -0.001: must not be negative"),
    ("--hidden-dropout 1", 1, "--hidden-dropout 1.0: must be from 0 to below 1"),
    ("--attention-dropout -0.1", 1, "--attention-dropout -0.1: must be from 0 to below 1"),
    ("--clip-grad -1", 1, "--clip-grad -1.0: must not be negative"),
    ("--adam-beta2 1", 1, "--adam-beta2 1.0: must be from 0 to below 1"),
    ("--seed -1", 1, "--seed -1: must be from 0 to 4294967295"),
    ("--rotary-percent 0 --position-embedding-type rope", 1, "--rotary-percent 0.0: must be above 0 and at most 1"),
    ("--micro-batch-size 0", 1, "--micro-batch-size 0: must be at least 1"),
    ("--tensor-model-parallel-size 0", 1, "--tensor-model-parallel-size 0: must be at least 1"),
    ("--log-interval 0", 1, "--log-interval 0: must be at least 1"),
    # network
    ("--num-attention-heads 3", 1, "--num-attention-heads 3 does not divide --hidden-size 64"),
    (
        "--group-query-attention --num-query-groups 3",
        1,
        "--num-query-groups 3 does not divide --num-attention-heads 4",
    ),
    ("--num-query-groups 2", 1, "--num-query-groups 2 needs --group-query-attention"),
    ("--seq-length 128", 1, "--seq-length 128 is longer than --max-position-embeddings 64"),
    ("--swiglu --squared-relu", 1, "--swiglu and --squared-relu exclude each other"),
    ("--swiglu --openai-gelu", 1, "--swiglu and --openai-gelu exclude each other"),
    ("--rotary-base 5e5", 1, "--rotary-base 500000.0 needs --position-embedding-type rope, not learned_absolute"),
    ("--use-rope-scaling", 1, "--use-rope-scaling needs --position-embedding-type rope"),
    ("--position-embedding-type rope --rotary-percent 0.2", 1, "of a head's 16 channels (--kv-channels) is 3"),
    ("--position-embedding-type rope --kv-channels 15", 1, "of a head's 15 channels (--kv-channels) is 15"),
    (
        "--position-embedding-type yarn --use-rope-scaling",
        1,
        "--use-rope-scaling and --position-embedding-type yarn exclude",
    ),
    (
        "--position-embedding-type dynamic --rotary-seq-len-interpolation-factor 2",
        1,
        "--rotary-seq-len-interpolation-factor and --position-embedding-type dynamic exclude each other",
    ),
    ("--position-embedding-type yarn --rotary-base 1", 1, "--rotary-base 1.0: --position-embedding-type yarn takes"),
    ("--position-embedding-type dynamic --kv-channels 2", 1, "needs at least 4 rotated channels of a head"),
    (
        "--position-embedding-type longrope --kv-channels 4 --longrope-short-factor 1 1",
        1,
        "--longrope-long-factor is missing: --position-embedding-type longrope has one number for each rotated pair",
    ),
    ("--window-size 128", 1, "--window-size: 128 must be LEFT,RIGHT, such as 128,0"),
    ("--window-size 16,4", 1, "--window-size 16,4: RIGHT must be 0 or -1"),
    ("--window-size -2,0", 1, "--window-size -2,0: LEFT must be a number of tokens, or -1"),
    # layout
    (
        "--tensor-model-parallel-size 2",
        3,
        "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 x --context-parallel-size 1 = 2 "
        "does not divide the world size 3",
    ),
    ("--pipeline-model-parallel-size 2 --context-parallel-size 2", 2, "= 4 does not divide the world size 2"),
    (
        "--tensor-model-parallel-size 8",
        8,
        "--tensor-model-parallel-size 8 does not divide --num-attention-heads 4",
    ),
    (
        "--num-attention-heads 12 --kv-channels 4 --tensor-model-parallel-size 2 --group-query-attention "
        "--num-query-groups 3",
        2,
        "--tensor-model-parallel-size 2 and --num-query-groups 3: one must divide the other",
    ),
    (
        "--tensor-model-parallel-size 2 --ffn-hidden-size 101",
        2,
        "--tensor-model-parallel-size 2 does not divide --ffn-hidden-size 101",
    ),
    (
        "--swiglu --hidden-size 96 --num-attention-heads 6 --tensor-model-parallel-size 3",
        3,
        "--tensor-model-parallel-size 3 does not divide --ffn-hidden-size 256 (its default)",
    ),
    (
        "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 63",
        2,
        "--sequence-parallel: --tensor-model-parallel-size 2 does not divide --seq-length 63",
    ),
    (
        "--context-parallel-size 2 --seq-length 62",
        2,
        "--seq-length 62 is not a multiple of 2 x --context-parallel-size",
    ),
    ("--pipeline-model-parallel-size 3", 3, "--pipeline-model-parallel-size 3 does not divide --num-layers 4"),
    (
        "--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split",
        2,
        "does not divide --num-layers 4 (with the embedding or output layer counted)",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
        2,
        "--num-virtual-stages-per-pipeline-rank 3 does not divide a stage's 2 layers",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        2,
        "--num-layers-per-virtual-pipeline-stage 3 does not divide a stage's 2 layers",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--num-virtual-stages-per-pipeline-rank 1",
        2,
        "give only one",
    ),
    ("--num-virtual-stages-per-pipeline-rank 2", 1, "need --pipeline-model-parallel-size above 1"),
    (
        "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1",
        3,
        "leave 3 of --num-layers 4 for 2 stages",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2",
        2,
        "--pipeline-schedule 1f1b has one chunk per rank",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved",
        2,
        "--pipeline-schedule interleaved needs --num-virtual-stages-per-pipeline-rank above 1",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 1",
        2,
        "--microbatch-group-size-per-virtual-pipeline-stage 1 is below --pipeline-model-parallel-size 2",
    ),
    ("--distributed-backend nccl", 1, "--distributed-backend nccl needs CUDA: with --device cpu use gloo"),
    ("--overlap-param-gather --overlap-grad-reduce", 2, "--overlap-param-gather needs --use-distributed-optimizer"),
    (
        "--use-distributed-optimizer --overlap-param-gather",
        2,
        "--overlap-param-gather needs --overlap-grad-reduce",
    ),
    (
        "--use-distributed-optimizer --data-parallel-sharding-strategy no_shard",
        2,
        "--data-parallel-sharding-strategy no_shard contradict",
    ),
    # number formats
    ("--bf16 --fp16", 1, "--bf16 and --fp16 exclude each other"),
    ("--bf16 --fp64", 1, "--bf16 and --fp64 exclude each other"),
    ("--fp16 --initial-loss-scale 2 --min-loss-scale 4", 1, "--initial-loss-scale 2.0 is below --min-loss-scale 4.0"),
    ("--fp16 --loss-scale 0", 1, "--loss-scale 0.0: must be above 0"),
    ("--grad-reduce-in-bf16", 1, "--grad-reduce-in-bf16 needs --bf16"),
    ("--fp8-margin 2", 1, "--fp8-margin 2 needs --fp8-format"),
    ("--bf16 --fp8-format hybrid --fp8-param-gather", 2, "--fp8-param-gather needs --use-distributed-optimizer"),
    # batches
    (
        "--micro-batch-size 3",
        1,
        "--global-batch-size 8 is not a multiple of --micro-batch-size 3 x 1 data-parallel ranks = 3",
    ),
    ("", 8, "--global-batch-size 8 is not a multiple of --micro-batch-size 2 x 8 data-parallel ranks = 16"),
    ("--rampup-batch-size 2 2", 1, "--rampup-batch-size 2 2: three numbers are needed, START INCREMENT SAMPLES"),
    ("--rampup-batch-size 2 4 10", 1, "INCREMENT does not divide --global-batch-size 8 - START = 6"),
    ("--rampup-batch-size 1 1 10", 1, "START is not a multiple of --micro-batch-size 2"),
    ("--rampup-batch-size 16 2 10", 1, "START is above --global-batch-size 8"),
    ("--hidden-size 16 --swiglu --num-attention-heads 2", 1, "the default MLP width, two thirds of 4 x hidden in"),
    ("--global-batch-size 2000000 --rampup-batch-size 2 2 10", 1, "the batch would grow 999999 times"),
    ("--rampup-batch-size 2 0 10", 1, "START and INCREMENT must be at least 1"),
    ("--step-batch-size-schedule 0:4", 1, "--global-batch-size 8 is not the last of --step-batch-size-schedule, 4"),
    ("--step-batch-size-schedule 0:3 1K:8", 1, "--step-batch-size-schedule: 3 is not a multiple of"),
    ("--step-batch-size-schedule 8", 1, "--step-batch-size-schedule: 8 is not TOKENS:SIZE"),
    ("--step-batch-size-schedule 0:8 --rampup-batch-size 2 2 10", 1, "exclude each other"),
    # loop and learning rate
    ("--train-samples 80", 1, "--train-iters and --train-samples exclude each other"),
    ("--lr-warmup-samples 8", 1, "--lr-warmup-samples 8 needs --train-samples, but --train-iters was given"),
    ("--lr-decay-samples 8", 1, "--lr-decay-samples 8 needs --train-samples, but --train-iters was given"),
    ("--lr-warmup-iters 10", 1, "--lr-warmup-iters 10 must be below --lr-decay-iters (default --train-iters) 10"),
    ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", 1, "--lr-warmup-fraction and --lr-warmup-iters exclude"),
    ("--lr-warmup-fraction 1", 1, "--lr-warmup-fraction 1.0: must be from 0 to below 1"),
    ("--min-lr 1", 1, "--min-lr 1.0 is above --lr 0.001"),
    ("--lr-warmup-init 1", 1, "--lr-warmup-init 1.0 is above --lr 0.001"),
    ("--lr-decay-style WSD", 1, "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", 1, "--lr-wsd-decay-iters 11 is above --lr-decay-iters"),
    ("--lr-wsd-decay-iters 5", 1, "need --lr-decay-style WSD"),
    ("--decoupled-min-lr 1e-5", 1, "--decoupled-min-lr 1e-05 needs --decoupled-lr"),
    ("--decoupled-lr 1e-5 --decoupled-min-lr 1e-4", 1, "--decoupled-min-lr 0.0001 is above --decoupled-lr 1e-05"),
    (
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        1,
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other",
    ),
    ("--start-weight-decay 0.1", 1, "--start-weight-decay 0.1 needs --weight-decay-incr-style linear or cosine"),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.1",
        1,
        "--weight-decay-incr-style linear needs --start-weight-decay and --end-weight-decay",
    ),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
        1,
        "--end-weight-decay 0.1 is below --start-weight-decay 0.2",
    ),
    ("--recompute-granularity full", 1, "needs --recompute-method and --recompute-num-layers"),
    ("--recompute-method block", 1, "--recompute-method block needs --recompute-granularity full"),
    ("--recompute-modules mlp", 1, "--recompute-modules mlp needs --recompute-granularity selective"),
    ("--recompute-activations --recompute-modules moe", 1, "--recompute-modules moe: valid are core_attn"),
    ("--recompute-activations --recompute-granularity full", 1, "--recompute-activations means"),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --pipeline-schedule zb-h1 "
        "--pipeline-model-parallel-size 2",
        2,
        "--recompute-granularity full saves nothing with --pipeline-schedule zb-h1",
    ),
    # data and tokenizer
    ("--data-path corpus", 1, "--mock-data and --data-path exclude each other"),
    ("--split 1,2,3,4", 1, "--split: 1,2,3,4 must be one to three weights"),
    ("--tokenizer-type SentencePieceTokenizer", 1, "--tokenizer-type SentencePieceTokenizer needs --tokenizer-model"),
    ("--tokenizer-type HuggingFaceTokenizer", 1, "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model"),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file v", 1, "--tokenizer-type GPT2BPETokenizer needs --merge-file"),
    ("--tokenizer-type TikTokenizer", 1, "--tokenizer-type TikTokenizer needs --tokenizer-model"),
    # checkpoints
    ("--save-interval 2", 1, "--save-interval 2 needs --save"),
    ("--keep-last-checkpoints 2", 1, "--keep-last-checkpoints 2 needs --save"),
    ("--save folder --save-interval 2 --save-retain-interval 3", 1, "--save-retain-interval 3 is not a multiple of"),
    ("--ckpt-step 4", 1, "--ckpt-step 4 needs --load"),
    ("--finetune", 1, "--finetune needs --load or --pretrained-checkpoint"),
    ("--use-checkpoint-args", 1, "--use-checkpoint-args needs --load or --pretrained-checkpoint"),
    ("--exit-on-missing-checkpoint", 1, "--exit-on-missing-checkpoint needs --load"),
    # reporting
    ("--eval-interval 0", 1, "--eval-interval 0: must be at least 1"),
    ("--eval-iters -1", 1, "--eval-iters -1: must not be negative"),
    ("--profile --profile-step-start 5 --profile-step-end 5", 1, "--profile-step-end 5 must be above"),
    ("--wandb-exp-name run", 1, "--wandb-exp-name run needs --wandb-project"),
    ("--wandb-project p", 1, "--wandb-project p needs --wandb-exp-name"),
]


@pytest.mark.parametrize("words, world_size, problem", BAD, ids=[words or "world 8" for words, _, _ in BAD])
def test_what_cannot_run_is_refused_in_one_line(words: str, world_size: int, problem: str) -> None:
    problems = check(given(words), world_size)
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


def test_an_empty_command_line_is_told_all_that_it_needs() -> None:
    problems = check(RunConfig(), 1)
    assert len(problems) == 10
    assert all("--" in line for line in problems)


@pytest.mark.parametrize(
    "data, problem",
    [
        ("--data-path 0.3 a 0.7", "--data-path 0.3 a 0.7: write only prefixes, or WEIGHT PREFIX"),
        ("--data-path 0.3 a b 0.7", "write only prefixes, or WEIGHT PREFIX"),
        ("--data-path a 1", "write only prefixes, or WEIGHT PREFIX"),
        ("--data-path -1 a 2 b", "weights must be finite, none negative and not all 0, not -1 2"),
        ("--data-path nan a 2 b", "weights must be finite"),
        ("--data-path 0 a 0 b", "weights must be finite, none negative and not all 0, not 0 0"),
        ("--train-data-path a --data-path b", "exclude each other: choose one source of data"),
        ("--valid-data-path a", "--train-data-path is missing beside"),
        ("--train-data-path a --split 9,1,0", "--split 9,1,0 divides --data-path, but here each split has its"),
        ("--data-path a --data-args-path b", "--data-path and --data-args-path exclude each other"),
    ],
)
def test_sources_of_data_that_contradict_are_refused(data: str, problem: str) -> None:
    problems = check(given(data, without="data.mock_data"), 1)
    assert any(problem in line for line in problems), problems


def test_an_empty_path_is_an_unset_variable() -> None:
    config = given("--save x --save-interval 1")
    config.checkpoint.save = ""
    assert check(config, 1) == ["--save is empty: leave it out or give it a value"]


def test_a_value_that_no_flag_would_let_in_is_refused_too() -> None:
    config = given("")
    config.optimizer.optimizer = "muon"
    assert check(config, 1) == ["--optimizer muon: not one of adam, sgd"]


def test_every_planned_feature_is_refused_by_name_until_it_is_built() -> None:
    sample = {int: 7, float: 0.5, str: "text", bool: True}
    for path, field in all_fields().items():
        if field.planned is None:
            continue
        config = RunConfig()
        others = [choice for choice in field.choices or () if choice != field.default]
        value = others[-1] if others else sample[field.kind]
        section, name = path.split(".")
        setattr(getattr(config, section), name, [value] if field.is_list else value)
        (line,) = not_built(config)
        assert line == f"{field.show([value] if field.is_list else value)}: {field.planned} is not built yet"


def test_a_planned_feature_that_is_off_is_not_refused() -> None:
    config = given("--tensor-model-parallel-size 1 --data-parallel-sharding-strategy no_shard")
    config.layout.num_virtual_stages_per_pipeline_rank = 1
    assert not_built(config) == []


def test_tensor_sequence_and_pipeline_parallelism_and_recompute_are_built() -> None:
    for words in (
        "--tensor-model-parallel-size 4 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
        "--num-layers 3 --pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split",
        *(f"--pipeline-schedule {name}" for name in ("auto", "gpipe", "1f1b", "interleaved", "zb-h1")),
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--recompute-activations --recompute-modules mlp layernorm",
    ):
        assert not_built(given(words)) == [], words


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
