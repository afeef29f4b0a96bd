"""What an adapter's folder decides and what targets mean; flags that can't work together are in `refused.txt`."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.check_peft import lora_parts, target_names
from megalite.config.entry import Loaders, read_config
from megalite.config.errors import FlagError
from megalite.config.fields import section_names
from megalite.config.schema import ModelConfig, RunConfig
from megalite.config.schema_finetune import PeftConfig
from tests.config.launch_lists import SMALL


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


def test_all_linear_means_what_hugging_face_has_as_one_layer() -> None:
    names = ["all-linear"]
    assert lora_parts(ModelConfig(), names) == ["c_attn", "o_proj", "up_proj", "down_proj"]
    gated = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert lora_parts(ModelConfig(swiglu=True), names) == [*gated, "gate_proj", "up_proj", "down_proj"]
    glm = ModelConfig(swiglu=True, rotary_interleaved=True)
    assert lora_parts(glm, names) == [*gated, "gate_up_proj", "down_proj"]
    some = target_names(PeftConfig(lora_target_modules=["v_proj,c_proj"]), ModelConfig())
    assert lora_parts(ModelConfig(), some) == ["v_proj", "o_proj", "down_proj"]
    latent = ModelConfig(multi_latent_attention=True, swiglu=True, rotary_interleaved=True)
    attention = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    assert lora_parts(latent, names) == [*attention, "gate_proj", "up_proj", "down_proj"]
    latent.q_lora_rank = 8
    assert target_names(PeftConfig(), latent) == ["q_a_proj", "q_b_proj", *attention[1:]]
