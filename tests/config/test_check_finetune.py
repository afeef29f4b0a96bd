"""Fine-tuning's flags: what they say together, what they don't go with, and what a base model decides."""

from __future__ import annotations

import pytest

from megalite.config.check import check, without_effect
from megalite.config.entry import Loaders, read_config
from megalite.config.errors import FlagError
from megalite.config.fields import section_names
from megalite.config.flags import parse_flags
from megalite.config.resolve import resolve
from megalite.config.schema import ModelConfig, RunConfig, TokenizerConfig
from megalite.config.schema_finetune import FinetuneConfig
from tests.config.launch_lists import SMALL

CORPUS = SMALL.replace("--mock-data", "")


def given(words: str, base: str = CORPUS) -> RunConfig:
    return parse_flags(f"{base} {words}".split(), "p", "d", section_names())[0]


@pytest.mark.parametrize(
    "words",
    [
        "--sft-data a b --sft-valid-data c --sft-packing --sft-long-answers drop --chat-template chatml",
        "--sft-data a --sft-valid-share 0.1 --task sft",
        "--sft-data a --task classification --class-names no yes",
        "--mock-data --task lm --load-hf folder",
    ],
)
def test_what_can_be_learnt_has_no_problems(words: str) -> None:
    assert check(given(words), 1) == []


def test_the_task_and_the_order_follow_from_the_data() -> None:
    taught, plain = resolve(given("--sft-data a"), 1), resolve(given("--mock-data"), 1)
    assert (taught.finetune.task, taught.data.dataloader_type) == ("sft", "cyclic")
    assert (plain.finetune.task, plain.data.dataloader_type) == ("lm", "single")
    assert resolve(given("--sft-data a --dataloader-type single"), 1).data.dataloader_type == "single"


def test_what_sft_data_makes_meaningless_is_told() -> None:
    words = "--sft-data a --split 9,1 --reset-attention-mask --eod-mask-loss"
    assert [line.split()[0] for line in without_effect(given(words))] == [
        "--split",
        "--reset-attention-mask",
        "--eod-mask-loss",
    ]


def test_an_interval_without_anything_to_validate_on_is_told() -> None:
    (line,) = without_effect(given("--sft-data a --eval-interval 5 --eval-iters 2"))
    assert line == "--eval-interval 5 has no effect without --sft-valid-data or --sft-valid-share"
    assert without_effect(given("--sft-data a --eval-interval 5 --eval-iters 2 --sft-valid-share 0.1")) == []


NETWORK = ModelConfig(
    num_layers=3,
    hidden_size=48,
    ffn_hidden_size=96,
    num_attention_heads=6,
    kv_channels=8,
    max_position_embeddings=128,
    position_embedding_type="rope",
    hidden_dropout=0.0,
    model_vocab_size=500,
)
RUN = "--sft-data a --load-hf folder --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "


def read(words: str, classes: tuple[str, ...] | None = None) -> RunConfig:
    def load(finetune: FinetuneConfig) -> tuple[ModelConfig, TokenizerConfig, tuple[str, ...] | None, list[str]]:
        assert finetune.load_hf == "folder"
        return NETWORK, TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="folder"), classes, []

    argv = f"{RUN} {words}".split()
    return read_config(argv, "p", "d", 1, sections=section_names(), loaders=Loaders(base_model=load))[0]


def test_network_and_tokenizer_come_from_the_base_model() -> None:
    config = read("")
    assert (config.model.num_layers, config.model.kv_channels, config.model.model_vocab_size) == (3, 8, 500)
    assert (config.model.hidden_dropout, config.model.make_vocab_size_divisible_by) == (0.0, 128)
    assert config.tokenizer.tokenizer_model == "folder"


def test_the_command_line_decides_what_the_network_leaves_open() -> None:
    config = read("--hidden-dropout 0.2 --max-position-embeddings 256 --num-layers 3 --tokenizer-type TikTokenizer "
                  "--tokenizer-model file --attention-backend unfused")  # fmt: skip
    assert (config.model.hidden_dropout, config.model.max_position_embeddings) == (0.2, 256)
    assert (config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model) == ("TikTokenizer", "file")
    assert config.model.attention_backend == "unfused"


def test_a_flag_that_contradicts_the_network_is_refused() -> None:
    with pytest.raises(FlagError) as raised:
        read("--num-layers 4 --swiglu")
    assert [line.split()[:2] for line in str(raised.value).splitlines()] == [
        ["--num-layers", "4"],
        ["--swiglu", "contradicts"],
    ]


CLASSIFY = "--task classification"


def test_classes_come_from_a_classifier_unless_they_have_only_numbers() -> None:
    assert read(CLASSIFY, ("no", "yes")).finetune.class_names == ["no", "yes"]
    assert read(f"{CLASSIFY} --class-names no yes", ("no", "yes")).finetune.class_names == ["no", "yes"]
    assert read(CLASSIFY, ("LABEL_0", "LABEL_1")).finetune.class_names is None
    assert read(f"{CLASSIFY} --class-names no yes", ("LABEL_0", "LABEL_1")).finetune.class_names == ["no", "yes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--load-hf folder is a classifier (no, yes): give --task classification"),
        (f"{CLASSIFY} --class-names yes no", "--class-names yes no contradicts --load-hf folder, which has no yes"),
    ],
)
def test_what_contradicts_a_classifier_is_refused(words: str, message: str) -> None:
    with pytest.raises(FlagError) as raised:
        read(words, ("no", "yes"))
    assert str(raised.value) == message
