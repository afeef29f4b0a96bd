"""Adapters' flags that can't work."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.check import check
from megalite.config.check_peft import lora_parts, target_names
from megalite.config.entry import Loaders, read_config
from megalite.config.errors import FlagError
from megalite.config.fields import section_names
from megalite.config.schema import DataConfig, LearningRateConfig, ModelConfig, RunConfig, TrainingConfig
from megalite.config.schema_finetune import PeftConfig
from tests.config.launch_lists import SMALL


def _problems(*, model: dict[str, Any] | None = None, layout: dict[str, Any] | None = None, **peft: Any) -> list[str]:
    network = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    config = RunConfig(
        model=ModelConfig(**{**network, **(model or {})}),
        training=TrainingConfig(micro_batch_size=1, train_iters=1),
        learning_rate=LearningRateConfig(lr=1e-3),
        data=DataConfig(seq_length=60, mock_data=True),
        peft=PeftConfig(**peft),
    )
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "NullTokenizer", 130
    for name, value in (layout or {}).items():
        setattr(config.layout, name, value)
    return check(config, config.layout.tensor_model_parallel_size)


def test_sound_flags_have_no_problems() -> None:
    assert _problems() == []
    assert _problems(peft="lora") == []
    assert _problems(peft="prefix", num_virtual_tokens=4) == []


def test_an_unknown_target_gets_the_list_of_valid_names() -> None:
    (problem,) = _problems(peft="lora", lora_target_modules=["q_proj,foo"])
    assert "foo is not the name of a linear layer" in problem
    assert "q_proj, k_proj, v_proj, o_proj, c_attn, c_proj, c_fc" in problem
    assert "all-linear" in problem
    (problem,) = _problems(peft="lora", lora_target_modules=["c_attn"], model={"swiglu": True})
    assert "gate_proj, up_proj, gate_up_proj, down_proj" in problem


@pytest.mark.parametrize(
    ("peft", "said"),
    [
        ({"lora_rank": 8}, "--lora-rank 8 needs --peft lora"),
        ({"peft": "lora", "num_virtual_tokens": 4}, "--num-virtual-tokens 4 needs --peft prefix or prompt"),
        ({"peft": "prefix", "prompt_init_text": "a"}, "--prompt-init-text a needs --peft prompt"),
        ({"save_adapter": "x"}, "--save-adapter x needs --peft"),
        ({"peft": "lora", "lora_rank": 0}, "--lora-rank 0: must be at least 1"),
        ({"peft": "lora", "lora_dropout": 1.0}, "--lora-dropout 1.0: must be from 0 to below 1"),
        ({"peft": "lora", "lora_target_modules": ["all-linear", "q_proj"]}, "already means every linear layer"),
        ({"peft": "lora", "lora_target_modules": ["c_attn", "q_proj"]}, "already means q_proj, k_proj, v_proj"),
        ({"peft": "lora", "lora_target_modules": [","]}, "names no layer"),
        ({"peft": "prompt", "num_virtual_tokens": 5}, "more than the network's 64 learned positions"),
        ({"peft": "prefix", "prefix_hidden_size": 5, "num_virtual_tokens": 4}, "needs --prefix-projection"),
    ],
)
def test_combinations_that_cannot_work_are_refused(peft: dict[str, Any], said: str) -> None:
    problems = _problems(**peft)
    assert any(said in problem for problem in problems), problems


def _read(words: str, told: dict[str, Any]) -> RunConfig:
    argv = f"--load-adapter folder {SMALL} {words}".split()
    return read_config(argv, "p", "d", 1, sections=section_names(), loaders=Loaders(adapter=lambda folder: told))[0]


def test_the_folder_of_an_adapter_decides_and_flags_may_only_agree() -> None:
    lora = {"peft": "lora", "lora_rank": 4, "lora_alpha": 8, "use_rslora": False}
    assert _read("--lora-rank 4 --lora-dropout 0.1", lora).peft.lora_alpha == 8
    for words, message in (
        ("--lora-rank 16", "--lora-rank 16: --load-adapter folder has 4; leave the flag out"),  # a default, yet given
        ("--use-rslora", "--use-rslora: --load-adapter folder has False"),
        ("--peft prefix", "--peft prefix: --load-adapter folder has lora"),
        ("--lora-target-modules q_proj", "--lora-target-modules q_proj: --load-adapter folder has targets of its own"),
        ("--num-virtual-tokens 3", "--num-virtual-tokens 3 needs --peft prefix or prompt"),
    ):
        with pytest.raises(FlagError) as raised:
            _read(words, lora)
        assert str(raised.value).startswith(message)
        assert len(str(raised.value).splitlines()) == 1
    with pytest.raises(FlagError, match="--num-virtual-tokens 9 and --seq-length"):
        _read("", {"peft": "prompt", "num_virtual_tokens": 9})
    with pytest.raises(FlagError, match="--prompt-init-text a: --load-adapter folder has vectors of its own"):
        _read("--prompt-init-text a --seq-length 8", {"peft": "prompt", "num_virtual_tokens": 3})


def test_what_frozen_tables_make_meaningless_is_told() -> None:
    argv = f"{SMALL} --peft lora --decoupled-lr 1e-3".split()
    notes = read_config(argv, "p", "d", 1, sections=section_names())[1]
    assert any(note.startswith("--decoupled-lr 0.001 has no effect with --peft lora") for note in notes)


def test_virtual_tokens_and_the_layout() -> None:
    rope = {"position_embedding_type": "rope"}
    layout = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    (problem,) = _problems(peft="prompt", num_virtual_tokens=6, model=rope, layout=layout)
    assert "--tensor-model-parallel-size 4 does not divide --num-virtual-tokens 6" in problem
    assert _problems(peft="prefix", num_virtual_tokens=6, model=rope, layout=layout) == []
    (problem,) = _problems(peft="prefix", model={**rope, "window_size": "8,0"})
    assert "--window-size" in problem


def test_all_linear_means_what_hugging_face_has_as_one_layer() -> None:
    names = ["all-linear"]
    assert lora_parts(ModelConfig(), names) == ["c_attn", "o_proj", "up_proj", "down_proj"]
    gated = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert lora_parts(ModelConfig(swiglu=True), names) == [*gated, "gate_proj", "up_proj", "down_proj"]
    glm = ModelConfig(swiglu=True, rotary_interleaved=True)
    assert lora_parts(glm, names) == [*gated, "gate_up_proj", "down_proj"]
    assert lora_parts(ModelConfig(), target_names(PeftConfig(lora_target_modules=["v_proj,c_proj"]))) == [
        "v_proj",
        "o_proj",
        "down_proj",
    ]
