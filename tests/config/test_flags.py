"""Flags: generated from the schema, precise about what was given, helpful about what wasn't understood."""

from __future__ import annotations

import argparse

import pytest

from megalite.config.check_network import yarn_turns
from megalite.config.entry import SMALLEST, read_config
from megalite.config.errors import FlagError
from megalite.config.fields import FINETUNING, all_fields, get, section_names
from megalite.config.flags import (
    FlagParser,
    add_section,
    build_parser,
    explicit_fields,
    parse_flags,
    parse_namespace,
    read_run,
    read_section,
)
from megalite.config.presets import preset_fields
from megalite.config.schema import ModelConfig, RunConfig, TokenizerConfig


def parse(*argv: str) -> tuple[RunConfig, set[str], list[str]]:
    return parse_flags(argv, "pretrain_gpt.py", "Pretrain.")


PARSER = build_parser("p", "d", section_names())  # it keeps nothing between two calls


def help_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    return {name: action.help or "" for action in parser._actions for name in action.option_strings}


def test_nothing_given_is_the_schema_defaults() -> None:
    config, explicit, notes = parse()
    assert (config, explicit, notes) == (RunConfig(), set(), [])


def test_every_field_can_be_set_by_its_flag_and_is_then_explicit() -> None:
    sample = {int: "3", float: "0.5", str: "text"}
    parser = build_parser("p", "d", section_names(), megatron=True)
    for path, field in all_fields().items():
        words = [field.option]
        if field.kind is not bool:
            words.append(str(field.choices[-1]) if field.choices else sample[field.kind])
        namespace, _ = parse_namespace(parser, words)
        value = get(read_run(namespace), path)
        assert explicit_fields(namespace) == {path}
        assert value == (not field.default) if field.kind is bool else value is not None
        if field.kind is not bool and not field.choices:
            assert value == ([field.kind(sample[field.kind])] if field.is_list else field.kind(sample[field.kind]))


def test_giving_a_default_is_explicit() -> None:
    _, explicit, _ = parse("--seed", "1234")
    assert explicit == {"training.seed"}


def test_help_names_the_default_of_every_field_that_gets_one_later() -> None:
    config, _ = read_config(SMALLEST["pretrain_gpt.py"].split()[2:], "pretrain_gpt.py", "d", 1)
    filled = [field for field in all_fields().values() if field.default is None and get(config, field.path) is not None]
    explicit, helps = parse(*SMALLEST["pretrain_gpt.py"].split()[2:])[1], help_of(PARSER)
    for field in filled:
        network = field.section == "model" and field.name in preset_fields("llama-tiny")
        if field.path not in explicit and not network:
            assert "(default: none)" not in helps[field.option], field.path


def test_helps_default_of_yarns_bounds_is_what_runs() -> None:
    helps = help_of(build_parser("p", "d"))
    for option, value in zip(("--yarn-beta-fast", "--yarn-beta-slow"), yarn_turns(ModelConfig()), strict=True):
        assert helps[option].endswith(f"default {value:g}")


@pytest.mark.parametrize(
    "words, path, value",
    [
        ("--disable-bias-linear", "model.add_bias_linear", False),  # on by default: the flag turns it off
        ("--no-save-optim", "checkpoint.save_optim", False),
        ("--no-save-optim", "checkpoint.load_optim", True),
        ("--loss-scale-window 1000.0", "precision.loss_scale_window", 1000),  # a float in Megatron-LM
        ("--train-samples 1e6", "training.train_samples", 1_000_000),
        ("--train-samples 9007199254740993.0", "training.train_samples", 2**53 + 1),  # which no float holds
        ("--train-samples 1e18", "training.train_samples", 10**18),
        ("--rampup-batch-size 2 2 100 --bf16", "training.rampup_batch_size", [2, 2, 100]),
        ("--data-path 0.3 a 0.7 b", "data.data_path", ["0.3", "a", "0.7", "b"]),
        ("--window-size -1,0", "model.window_size", "-1,0"),  # a value may begin with a minus sign
        ("--lr -1e-3", "learning_rate.lr", -1e-3),
        ("--num-layers 2 --num-layers 3", "model.num_layers", 3),  # the last one counts
    ],
)
def test_a_value_is_read_as_it_is_meant(words: str, path: str, value: object) -> None:
    assert get(parse(*words.split())[0], path) == value


@pytest.mark.parametrize(
    ("flag", "text", "problem"),
    [
        ("--train-iters", "1.5", "1.5 is not a whole number"),
        ("--train-samples", "1e-999999999", "is not a whole number"),
        ("--num-layers", "inf", "inf is not a finite number"),
        ("--train-samples", "1e30", "is too large: at most 9223372036854775807"),
        ("--train-samples", "1e999999999", "is too large: at most 9223372036854775807"),
        ("--train-samples", "9" * 5000, "is too large: at most 9223372036854775807"),
    ],
    ids=lambda value: value[:20],
)
def test_a_whole_number_is_never_rounded(flag: str, text: str, problem: str) -> None:
    with pytest.raises(FlagError, match=f"{flag}: .*{problem}"):
        parse(flag, text)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--num-layer", "2"], "unknown flag --num-layer; did you mean --num-layers?"),
        (["--micro-batch", "2"], "unknown flag --micro-batch; did you mean --micro-batch-size?"),  # no abbreviations
        (["--fp8", "hybrid"], "unknown flag --fp8; did you mean --fp8-format?"),  # and not --fp64
        (["--num_layers", "2"], "unknown flag --num_layers; did you mean --num-layers?"),
        (["--hiden-size=64"], "unknown flag --hiden-size; did you mean --hidden-size?"),
        (["--moe-router-topkk", "2"], "unknown flag --moe-router-topkk; did you mean --moe-router-topk?"),
        (["--qqqqqqqq"], "unknown flag --qqqqqqqq; --help lists all flags"),
        (["word"], "unexpected 'word': a value without a flag before it"),
        (["--lr"], "--lr: expected one argument"),
        (["--lr", "much"], "--lr: much is not a number"),
        (["--bf16=1"], "--bf16: takes no value; remove =1"),
        (["--optimizer", "adamw"], "--optimizer: adamw isn't one of its values; valid: adam, sgd"),
        (["--timing-log-level", "3"], "--timing-log-level: 3 isn't one of its values; valid: 0, 1, 2"),
    ],
)
def test_a_mistake_is_named_with_what_would_be_valid(argv: list[str], message: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse(*argv)
    assert str(caught.value) == message


def test_all_unknown_flags_are_reported_at_once() -> None:
    with pytest.raises(FlagError) as caught:
        parse("--num-layer", "2", "--bff16")
    assert len(str(caught.value).splitlines()) == 2


def test_every_flag_says_its_default_and_meaning() -> None:
    helps = help_of(build_parser("p", "d", section_names()))
    for field in all_fields().values():
        text = helps[field.option]
        assert "default" in text, field.option
        assert "\n" not in text
        assert len(text.replace("(default", "")) > 15, field.option


def test_help_has_one_group_for_each_section_and_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = build_parser("finetune.py", "Fine-tune.", section_names()).format_help()
    for section in section_names():
        assert f"\n{section.replace('_', ' ')}:\n" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    for option in (field.option for field in all_fields().values()):
        assert f" {option}" in text


def test_pretraining_names_the_program_that_has_fine_tunings_flags() -> None:
    fields = [field for field in all_fields().values() if field.section in FINETUNING]
    for field in fields:
        if field.option == "--chat-template":  # Megatron-LM's server has one of that name, which means nothing here
            continue
        with pytest.raises(FlagError, match=f"unknown flag {field.option}; it is a flag of finetune.py"):
            parse(field.option, *(["1"] if field.kind is not bool else []))
    assert {field.option for field in fields} > {"--load-hf", "--sft-data", "--task"}
    assert parse("--chat-template", "x")[2] != []


def test_a_tool_reads_one_section_beside_flags_of_its_own() -> None:
    parser = build_parser("tools/train.py", "A tool.", sections=["tokenizer"])
    parser.add_argument("--seed", type=int, default=7)
    namespace, notes = parse_namespace(parser, ["--vocab-size", "10", "--seed", "3"])
    assert read_section(namespace, "tokenizer") == TokenizerConfig(vocab_size=10)
    assert (namespace.seed, notes) == (3, [])
    assert explicit_fields(namespace) == {"tokenizer.vocab_size"}
    with pytest.raises(FlagError, match="unknown flag --vocab-sise; did you mean --vocab-size?"):
        parse_namespace(parser, ["--vocab-sise", "3"])


def test_a_tool_can_take_single_fields_of_a_section() -> None:
    parser = FlagParser("tool", "A tool.")
    add_section(parser, "checkpoint", only=["load", "ckpt_step"])
    namespace, _ = parse_namespace(parser, ["--load", "folder"])
    assert read_section(namespace, "checkpoint").load == "folder"
    with pytest.raises(FlagError, match="unknown flag --save"):
        parse_namespace(parser, ["--save", "folder"])
