"""From a command line to a run's configuration: precedence, checkpoints, one message for all problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megalite.config.entry import Loaders, read_config
from megalite.config.errors import FlagError
from megalite.config.fields import finetuning_sections
from megalite.config.resolve import balancing
from megalite.config.schema import CheckpointConfig, RunConfig
from tests.config.launch_lists import (
    GPT3_175B,
    LLAMA3_8B,
    LLAMA3_8B_FP8,
    LLAMA3_8B_SHARDING,
    MIXTRAL_8X7B,
    SMALL,
)

# Everything but the network.
RUN = """
--seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
--vocab-size 130
"""


def read(words: str, world_size: int = 1, stored: Mapping[str, Any] | None = None) -> tuple[RunConfig, list[str]]:
    def load(config: CheckpointConfig) -> Mapping[str, Any] | None:
        assert config.load == "folder"
        return stored

    return read_config(words.split(), "p", "d", world_size, loaders=Loaders(checkpoint_config=load))


def refused(words: str, world_size: int = 1) -> list[str]:
    with pytest.raises(FlagError) as caught:
        read(words, world_size)
    return str(caught.value).splitlines()


def saved() -> dict[str, dict[str, Any]]:
    """What a checkpoint of the small run holds."""
    return read(f"{SMALL} --swiglu --hidden-dropout 0.2")[0].to_dict()


def test_the_command_line_is_over_the_preset_and_the_preset_over_the_defaults() -> None:
    config, _ = read(f"{RUN} --preset llama-7b --num-layers 3")
    assert config.model.num_layers == 3
    assert config.model.hidden_size == 4096
    assert config.model.rotary_base == 10000
    assert config.model.make_vocab_size_divisible_by == 128


def test_a_default_that_was_given_is_over_the_preset() -> None:
    config, _ = read(f"{RUN} --preset llama-7b --hidden-dropout 0.1 --normalization LayerNorm")
    assert (config.model.hidden_dropout, config.model.normalization) == (0.1, "LayerNorm")


def test_an_activation_that_was_given_replaces_the_presets() -> None:
    config, _ = read(f"{RUN} --preset gpt2-124m --swiglu")
    assert (config.model.swiglu, config.model.openai_gelu) == (True, False)
    assert config.model.ffn_hidden_size == 2048


def test_the_checkpoint_is_between_preset_and_command_line() -> None:
    words = f"{RUN} --load folder --use-checkpoint-args --preset llama-tiny --seq-length 32"
    config, notes = read(words, stored=saved())
    assert config.model.num_layers == 4  # the checkpoint's, not the preset's 2
    assert config.model.normalization == "LayerNorm"
    assert config.model.hidden_dropout == 0.2
    assert config.data.seq_length == 32
    assert "--num-layers 4 comes from the checkpoint" in notes
    assert "--seq-length 32 replaces the checkpoint's --seq-length 64" in notes


def test_the_checkpoint_gives_network_and_tokenizer_and_nothing_else() -> None:
    stored = saved()
    stored["training"] |= {"micro_batch_size": 1, "seed": 5}
    stored["model"] |= {"attention_backend": "flash", "label_smoothing": 0.5}
    stored["layout"] |= {"device": "cuda"}
    words = (
        "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --device cpu --load folder --use-checkpoint-args"
    )
    config, _ = read(words, stored=stored)
    assert config.tokenizer.vocab_size == 130
    assert config.data.seq_length == 64
    assert config.model.swiglu
    assert (config.training.micro_batch_size, config.training.seed, config.layout.device) == (2, 1234, "cpu")
    assert (config.model.attention_backend, config.model.label_smoothing) == ("auto", 0.0)


def test_without_the_flag_a_checkpoint_gives_nothing() -> None:
    config, _ = read(f"{SMALL} --load folder", stored=saved())
    assert not config.model.swiglu


def test_a_folder_without_checkpoint_leaves_the_flags_and_says_so() -> None:
    config, notes = read(f"{SMALL} --load folder --use-checkpoint-args", stored=None)
    assert config.model.num_layers == 4
    assert notes == ["--use-checkpoint-args: no checkpoint in folder yet, so its flags are not used"]


def test_a_checkpoint_of_another_version_is_refused() -> None:
    with pytest.raises(FlagError, match="the checkpoint in folder is of another version: unknown .*model.wings"):
        read(f"{SMALL} --load folder --use-checkpoint-args", stored={"model": {"wings": 2}})


def test_a_program_without_checkpoints_refuses_their_flags() -> None:
    with pytest.raises(FlagError, match="--use-checkpoint-args: this program doesn't read checkpoints"):
        read_config(f"{SMALL} --load folder --use-checkpoint-args".split(), "p", "d", 1)


def test_all_problems_come_in_one_message() -> None:
    lines = refused(f"{SMALL} --bf16 --fp16 --num-attention-heads 3 --save-interval 5", 2)
    assert [line.split()[0] for line in lines] == ["--num-attention-heads", "--bf16", "--save-interval"]


def test_notes_say_what_was_ignored_and_what_does_nothing() -> None:
    _, notes = read(f"{SMALL} --use-mcore-models --sequence-parallel --tiktoken-pattern v2")
    assert [note.split(" ")[0] for note in notes] == ["--use-mcore-models", "--sequence-parallel", "--tiktoken-pattern"]


def test_megatrons_gpt3_175b_list_is_taken_as_it_stands() -> None:
    config, notes = read(GPT3_175B, 1024)
    assert notes == []
    layout = config.layout
    assert (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size) == (8, 16)
    assert layout.pipeline_schedule == "1f1b"
    assert config.training.global_batch_size == 1536
    assert config.tokenizer.tokenizer_type == "GPT2BPETokenizer"


def test_megatrons_llama3_8b_list_is_taken_as_it_stands() -> None:
    config, _ = read(f"{LLAMA3_8B} {LLAMA3_8B_FP8} {LLAMA3_8B_SHARDING}", 8)
    precision = config.precision
    assert (precision.fp8_format, precision.fp8_recipe, precision.fp8_amax_history_len) == ("hybrid", "delayed", 1024)
    assert precision.fp8_param_gather and precision.bf16


def test_megatrons_mixtral_list_is_taken_as_it_stands() -> None:
    config, notes = read(MIXTRAL_8X7B, 32)
    assert (config.layout.pipeline_model_parallel_size, config.layout.expert_model_parallel_size) == (4, 8)
    assert config.tokenizer.tokenizer_type == "SentencePieceTokenizer"
    assert balancing(config.model) == {"aux_loss": 0.01}
    assert {note.split()[0] for note in notes} >= {"--moe-grouped-gemm", "--sequence-parallel"}


@pytest.mark.parametrize("program", ["pretrain_gpt.py", "finetune.py"])
@pytest.mark.parametrize("words", ["", "--preset llama-tiny", "--lr 1e-3 --seq-length 8"])
def test_a_command_with_few_flags_is_told_one_thing_a_command_that_works(program: str, words: str) -> None:
    sections = finetuning_sections() if program == "finetune.py" else None
    with pytest.raises(FlagError, match="too few flags for a run") as caught:
        read_config(words.split(), program, "d", 1, sections=sections)
    _, example, _ = str(caught.value).splitlines()
    python, name, *flags = example.split()
    assert (python, name) == ("python", program)
    if flags[0] == "--load-hf":  # network and tokenizer, as its folder would give
        flags[:2] = ["--preset", "llama-125m", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    config, _ = read_config(flags, program, "d", 1, sections=sections)
    assert config.model.num_layers
