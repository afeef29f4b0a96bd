"""Derived defaults, against values worked out by hand from Megatron-LM's rules."""

from __future__ import annotations

import copy
import json
import random
import re

import pytest

from megalite.config.check import check
from megalite.config.fields import all_fields, get
from megalite.config.flags import parse_flags
from megalite.config.presets import PRESETS, preset_fields
from megalite.config.resolve import data_parallel_size, drop_idle, parse_split, parse_window, resolve
from megalite.config.schema import LayoutConfig, ModelConfig, RunConfig
from tests.config.launch_lists import GPT3_175B, LLAMA3_8B, SMALL


def given(*more: str, base: str = SMALL) -> RunConfig:
    return parse_flags([*base.split(), *more], "p", "d")[0]


def test_what_every_run_has_is_never_none_once_resolved() -> None:
    for config, world_size in ((given(), 1), (given(base=GPT3_175B), 1024), (given(base=LLAMA3_8B), 8)):
        resolved = resolve(config, world_size)
        assert [
            path for path, field in all_fields().items() if not field.optional and get(resolved, path) is None
        ] == []


def test_the_given_configuration_is_left_alone() -> None:
    config = given()
    before = copy.deepcopy(config)
    resolve(config, 1)
    assert config == before


def test_resolving_twice_changes_nothing_and_stays_free_of_problems() -> None:
    lists = [
        (given(), 1),
        (given("--bf16", "--recompute-activations", "--window-size", "(16,0)", "--split", "9,1"), 1),
        (given("--rampup-batch-size", "2", "2", "100", "--decoupled-lr", "1e-4"), 1),
        (given("--position-embedding-type", "rope", "--swiglu", "--disable-bias-linear"), 4),
        (given("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"), 2),
        (given(base=GPT3_175B), 1024),
        (given(base=LLAMA3_8B), 8),
    ]
    for config, world_size in lists:
        assert check(config, world_size) == []
        once = resolve(config, world_size)
        assert resolve(once, world_size) == once
        assert check(once, world_size) == []


def test_a_configuration_survives_json() -> None:
    for config in (RunConfig(), given(), resolve(given(base=GPT3_175B), 1024), resolve(given(base=LLAMA3_8B), 8)):
        assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("section", "name", "value", "wanted"),
    [
        ("model", "num_layers", "12", "a whole number"),
        ("model", "num_layers", 12.0, "a whole number"),
        ("model", "num_layers", True, "a whole number"),
        ("model", "swiglu", 1, "true or false"),
        ("model", "swiglu", None, "true or false"),
        ("learning_rate", "lr", "1e-3", "a number"),
        ("data", "data_path", "text", "a list, each item a text"),
        ("data", "data_path", [1], "a list, each item a text"),
        ("data", "split", 969, "a text"),
    ],
)
def test_a_stored_value_of_another_type_is_refused_by_the_name_of_its_field(
    section: str, name: str, value: object, wanted: str
) -> None:
    values = given().to_dict()
    values[section][name] = value
    with pytest.raises(ValueError, match=re.escape(f"{section}.{name} is {value!r}, not {wanted}")):
        RunConfig.from_dict(values)


PIPELINE = "--num-layers 8 --pipeline-model-parallel-size 2"
LINEAR = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.3"
DERIVED: list[tuple[str, int, str, object]] = [
    ("", 1, "model.ffn_hidden_size", 256),  # four times the width
    ("--swiglu", 1, "model.ffn_hidden_size", 128),  # two thirds of that, 170.67, in multiples of 64
    ("--swiglu --hidden-size 4096", 1, "model.ffn_hidden_size", 10880),
    ("--ffn-hidden-size 100", 1, "model.ffn_hidden_size", 100),
    ("", 1, "model.kv_channels", 16),
    ("--kv-channels 8", 1, "model.kv_channels", 8),
    ("", 1, "model.num_query_groups", 4),  # each head has its own keys
    ("--group-query-attention --num-query-groups 2", 1, "model.num_query_groups", 2),
    ("--group-query-attention", 1, "model.num_query_groups", 1),
    ("", 1, "model.add_qkv_bias", True),  # one of the linear layers' biases
    ("--disable-bias-linear", 1, "model.add_qkv_bias", False),
    ("--disable-bias-linear --add-qkv-bias", 1, "model.add_qkv_bias", True),
    ("--window-size (16,0)", 1, "model.window_size", "16,0"),
    ("", 1, "learning_rate.lr_decay_iters", 10),  # as long as training
    ("--lr-decay-iters 7", 1, "learning_rate.lr_decay_iters", 7),
    ("--decoupled-lr 1e-4 --min-lr 1e-5", 1, "learning_rate.decoupled_min_lr", 1e-5),
    ("--weight-decay 0.1", 1, "optimizer.start_weight_decay", 0.1),
    ("--weight-decay 0.1", 1, "optimizer.end_weight_decay", 0.1),
    (LINEAR, 1, "optimizer.start_weight_decay", 0.1),
    (LINEAR, 1, "optimizer.end_weight_decay", 0.3),
    ("", 1, "data.split", "969,30,1"),
    ("", 1, "data.dataloader_type", "single"),
    ("", 1, "training.nan_action", "stop"),
    ("--fp16", 1, "training.nan_action", "skip"),
    ("--fp16 --nan-action stop", 1, "training.nan_action", "stop"),
    ("--recompute-activations", 1, "training.recompute_granularity", "selective"),
    ("", 1, "layout.data_parallel_sharding_strategy", "no_shard"),
    ("--use-distributed-optimizer", 2, "layout.data_parallel_sharding_strategy", "optim"),
    ("", 1, "layout.num_virtual_stages_per_pipeline_rank", 1),
    (f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 2", 2, "layout.num_virtual_stages_per_pipeline_rank", 2),
    (f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 2", 2, "layout.pipeline_schedule", "interleaved"),
    (f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 4", 2, "layout.pipeline_schedule", "interleaved"),
    (PIPELINE, 2, "layout.pipeline_schedule", "1f1b"),
]


@pytest.mark.parametrize("words, world_size, path, value", DERIVED)
def test_a_default_follows_from_what_was_given(words: str, world_size: int, path: str, value: object) -> None:
    assert get(resolve(given(*words.split()), world_size), path) == value


def test_what_was_not_given_follows_from_the_rest() -> None:
    config = given("--position-embedding-type", "rope")
    config.model.max_position_embeddings = config.training.global_batch_size = None  # type: ignore[assignment]
    for tensor, world_size, batch in (
        (1, 1, 2),
        (1, 4, 8),
        (2, 4, 4),
    ):  # a micro-batch of 2 for each data-parallel rank
        config.layout.tensor_model_parallel_size = tensor
        resolved = resolve(config, world_size)
        assert (resolved.model.max_position_embeddings, resolved.training.global_batch_size) == (64, batch)
    config.training.step_batch_size_schedule = ["0:4", "1K:16"]
    assert resolve(config, 1).training.global_batch_size == 16
    config.training.train_iters, config.training.train_samples = None, 80
    rate = resolve(config, 1).learning_rate
    assert (rate.lr_decay_iters, rate.lr_decay_samples) == (None, 80)
    config.data.train_data_path = ["a"]
    assert resolve(config, 1).data.split is None


def test_an_evaluation_alone_needs_no_learning_rate() -> None:
    config = given("--skip-train")
    config.training.train_iters = config.learning_rate.lr = None
    assert check(config, 1) == []
    resolved = resolve(config, 1)
    assert (resolved.training.train_iters, resolved.learning_rate.lr) == (1, 0.0)
    assert check(resolved, 1) == []


def test_what_cannot_matter_in_a_layout_is_dropped_and_said() -> None:
    argv = ["--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    used, lines = drop_idle(given(*argv), 1)
    assert used == given()
    assert lines == [
        "--sequence-parallel has no effect with --tensor-model-parallel-size 1",
        "--use-distributed-optimizer has no effect with one data-parallel rank",
        "--overlap-grad-reduce has no effect with one data-parallel rank",
        "--overlap-param-gather has no effect with one data-parallel rank",
    ]
    used, lines = drop_idle(given(*argv), 2)
    assert lines == ["--sequence-parallel has no effect with --tensor-model-parallel-size 1"]
    assert used.layout.use_distributed_optimizer
    used, lines = drop_idle(given(*argv, "--tensor-model-parallel-size", "2"), 4)
    assert lines == []
    argv = ["--disable-bias-linear", "--num-experts", "4", "--tensor-model-parallel-size", "2", *argv]
    assert len(drop_idle(given(*argv), 2)[1]) == 3
    used, lines = drop_idle(given(*argv, "--expert-tensor-parallel-size", "1"), 2)  # both hold all experts
    assert lines == [] and used.layout.use_distributed_optimizer
    with_ep = [*argv, "--expert-tensor-parallel-size", "1", "--expert-model-parallel-size", "2"]
    assert len(drop_idle(given(*with_ep), 2)[1]) == 3


def test_the_data_parallel_size_is_what_the_other_axes_leave() -> None:
    layout = LayoutConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=3, context_parallel_size=2)
    assert data_parallel_size(layout, 24) == 2
    assert data_parallel_size(layout, 12) == 1
    assert data_parallel_size(layout, 8) == 0
    assert data_parallel_size(LayoutConfig(), 1) == 1


@pytest.mark.parametrize(
    "text, weights",
    [
        ("969,30,1", [969, 30, 1]),
        ("'99,1,0'", [99, 1, 0]),
        ("90, 10", [90, 10, 0]),
        ("100", [100, 0, 0]),
        ("0.9,0.05,0.05", [0.9, 0.05, 0.05]),
        ("1/1/1", [1, 1, 1]),
    ],
)
def test_a_split_is_up_to_three_weights(text: str, weights: list[float]) -> None:
    assert parse_split(text) == weights


def test_a_resolved_split_is_read_back_exactly() -> None:
    numbers, config = random.Random(0), given()
    for _ in range(100):
        weights = [numbers.random() for _ in range(3)]
        config.data.split = ",".join(str(weight) for weight in weights)
        assert parse_split(str(resolve(config, 1).data.split)) == weights


@pytest.mark.parametrize("text", ["1,2,3,4", "a,b", "", "0,0,0", "-1,2,3", "nan,1,1", "inf,1,1", "1,,1", "9,1,"])
def test_a_bad_split_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="969,30,1"):
        parse_split(text)


def test_a_window_is_read_with_or_without_brackets() -> None:
    assert parse_window("(128,0)") == parse_window("128, 0") == (128, 0)
    for text in ("128", "a,b", "1,2,3", ""):
        with pytest.raises(ValueError, match="must be LEFT,RIGHT"):
            parse_window(text)


def test_every_preset_runs() -> None:
    config = given()
    for name in PRESETS:
        config.model = ModelConfig(**preset_fields(name))
        assert check(config, 1) == []
        assert check(resolve(config, 1), 1) == []
