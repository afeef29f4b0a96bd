"""Adapter folders that are missing, damaged, of another model or of another kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.config.entry import fill_from_adapter
from megalite.config.errors import FlagError, UserError
from megalite.config.schema import RunConfig
from megalite.config.schema_finetune import PeftConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.peft.adapter import plan_adapter
from megalite.peft.convert import from_peft
from megalite.peft.files import adapter_settings, base_note, peft_config, read_adapter
from tests.models.hf_models import VOCABULARY, llama_like
from tests.peft.interop import make_and_save


@pytest.fixture
def base(tmp_path: Path) -> Path:
    llama_like("Llama", num_key_value_heads=2).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _save(base: Path, values: dict[str, Any]) -> Path:
    folder = base.parent / "adapter"
    make_and_save(single_process_mesh(), str(base), values, str(folder))
    return folder


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _load(base: Path, adapter: Path) -> None:
    model = read_huggingface_config(str(base)).model
    plan_adapter(peft_config(adapter), model, VOCABULARY, single_process_mesh().world)


def test_a_folder_that_is_missing_or_damaged_is_named(base: Path) -> None:
    with pytest.raises(UserError, match="nowhere holds no adapter_config.json"):
        peft_config("nowhere")
    folder = _save(base, {"peft": "lora"})
    (folder / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors"):
        _load(base, folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors"):
        _load(base, folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["embed_tokens"]},
        {"num_transformer_submodules": 2},
        {"lora_alpha": "much"},
        {"peft_type": ["LORA"]},
        {"r": 2.5},
        {"alpha_pattern": [8]},
        {"alpha_pattern": {"(": 8}},
        {"use_rslora": "yes"},
        {"init_lora_weights": "pissa_niter_4"},
        {"an_option_of_tomorrow": 3},
        {"target_modules": "("},
        {"target_modules": [3]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_not_supported_is_refused_by_its_name(base: Path, changes: dict[str, Any]) -> None:
    folder = _save(base, {"peft": "lora"})
    _edit(folder, **changes)
    with pytest.raises(UserError, match=next(iter(changes))):
        _load(base, folder)


@pytest.mark.parametrize(
    "values",
    [{"peft": "lora"}, {"peft": "prefix", "num_virtual_tokens": 3}, {"peft": "prompt"}],
    ids=lambda v: v["peft"],
)
def test_an_adapter_of_another_model_is_refused_in_one_message(base: Path, values: dict[str, Any]) -> None:
    folder, other = _save(base, values), base.parent / "other"
    llama_like("Llama", hidden_size=48, num_key_value_heads=2).save_pretrained(other)
    with pytest.raises(UserError, match="is an adapter for another model:\n  ") as caught:
        _load(other, folder)
    assert len(str(caught.value).splitlines()) <= 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["q_proj", "k_proj", "v_proj"]}, r"o_proj: it has matrices, but isn't in target_modules"),
        ({"target_modules": r".*\.[qkv]_proj"}, r"o_proj: it has matrices"),
        ({"exclude_modules": ["k_proj"]}, r"k_proj: it has matrices"),
        ({"layers_to_transform": [0]}, r"layers\.1\.self_attn\.k_proj: it has matrices"),
        ({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]}, "up_proj: in target_modules, but"),
        ({"r": 8}, r"_proj has matrices of rank 16, but adapter_config\.json says 8"),
        ({"rank_pattern": {"q_proj": 8}}, r"_proj has matrices of rank 16, but adapter_config\.json says 8"),
    ],
    ids=["less", "pattern", "excluded", "layers", "more", "rank", "rank by pattern"],
)
def test_matrices_and_ranks_are_those_that_the_configuration_means(
    base: Path, changes: dict[str, Any], message: str
) -> None:
    folder = _save(base, {"peft": "lora"})
    _edit(folder, **changes)
    with pytest.raises(UserError, match=message):
        _load(base, folder)
    usual = {"exclude_modules": None, "layers_to_transform": [0, 1], "r": 16, "rank_pattern": {}}
    _edit(folder, target_modules=r".*\.[qkvo]_proj", **usual)
    _load(base, folder)
    _edit(folder, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "c_attn"])  # of other models too
    _load(base, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {name: tensor.int() for name, tensor in t.items()}, "not floating-point"),
        (lambda t: {name: tensor * torch.nan for name, tensor in t.items()}, "aren't finite"),
        (lambda t: {**t, "base_model.model.model.embed_tokens.weight": torch.zeros(3)}, "embed_tokens"),
        (lambda t: {**t, "base_model.model.score.weight": torch.zeros(3, 32)}, "is of a classifier"),
        (
            lambda t: {name: tensor for name, tensor in t.items() if ".layers.1." not in name},
            "not supported: it covers only some of the layers:\n  layers_to_transform",
        ),
    ],
    ids=["int", "nan", "embedding", "head", "one layer"],
)
def test_tensors_that_have_no_place_or_are_missing_are_refused(base: Path, change: Any, message: str) -> None:
    folder = _save(base, {"peft": "lora"})
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(UserError, match=message):
        _load(base, folder)


@pytest.mark.parametrize("shape", [(3, 32), (2, 48)])
def test_a_head_must_be_of_as_many_classes_and_as_wide(base: Path, shape: tuple[int, int]) -> None:
    folder = _save(base, {"peft": "prompt"})
    path = folder / "adapter_model.safetensors"
    save_file({**load_file(path), "base_model.model.score.weight": torch.zeros(shape)}, path)
    with pytest.raises(UserError, match="its head is of shape"):
        from_peft(read_adapter(folder), read_huggingface_config(str(base)).model, VOCABULARY, 2)


def test_an_adapter_of_another_name_is_told(base: Path) -> None:
    folder = _save(base, {"peft": "lora"})
    for name, told in ((None, False), (str(base), False), ("hub/base", False), ("hub/other", True)):
        _edit(folder, base_model_name_or_path=name)
        note = base_note(folder, str(base))
        assert (note is not None and note.startswith("warning: ")) == told


def test_the_folder_says_kind_rank_scale_and_length(base: Path) -> None:
    folder = _save(base, {"peft": "lora", "lora_rank": 3, "lora_alpha": 5, "use_rslora": True})
    config = RunConfig(peft=PeftConfig(load_adapter=str(folder), lora_rank=4))
    with pytest.raises(FlagError, match="--lora-rank 4: --load-adapter .* has 3"):
        fill_from_adapter(config, adapter_settings(folder), {"peft.lora_rank"})
    fill_from_adapter(config, adapter_settings(folder), ())
    filled = config.peft
    assert (filled.peft, filled.lora_rank, filled.lora_alpha, filled.use_rslora) == ("lora", 3, 5, True)
    folder = _save(base, {"peft": "prompt", "num_virtual_tokens": 3})
    with pytest.raises(FlagError, match="--peft lora: --load-adapter .* has prompt"):
        fill_from_adapter(config, adapter_settings(folder), {"peft.peft"})
    assert peft_config(folder).num_virtual_tokens == 3


def test_targets_get_short_names_only_where_they_mean_no_other_layer(tmp_path: Path) -> None:
    from tests.models.hf_models import gpt2

    gpt2().save_pretrained(tmp_path / "base")
    for targets, names in ((["c_proj"], ["c_proj"]), (["o_proj", "c_fc"], ["attn.c_proj", "c_fc"])):
        folder = _save(tmp_path / "base", {"peft": "lora", "lora_target_modules": targets})
        config = read_adapter(folder).config
        assert config["target_modules"] == names
        assert config["fan_in_fan_out"] is True
        assert config["rank_pattern"] == {}


def test_an_existing_adapter_is_replaced_whole(base: Path) -> None:
    _save(base, {"peft": "lora"})
    folder = _save(base, {"peft": "prompt", "num_virtual_tokens": 3})
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert torch.equal(
        read_adapter(folder).embeddings(), load_file(folder / "adapter_model.safetensors")["prompt_embeddings"]
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "(.|.)+[!-%]"},
        {"exclude_modules": "(.|.)+[!-%]"},
        {"rank_pattern": {"(.|.)+[!-%]": 4}},
        {"alpha_pattern": {"(.|.)+[!-%]": 4}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_pattern_that_would_never_end_is_refused(
    base: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each more character of a name doubles the ways in which it can fail to fit."""
    monkeypatch.setattr("megalite.peft.files._SECONDS", 0.2)
    folder = _save(base, {"peft": "lora"})
    _edit(folder, **changes)
    with pytest.raises(UserError, match=r"adapter_config\.json: matching its patterns takes too long; write module"):
        _load(base, folder)
    _edit(folder, **{next(iter(changes)): "a" * 1001 if "modules" in next(iter(changes)) else {"a" * 1001: 4}})
    with pytest.raises(UserError, match="is a pattern of 1001 characters; the limit is 1000"):
        _load(base, folder)


def test_an_adapter_on_the_output_is_refused_for_that(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = llama_like("Llama")
    model.save_pretrained(tmp_path / "base")
    adapted: Any = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(
        UserError, match="has weights of lm_head, a table over the vocabulary, which an adapter can't"
    ) as raised:
        _load(tmp_path / "base", tmp_path / "adapter")
    assert "merge_and_unload" in str(raised.value)
