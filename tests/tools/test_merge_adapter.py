"""`tools/merge_adapter.py` from its flags to what it writes and prints."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megalite.checkpoint.huggingface.load import huggingface_to_megalite
from megalite.config.errors import FlagError, UserError
from megalite.config.schema import RunConfig
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.models.gpt import GPTStage
from megalite.models.stages import whole_model
from megalite.nn.attention_backend import choose_backend
from megalite.nn.module import Build
from tests.checkpoint.huggingface import folders
from tests.helpers import load_tool
from tests.models.hf_models import gpt2, llama_like
from tests.peft.interop import FP32, loud, make_and_save, our_logits, our_scores

CLASSES, PAD = ["bad", "so so", "good"], 130
SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "merge_adapter.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool(SCRIPT)


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


@pytest.mark.parametrize("classes", [None, CLASSES])
def test_a_checkpoint_of_megalite_merges_as_its_hugging_face_folder_does(
    tool: ModuleType, tmp_path: Path, classes: list[str] | None
) -> None:
    base, adapter, run = tmp_path / "base", tmp_path / "adapter", tmp_path / "run"
    llama_like("Llama").save_pretrained(base)
    make_and_save(single_process_mesh(), str(base), {"peft": "lora"}, str(adapter), classes)
    huggingface_to_megalite(base, run, build_model)
    one, other = tmp_path / "one", tmp_path / "other"
    assert tool.main(["--load-hf", str(base), "--adapter", str(adapter), "--hf", str(one)]) == 0
    assert tool.main(["--load", str(run), "--adapter", str(adapter), "--hf", str(other)]) == 0
    for name in ("model.safetensors", "config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
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
    found = re.search(r"root mean square ([0-9.e-]+) x that of the change", told)
    assert found is not None
    share = torch.cat(errors).norm() / torch.cat(changes).norm()  # as many of both
    assert 0 < share.item() < 0.1
    assert float(found[1]) == pytest.approx(share.item(), rel=6e-3)  # three digits


def transformers_scores(model: Any, tokens: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Of texts cut to `lengths`, in one padded batch."""
    there = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        scores: torch.Tensor = model.eval()(torch.where(there, tokens, PAD), attention_mask=there.long()).logits
    return scores


@pytest.mark.parametrize("case", ["Llama", "Llama, tied", "GPT2", "Glm", "Llama, bare", "Llama, a classifier already"])
def test_a_merged_classifier_decides_in_transformers_as_unmerged_in_peft(
    tool: ModuleType, tmp_path: Path, tokens: torch.Tensor, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification as Classifier

    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    if case.endswith("already"):
        folders.save_classifier("llama, grouped, tied", base, ["x", "y", "z"], pad_token_id=PAD)
    else:
        model: Any = gpt2() if case == "GPT2" else llama_like(case[:5].strip(","), num_key_value_heads=2, head_dim=8)
        model.config.pad_token_id = PAD
        if case.endswith("tied"):
            model = llama_like("Llama", tie_word_embeddings=True, pad_token_id=PAD)
        (model.model if case.endswith("bare") else model).save_pretrained(base, max_shard_size="20KB")
    targets = {"peft": "lora", "lora_target_modules": ["all-linear"], "lora_rank": 2, "lora_alpha": 1}
    make_and_save(single_process_mesh(), str(base), targets, str(adapter), CLASSES)
    assert tool.main(["--load-hf", str(base), "--adapter", str(adapter), "--hf", str(merged)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["a classifier: bad, so so, good"]

    lengths, places = (9, 12), torch.tensor([8, 11])
    tokens = tokens.clamp(max=PAD - 1)
    theirs, info = Classifier.from_pretrained(merged, output_loading_info=True)
    assert not any(info.values())
    assert type(theirs).__name__ == transformers.AutoConfig.from_pretrained(merged).architectures[0]
    assert theirs.config.id2label == dict(enumerate(CLASSES))
    assert not any("lm_head" in name for name in folders.tensors(merged))
    scores = transformers_scores(theirs, tokens, lengths)
    assert scores.shape == (2, 3) and scores.abs().max() > 0.3
    fresh = Classifier.from_pretrained(base, num_labels=3)
    assert (transformers_scores(fresh, tokens, lengths) - scores).abs().max() > 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of a field or a weight that has no place
        warnings.simplefilter("ignore", FutureWarning)
        unmerged = PeftModel.from_pretrained(fresh, str(adapter))
    assert (transformers_scores(unmerged, tokens, lengths) - scores).abs().max() <= 1e-5
    for folder, beside in ((base, adapter), (merged, None)):
        ours = [
            our_scores(folder, beside, text[None, : at + 1], CLASSES) for text, at in zip(tokens, places, strict=True)
        ]
        assert (torch.cat(ours) - scores).abs().max() <= 1e-5


def test_a_head_is_stored_in_the_models_format(tool: ModuleType, tmp_path: Path) -> None:
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    folders.save("llama, grouped, tied", base, dtype=torch.bfloat16)
    make_and_save(single_process_mesh(), str(base), {"peft": "lora"}, str(adapter), CLASSES)
    assert tool.main(["--load-hf", str(base), "--adapter", str(adapter), "--hf", str(merged)]) == 0
    assert {tensor.dtype for tensor in folders.tensors(merged).values()} == {torch.bfloat16}
    head = folders.tensors(adapter)["base_model.model.score.weight"]
    assert torch.equal(folders.tensors(merged)["score.weight"], head.bfloat16())


@pytest.mark.parametrize(
    ("base_names", "written", "expected"),
    [
        (None, True, CLASSES),
        (None, False, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        (["x", "y", "z"], True, CLASSES),
        (["x", "y", "z"], False, ["x", "y", "z"]),
    ],
)
def test_names_are_the_adapters_else_the_models_else_numbers(
    tool: ModuleType, tmp_path: Path, base_names: list[str] | None, written: bool, expected: list[str]
) -> None:
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    if base_names is None:
        folders.save("llama, grouped, tied", base)
    else:
        folders.save_classifier("llama, grouped, tied", base, base_names)
    make_and_save(single_process_mesh(), str(base), {"peft": "lora"}, str(adapter), CLASSES)
    if not written:
        (adapter / "class_names.json").unlink()
    assert tool.main(["--load-hf", str(base), "--adapter", str(adapter), "--hf", str(merged)]) == 0
    assert json.loads((merged / "config.json").read_text())["id2label"] == {
        str(number): name for number, name in enumerate(expected)
    }


def test_a_classifiers_adapter_of_pefts_own_merges_too(
    tool: ModuleType, tmp_path: Path, tokens: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification as Classifier

    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    gpt2().save_pretrained(base)
    model: Any = Classifier.from_pretrained(base, num_labels=3)
    told = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(model, told)
    loud(model)
    model.save_pretrained(adapter)
    assert tool.main(["--load-hf", str(base), "--adapter", str(adapter), "--hf", str(merged)]) == 0
    assert "pad_token_id is null" in capsys.readouterr().out
    scores = transformers_scores(Classifier.from_pretrained(merged), tokens[:1], (12,))
    assert (transformers_scores(model, tokens[:1], (12,)) - scores).abs().max() <= 1e-5


def test_padding_is_of_the_models_own_tokenizer(tool: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    llama_like("Llama").save_pretrained(base)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "well": 2, "done": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>").save_pretrained(base)
    make_and_save(single_process_mesh(), str(base), {"peft": "lora"}, str(adapter), CLASSES)
    assert tool.main(["--load-hf", str(base), "--adapter", str(adapter), "--hf", str(merged)]) == 0
    assert json.loads((merged / "config.json").read_text())["pad_token_id"] == 1
    classify = pipeline("text-classification", model=str(merged))
    found = classify(["well done", "well"], batch_size=2)
    ids = [torch.tensor([row]) for row in ([2, 3], [2])]
    for one, text in zip(found, ids, strict=True):
        scores = our_scores(merged, None, text, CLASSES)[0]
        assert one["label"] == CLASSES[int(scores.argmax())]
        assert one["score"] == pytest.approx(scores.softmax(0).max().item(), abs=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, r"names 2 classes \(a, b\), but the head has 3"),
        ({"id2label": {"0": "a", "1": "a", "2": "b"}}, "must give each class"),
        ({"id2label": ["a", "b", "c"]}, "must be a JSON object of class numbers and names"),
        ([], "must hold a JSON object"),
    ],
)
def test_damaged_names_are_refused(tool: ModuleType, tmp_path: Path, content: Any, message: str) -> None:
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    llama_like("Llama").save_pretrained(base)
    make_and_save(single_process_mesh(), str(base), {"peft": "lora"}, str(adapter), CLASSES)
    (adapter / "class_names.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as raised:
        tool.main(["--load-hf", str(base), "--adapter", str(adapter), "--hf", str(merged)])
    assert "class_names.json" in str(raised.value)
    assert not merged.exists()


def test_a_head_of_another_number_of_classes_than_the_models_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    base, other, adapter, merged = (tmp_path / name for name in ("base", "other", "adapter", "merged"))
    folders.save("llama, grouped, tied", base)
    folders.save_classifier("llama, grouped, tied", other, ["x", "y"])
    make_and_save(single_process_mesh(), str(base), {"peft": "lora"}, str(adapter), CLASSES)
    with pytest.raises(UserError, match="its head is of shape"):
        tool.main(["--load-hf", str(other), "--adapter", str(adapter), "--hf", str(merged)])


def test_an_adapter_without_classes_leaves_no_names_of_an_older_one(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    llama_like("Llama").save_pretrained(base)
    make_and_save(single_process_mesh(), str(base), {"peft": "lora"}, str(adapter), CLASSES)
    assert (adapter / "class_names.json").exists()
    make_and_save(single_process_mesh(), str(base), {"peft": "lora"}, str(adapter))
    assert not (adapter / "class_names.json").exists()


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
    with pytest.raises(UserError, match="adapter for another model"):
        tool.main(["--load-hf", str(other), *arguments])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(UserError, match="use_dora"):
        tool.main(["--load-hf", str(base), *arguments])
    assert not merged.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "other"]
