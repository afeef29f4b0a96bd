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


def test_the_mlp_is_four_times_as_wide_or_with_swiglu_two_thirds_of_that_in_64s() -> None:
    assert resolve(given(), 1).model.ffn_hidden_size == 256
    assert resolve(given("--swiglu"), 1).model.ffn_hidden_size == 128  # 170.67 rounded down
    assert resolve(given("--swiglu", "--hidden-size", "4096"), 1).model.ffn_hidden_size == 10880
    assert resolve(given("--ffn-hidden-size", "100"), 1).model.ffn_hidden_size == 100


def test_heads_share_the_width_and_without_groups_each_has_its_keys() -> None:
    model = resolve(given(), 1).model
    assert (model.kv_channels, model.num_query_groups) == (16, 4)
    grouped = resolve(given("--group-query-attention", "--num-query-groups", "2", "--kv-channels", "8"), 1).model
    assert (grouped.kv_channels, grouped.num_query_groups) == (8, 2)
    assert resolve(given("--group-query-attention"), 1).model.num_query_groups == 1


def test_biases_of_linear_layers_include_those_of_qkv() -> None:
    assert resolve(given(), 1).model.add_qkv_bias
    assert not resolve(given("--disable-bias-linear"), 1).model.add_qkv_bias
    assert resolve(given("--disable-bias-linear", "--add-qkv-bias"), 1).model.add_qkv_bias


def test_positions_without_a_table_are_as_many_as_the_sequence_is_long() -> None:
    config = given("--position-embedding-type", "rope")
    assert resolve(config, 1).model.max_position_embeddings == 64
    config.model.max_position_embeddings = None
    assert resolve(config, 1).model.max_position_embeddings == 64


def test_the_global_batch_is_one_micro_batch_of_each_data_parallel_rank() -> None:
    config = given()
    config.training.global_batch_size = None
    assert resolve(config, 1).training.global_batch_size == 2
    assert resolve(config, 4).training.global_batch_size == 8
    config.layout.tensor_model_parallel_size = 2
    assert resolve(config, 4).training.global_batch_size == 4


def test_a_step_schedule_ends_in_the_global_batch() -> None:
    config = given("--step-batch-size-schedule", "0:4", "1K:16")
    config.training.global_batch_size = None
    assert resolve(config, 1).training.global_batch_size == 16


def test_schedules_are_as_long_as_training() -> None:
    assert resolve(given(), 1).learning_rate.lr_decay_iters == 10
    assert resolve(given("--lr-decay-iters", "7"), 1).learning_rate.lr_decay_iters == 7
    by_samples = given("--train-samples", "80")
    by_samples.training.train_iters = None
    rate = resolve(by_samples, 1).learning_rate
    assert (rate.lr_decay_iters, rate.lr_decay_samples) == (None, 80)


def test_weight_decay_is_constant_unless_it_changes() -> None:
    optimizer = resolve(given("--weight-decay", "0.1"), 1).optimizer
    assert (optimizer.start_weight_decay, optimizer.end_weight_decay) == (0.1, 0.1)
    argv = ["--weight-decay-incr-style", "linear", "--start-weight-decay", "0.1", "--end-weight-decay", "0.3"]
    changing = resolve(given(*argv), 1).optimizer
    assert (changing.start_weight_decay, changing.end_weight_decay) == (0.1, 0.3)


def test_a_learning_rate_of_its_own_falls_to_the_common_minimum() -> None:
    rate = resolve(given("--decoupled-lr", "1e-4", "--min-lr", "1e-5"), 1).learning_rate
    assert rate.decoupled_min_lr == 1e-5


def test_small_defaults() -> None:
    resolved = resolve(given(), 1)
    assert resolved.data.split == "969,30,1"
    assert resolved.data.dataloader_type == "single"
    assert resolved.layout.data_parallel_sharding_strategy == "no_shard"
    assert resolved.layout.pipeline_schedule == "1f1b"
    assert resolved.layout.num_virtual_stages_per_pipeline_rank == 1
    assert resolved.training.nan_action == "stop"
    assert resolve(given("--fp16"), 1).training.nan_action == "skip"
    assert resolve(given("--fp16", "--nan-action", "stop"), 1).training.nan_action == "stop"
    assert resolve(given("--recompute-activations"), 1).training.recompute_granularity == "selective"
    assert resolve(given("--use-distributed-optimizer"), 2).layout.data_parallel_sharding_strategy == "optim"
    assert resolve(given(base=GPT3_175B), 1024).tokenizer.tokenizer_type == "GPT2BPETokenizer"
    per_split = given("--train-data-path", "a")
    per_split.data.mock_data = False
    assert resolve(per_split, 1).data.split is None


def test_virtual_stages_follow_from_either_flag() -> None:
    pipeline = ("--num-layers", "8", "--pipeline-model-parallel-size", "2")
    by_layers = resolve(given(*pipeline, "--num-layers-per-virtual-pipeline-stage", "2"), 2).layout
    assert (by_layers.num_virtual_stages_per_pipeline_rank, by_layers.pipeline_schedule) == (2, "interleaved")
    by_count = resolve(given(*pipeline, "--num-virtual-stages-per-pipeline-rank", "4"), 2).layout
    assert (by_count.num_virtual_stages_per_pipeline_rank, by_count.pipeline_schedule) == (4, "interleaved")
    assert resolve(given(*pipeline), 2).layout.pipeline_schedule == "1f1b"


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
    assert resolve(given("--window-size", "(16, 0)"), 1).model.window_size == "16,0"
    for text in ("128", "a,b", "1,2,3", ""):
        with pytest.raises(ValueError, match="must be LEFT,RIGHT"):
            parse_window(text)


def test_every_preset_runs() -> None:
    config = given()
    for name in PRESETS:
        config.model = ModelConfig(**preset_fields(name))
        assert check(config, 1) == []
        assert check(resolve(config, 1), 1) == []
