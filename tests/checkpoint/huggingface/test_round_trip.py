"""Hugging Face → megalite → Hugging Face, in one process: every bit, the configuration, the logits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from megalite.checkpoint.checkpoint import read_checkpoint_config
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface import compare
from megalite.checkpoint.huggingface.export import megalite_to_huggingface
from megalite.checkpoint.huggingface.load import huggingface_to_megalite
from megalite.models.whole import build_whole, outputs
from tests.checkpoint.huggingface import folders
from tests.checkpoint.huggingface.folders import CASES
from tests.checkpoint.logical import found
from tests.helpers import LLAMA
from tests.inference.checkpoints import save_tiny


def there_and_back(source: Path, tmp_path: Path, **options: int) -> Path:
    huggingface_to_megalite(source, tmp_path / "run", build_whole)
    megalite_to_huggingface(found(tmp_path / "run"), tmp_path / "back", **options)
    return tmp_path / "back"


@pytest.mark.parametrize("case", CASES)
def test_bits_and_configuration_survive_and_logits_agree(case: str, tmp_path: Path) -> None:
    source = folders.save(case, tmp_path / "hf")
    back = there_and_back(source, tmp_path)
    ours, theirs = (transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (back, source))
    assert {**ours, "_name_or_path": ""} == {**theirs, "_name_or_path": ""}
    shutil.rmtree(tmp_path / "run" / "huggingface")
    shutil.rmtree(back)
    megalite_to_huggingface(found(tmp_path / "run"), back)  # with a configuration of our own
    folders.assert_equal(folders.tensors(back), folders.tensors(source))
    line = compare.compare_with_transformers(found(tmp_path / "run"), back, build_whole, outputs)
    difference = re.search(r"largest difference ([0-9.e-]+) \(largest logit ([0-9.]+)\)", line)
    assert difference is not None, line
    assert float(difference[1]) < 2e-5
    assert float(difference[2]) > 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_number_formats_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    source = folders.save("llama, grouped, tied", tmp_path / "hf", dtype=dtype)
    back = there_and_back(source, tmp_path)
    folders.assert_equal(folders.tensors(back), folders.tensors(source))
    precision = read_checkpoint_config(found(tmp_path / "run")).precision
    flags = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    assert [name for name in ("bf16", "fp16", "fp64") if getattr(precision, name)] == [flags[dtype]]
    assert transformers.AutoConfig.from_pretrained(back).dtype == dtype


def test_a_parameter_may_have_a_format_of_its_own(tmp_path: Path) -> None:
    source = folders.save("qwen3", tmp_path / "hf", dtype=torch.bfloat16)
    norms = {name: tensor.float() + 1e-6 for name, tensor in folders.tensors(source).items() if "norm" in name}
    folders.change_tensors(source, dict(norms))
    folders.assert_equal(folders.tensors(there_and_back(source, tmp_path)), folders.tensors(source))


@pytest.mark.parametrize("case", ["mixtral", "qwen3 moe", "deepseek v3, experts"])
def test_experts_that_are_one_tensor_in_the_file_are_read(case: str, tmp_path: Path) -> None:
    source, model = folders.save(case, tmp_path / "hf"), folders.model_of(case)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)  # type: ignore[operator]
    assert any(tensor.dim() == 3 for tensor in folders.tensors(tmp_path / "stacked").values())
    folders.assert_equal(folders.tensors(there_and_back(tmp_path / "stacked", tmp_path)), folders.tensors(source))


def test_many_files_are_read_and_written(tmp_path: Path) -> None:
    source = folders.save("gpt2", tmp_path / "hf", shard_size="20KB")
    assert len(list(source.glob("model-*.safetensors"))) > 3
    back = there_and_back(source, tmp_path, shard_bytes=15_000)
    files = sorted(back.glob("*.safetensors"))
    assert len(files) > 3
    folders.assert_equal(folders.tensors(back), folders.tensors(source))
    index = json.loads((back / "model.safetensors.index.json").read_text("utf-8"))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in folders.tensors(source).values())
    for file in files:
        with safe_open(file, framework="pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= 15_000 or len(sizes) == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert torch.equal(model.transformer.wpe.weight, folders.tensors(source)["transformer.wpe.weight"])


def test_layers_of_multi_token_prediction_stay_behind(tmp_path: Path) -> None:
    save_tiny(tmp_path / "run", mtp_num_layers=2, **LLAMA)
    notes = megalite_to_huggingface(found(tmp_path / "run"), tmp_path / "hf")
    assert any("multi-token prediction are left out" in note for note in notes)
    line = compare.compare_with_transformers(found(tmp_path / "run"), tmp_path / "hf", build_whole, outputs)
    assert line.startswith("logits against transformers")


def test_a_file_without_the_head_is_read(tmp_path: Path) -> None:
    source = folders.save("gpt2", tmp_path / "hf")
    whole = folders.tensors(source)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in whole.items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.ones(())}  # of old versions
    folders.change_tensors(source, {**dict.fromkeys(whole), **bare, **masks})
    folders.assert_equal(folders.tensors(there_and_back(source, tmp_path)), whole)


def test_a_repeated_tied_output_is_read_and_not_written(tmp_path: Path) -> None:
    source = folders.save("llama, grouped, tied", tmp_path / "hf")
    whole = folders.tensors(source)
    folders.change_tensors(source, {"lm_head.weight": whole["model.embed_tokens.weight"].clone()})
    folders.assert_equal(folders.tensors(there_and_back(source, tmp_path)), whole)


def test_small_files_travel_both_ways(tmp_path: Path) -> None:
    source = folders.save("llama, grouped, tied", tmp_path / "hf")
    folders.change_config(source, {"bos_token_id": 7, "eos_token_id": [3, 5], "transformers_version": "4.40.0"})
    small = ["tokenizer_config.json", "chat_template.jinja", "generation_config.json", "added_tokens.json"]
    for name in small:
        (source / name).write_text(f"{name} {{}}", encoding="utf-8")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}", encoding="utf-8")
    back = there_and_back(source, tmp_path)
    for name in [*small, "additional_chat_templates/tools.jinja"]:
        assert (back / name).read_bytes() == (source / name).read_bytes(), name
    before, after = (json.loads((folder / "config.json").read_text("utf-8")) for folder in (source, back))
    assert after == before


@pytest.mark.parametrize("files", [(), ("vocab.json", "merges.txt")], ids=["none", "of gpt2"])
def test_tokenizer_flags_name_the_files_that_were_kept(files: tuple[str, ...], tmp_path: Path) -> None:
    source = folders.save("gpt2", tmp_path / "hf")
    for name in files:
        (source / name).write_text("{}", encoding="utf-8")
    huggingface_to_megalite(source, tmp_path / "run", build_whole)
    tokenizer = read_checkpoint_config(found(tmp_path / "run")).tokenizer
    if files:
        assert tokenizer.tokenizer_type == "GPT2BPETokenizer"
        assert tokenizer.vocab_file == str(tmp_path / "run" / "huggingface" / "vocab.json")
    else:
        assert (tokenizer.tokenizer_type, tokenizer.vocab_size) == ("NullTokenizer", 130)


def test_a_model_trained_here_becomes_a_folder_that_transformers_reads(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "run", make_vocab_size_divisible_by=128, openai_gelu=True, vocab_size=131)
    megalite_to_huggingface(found(tmp_path / "run"), tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert theirs.config.vocab_size == 131
    assert theirs.config.eos_token_id == 130
    tokens = torch.arange(0, 120, 3)[None]
    with torch.no_grad():
        assert (theirs(tokens).logits - outputs(model.eval(), tokens)).abs().max() < 2e-4


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("qwen2", None),
        ("gpt2", {"activation_function": "gelu"}),
        ("llama 3 scaling", {"rms_norm_eps": 1e-4}),
        ("llama 3 scaling", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    ],
    ids=str,
)
def test_weights_or_a_network_that_were_read_wrongly_are_found(
    case: str, change: dict[str, Any] | None, tmp_path: Path
) -> None:
    source = folders.save(case, tmp_path / "hf")
    huggingface_to_megalite(source, tmp_path / "run", build_whole)
    name = "model.layers.1.self_attn.k_proj.weight"
    if change is None:
        folders.change_tensors(source, {name: folders.tensors(source)[name].flip(0)})
    else:
        assert set(change) <= set(json.loads((source / "config.json").read_text()))
        folders.change_config(source, change)
    with pytest.raises(CheckpointError, match="the logits differ from those of transformers"):
        compare.compare_with_transformers(found(tmp_path / "run"), source, build_whole, outputs)


def test_without_transformers_the_comparison_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    line = compare.compare_with_transformers(tmp_path, tmp_path, build_whole, outputs)
    assert line == "logits not compared: transformers is not installed"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = folders.save("gpt2", tmp_path / "source")
    huggingface_to_megalite(source, tmp_path / "run", build_whole)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").touch()
    with pytest.raises(CheckpointError, match="already holds checkpoints: choose a new folder"):
        huggingface_to_megalite(source, tmp_path / "run", build_whole)
    with pytest.raises(CheckpointError, match="not an empty folder: choose a new one"):
        megalite_to_huggingface(found(tmp_path / "run"), tmp_path / "hf")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["mine"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folders.save("gpt2", tmp_path / "source")
    huggingface_to_megalite(source, tmp_path / "run", build_whole)
    name = "megalite.checkpoint.huggingface"

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"{name}.files.write_safetensors", full)
    with pytest.raises(CheckpointError, match="No space left"):
        megalite_to_huggingface(found(tmp_path / "run"), tmp_path / "hf")
    monkeypatch.setattr(f"{name}.load.write_shards", full)
    with pytest.raises(OSError, match="No space left"):
        huggingface_to_megalite(source, tmp_path / "second", build_whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "source"]
