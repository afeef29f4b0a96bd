"""`tools/merge_adapter.py` from its flags to what it writes and prints."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megalite.checkpoint.huggingface.convert import huggingface_to_megalite
from megalite.config.errors import FlagError, UserError
from megalite.config.schema import RunConfig
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.models.gpt import GPTStage
from megalite.models.stages import whole_model
from megalite.nn.attention_backend import choose_backend
from megalite.nn.module import Build
from tests.models.hf_models import gpt2, llama_like
from tests.peft.interop import FP32, make_and_save, our_logits

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "merge_adapter.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("merge_tool", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(131, (2, 12), generator=torch.Generator().manual_seed(1))


def build_model(config: RunConfig, vocab_size: int, mesh: Mesh) -> GPTStage:
    assert config.model.num_layers is not None
    span = whole_model(config.model.num_layers)
    return GPTStage(Build(config.model, mesh, FP32), vocab_size, span, choose_backend(config, "cpu"))


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Glm"])
def test_the_merged_model_gives_the_logits_of_model_and_adapter(
    tool: ModuleType, tmp_path: Path, tokens: torch.Tensor, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    model = gpt2() if kind == "GPT2" else llama_like(kind, num_key_value_heads=2, head_dim=8)
    model.save_pretrained(base, max_shard_size="20KB")  # several files
    targets: dict[str, Any] = {
        "peft": "lora",
        "lora_target_modules": ["all-linear"],
        "use_rslora": True,
        "lora_rank": 2,
    }
    targets["lora_alpha"] = 1  # about as large as the weights
    make_and_save(single_process_mesh(), str(base), targets, str(adapter))
    assert tool.main(["--load-hf", str(base), "--adapter", str(adapter), "--hf", str(merged)]) == 0
    found = re.search(r"rounding error: largest ([0-9.e-]+), root mean square ([0-9.e-]+)", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) == 0.0  # the weights are fp32
    ours = our_logits(base, adapter, tokens)
    assert (ours - our_logits(base, None, tokens)).abs().max() > 0.05
    assert (ours - our_logits(merged, None, tokens)).abs().max() <= 1e-5


def test_a_checkpoint_of_megalite_merges_as_its_hugging_face_folder_does(tool: ModuleType, tmp_path: Path) -> None:
    base, adapter, run = tmp_path / "base", tmp_path / "adapter", tmp_path / "run"
    llama_like("Llama").save_pretrained(base)
    make_and_save(single_process_mesh(), str(base), {"peft": "lora"}, str(adapter))
    huggingface_to_megalite(base, run, build_model)
    one, other = tmp_path / "one", tmp_path / "other"
    assert tool.main(["--load-hf", str(base), "--adapter", str(adapter), "--hf", str(one)]) == 0
    assert tool.main(["--load", str(run), "--adapter", str(adapter), "--hf", str(other)]) == 0
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "one", "other", "run"]


def test_half_precision_is_cast_once_from_fp32_and_the_error_told(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    llama_like("Llama").bfloat16().save_pretrained(base)
    targets = {"peft": "lora", "lora_target_modules": ["down_proj"]}
    make_and_save(single_process_mesh(), str(base), targets, str(adapter))
    assert tool.main(["--load-hf", str(base), "--adapter", str(adapter), "--hf", str(merged)]) == 0
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    low_rank = load_file(adapter / "adapter_model.safetensors")
    largest = 0.0
    errors, changes = [], []
    for name, weight in after.items():
        expected = before[name]
        if "down_proj" in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            product = low_rank[f"{module}.lora_B.weight"] @ low_rank[f"{module}.lora_A.weight"] * (32 / 16)
            exact = before[name].float() + product
            expected = exact.bfloat16()
            largest = max(largest, (expected.float() - exact).abs().max().item())
            errors.append((expected.float() - exact).flatten())
            changes.append(product.flatten())
        assert torch.equal(weight, expected), name
    told = capsys.readouterr().out
    assert f"2 weights changed; rounding error: largest {largest:.3g}" in told
    found = re.search(r"root mean square ([0-9.e-]+) of the change's", told)
    assert found is not None
    share = torch.cat(errors).norm() / torch.cat(changes).norm()  # as many of both
    assert 0 < share.item() < 0.1
    assert float(found[1]) == pytest.approx(share.item(), rel=6e-3)  # three digits


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(tool: ModuleType, tmp_path: Path) -> None:
    base, other, adapter, merged = (tmp_path / name for name in ("base", "other", "adapter", "merged"))
    llama_like("Llama").save_pretrained(base)
    llama_like("Llama", intermediate_size=64).save_pretrained(other)
    arguments = ["--adapter", str(adapter), "--hf", str(merged)]
    with pytest.raises(FlagError, match="either --load-hf or --load"):
        tool.main(arguments)
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        tool.main(["--load-hf", str(base), *arguments])
    make_and_save(single_process_mesh(), str(base), {"peft": "prompt", "num_virtual_tokens": 3}, str(adapter))
    with pytest.raises(UserError, match="is a prompt"):
        tool.main(["--load-hf", str(base), *arguments])
    targets = {"peft": "lora", "lora_target_modules": ["up_proj"]}
    make_and_save(single_process_mesh(), str(base), targets, str(adapter))
    with pytest.raises(UserError, match="adapter of another model"):
        tool.main(["--load-hf", str(other), *arguments])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(UserError, match="use_dora"):
        tool.main(["--load-hf", str(base), *arguments])
    assert not merged.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "other"]
