"""`tools/merge_adapter.py` from its flags to what it writes and prints."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.huggingface.load import huggingface_to_megalite
from megalite.config.errors import FlagError, UserError
from megalite.distributed.mesh import single_process_mesh
from megalite.models.whole import build_whole
from tests.checkpoint.huggingface import folders
from tests.helpers import load_tool
from tests.models.hf_models import gpt2, llama_like
from tests.peft.interop import loud, make_and_save, our_logits, our_scores

CLASSES, PAD = ["bad", "so so", "good"], 130
SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "merge_adapter.py"


LORA: dict[str, Any] = {"peft": "lora"}


class Job:
    """A base model, an adapter of it, and what the tool makes of the two."""

    main = staticmethod(load_tool(SCRIPT).main)

    def __init__(self, folder: Path):
        self.base, self.adapter, self.merged = (folder / name for name in ("base", "adapter", "merged"))

    def adapt(self, values: dict[str, Any], classes: list[str] | None = None) -> None:
        make_and_save(single_process_mesh(), str(self.base), values, str(self.adapter), classes)

    def merge(self, flag: str = "--load-hf", model: Path | None = None, to: Path | None = None) -> None:
        given = (flag, model or self.base, "--adapter", self.adapter, "--hf", to or self.merged)
        assert self.main([str(word) for word in given]) == 0


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(131, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Glm"])
def test_the_merged_model_gives_the_logits_of_model_and_adapter(
    job: Job, tokens: torch.Tensor, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = gpt2() if kind == "GPT2" else llama_like(kind, num_key_value_heads=2, head_dim=8)
    model.save_pretrained(job.base, max_shard_size="20KB")  # several files
    # With this factor it is about as large as the weights.
    job.adapt({**LORA, "lora_target_modules": ["all-linear"], "use_rslora": True, "lora_rank": 2, "lora_alpha": 1})
    job.merge()
    found = re.search(r"rounding error: largest ([0-9.e-]+), root mean square ([0-9.e-]+)", capsys.readouterr().out)
    assert float(found[1]) == 0.0  # the weights are fp32
    ours = our_logits(job.base, job.adapter, tokens)
    assert (ours - our_logits(job.base, None, tokens)).abs().max() > 0.05
    assert (ours - our_logits(job.merged, None, tokens)).abs().max() <= 1e-5


@pytest.mark.parametrize("classes", [None, CLASSES])
def test_a_checkpoint_of_megalite_merges_as_its_hugging_face_folder_does(
    job: Job, tmp_path: Path, classes: list[str] | None
) -> None:
    run = tmp_path / "run"
    llama_like("Llama").save_pretrained(job.base)
    job.adapt(LORA, classes)
    huggingface_to_megalite(job.base, run, build_whole)
    one, other = tmp_path / "one", tmp_path / "other"
    job.merge(to=one)
    job.merge("--load", run, to=other)
    for name in ("model.safetensors", "config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "one", "other", "run"]


def test_half_precision_is_cast_once_from_fp32_and_the_error_told(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    llama_like("Llama").bfloat16().save_pretrained(job.base)
    job.adapt({**LORA, "lora_target_modules": ["down_proj"]})
    job.merge()
    before, after = load_file(job.base / "model.safetensors"), load_file(job.merged / "model.safetensors")
    low_rank = load_file(job.adapter / "adapter_model.safetensors")
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
    job: Job, tokens: torch.Tensor, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification as Classifier

    if case.endswith("already"):
        folders.save_classifier("llama, grouped, tied", job.base, ["x", "y", "z"], pad_token_id=PAD)
    else:
        model: Any = gpt2() if case == "GPT2" else llama_like(case[:5].strip(","), num_key_value_heads=2, head_dim=8)
        model.config.pad_token_id = PAD
        if case.endswith("tied"):
            model = llama_like("Llama", tie_word_embeddings=True, pad_token_id=PAD)
        (model.model if case.endswith("bare") else model).save_pretrained(job.base, max_shard_size="20KB")
    job.adapt({**LORA, "lora_target_modules": ["all-linear"], "lora_rank": 2, "lora_alpha": 1}, CLASSES)
    job.merge()
    assert capsys.readouterr().out.splitlines()[1:] == ["a classifier: bad, so so, good"]

    lengths, places = (9, 12), torch.tensor([8, 11])
    tokens = tokens.clamp(max=PAD - 1)
    theirs, info = Classifier.from_pretrained(job.merged, output_loading_info=True)
    assert not any(info.values())
    assert type(theirs).__name__ == transformers.AutoConfig.from_pretrained(job.merged).architectures[0]
    assert theirs.config.id2label == dict(enumerate(CLASSES))
    assert not any("lm_head" in name for name in folders.tensors(job.merged))
    scores = transformers_scores(theirs, tokens, lengths)
    assert scores.shape == (2, 3) and scores.abs().max() > 0.3
    fresh = Classifier.from_pretrained(job.base, num_labels=3)
    assert (transformers_scores(fresh, tokens, lengths) - scores).abs().max() > 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of a field or a weight that has no place
        warnings.simplefilter("ignore", FutureWarning)
        unmerged = PeftModel.from_pretrained(fresh, str(job.adapter))
    assert (transformers_scores(unmerged, tokens, lengths) - scores).abs().max() <= 1e-5
    for folder, beside in ((job.base, job.adapter), (job.merged, None)):
        ours = [
            our_scores(folder, beside, text[None, : at + 1], CLASSES) for text, at in zip(tokens, places, strict=True)
        ]
        assert (torch.cat(ours) - scores).abs().max() <= 1e-5


def test_a_head_is_stored_in_the_models_format(job: Job) -> None:
    folders.save("llama, grouped, tied", job.base, dtype=torch.bfloat16)
    job.adapt(LORA, CLASSES)
    job.merge()
    assert {tensor.dtype for tensor in folders.tensors(job.merged).values()} == {torch.bfloat16}
    head = folders.tensors(job.adapter)["base_model.model.score.weight"]
    assert torch.equal(folders.tensors(job.merged)["score.weight"], head.bfloat16())


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
    job: Job, base_names: list[str] | None, written: bool, expected: list[str]
) -> None:
    if base_names is None:
        folders.save("llama, grouped, tied", job.base)
    else:
        folders.save_classifier("llama, grouped, tied", job.base, base_names)
    job.adapt(LORA, CLASSES)
    if not written:
        (job.adapter / "class_names.json").unlink()
    job.merge()
    assert json.loads((job.merged / "config.json").read_text())["id2label"] == {
        str(number): name for number, name in enumerate(expected)
    }


def test_a_classifiers_adapter_of_pefts_own_merges_too(
    job: Job, tokens: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification as Classifier

    gpt2().save_pretrained(job.base)
    model: Any = Classifier.from_pretrained(job.base, num_labels=3)
    told = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(model, told)
    loud(model)
    model.save_pretrained(job.adapter)
    job.merge()
    assert "pad_token_id is null" in capsys.readouterr().out
    scores = transformers_scores(Classifier.from_pretrained(job.merged), tokens[:1], (12,))
    assert (transformers_scores(model, tokens[:1], (12,)) - scores).abs().max() <= 1e-5


def test_padding_is_of_the_models_own_tokenizer(job: Job) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    llama_like("Llama").save_pretrained(job.base)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "well": 2, "done": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>").save_pretrained(job.base)
    job.adapt(LORA, CLASSES)
    job.merge()
    assert json.loads((job.merged / "config.json").read_text())["pad_token_id"] == 1
    classify = pipeline("text-classification", model=str(job.merged))
    found = classify(["well done", "well"], batch_size=2)
    ids = [torch.tensor([row]) for row in ([2, 3], [2])]
    for one, text in zip(found, ids, strict=True):
        scores = our_scores(job.merged, None, text, CLASSES)[0]
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
def test_damaged_names_are_refused(job: Job, content: Any, message: str) -> None:
    llama_like("Llama").save_pretrained(job.base)
    job.adapt(LORA, CLASSES)
    (job.adapter / "class_names.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as raised:
        job.merge()
    assert "class_names.json" in str(raised.value)
    assert not job.merged.exists()


def test_an_adapter_without_classes_leaves_no_names_of_an_older_one(job: Job) -> None:
    llama_like("Llama").save_pretrained(job.base)
    job.adapt(LORA, CLASSES)
    assert (job.adapter / "class_names.json").exists()
    job.adapt(LORA)
    assert not (job.adapter / "class_names.json").exists()


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(job: Job, tmp_path: Path) -> None:
    """Adapters that are damaged or another model's: `tests/peft/test_files.py`."""
    llama_like("Llama").save_pretrained(job.base)
    with pytest.raises(FlagError, match="either --load-hf or --load"):
        job.main(["--adapter", str(job.adapter), "--hf", str(job.merged)])
    job.adapt({"peft": "prompt", "num_virtual_tokens": 3})
    with pytest.raises(UserError, match="is a prompt"):
        job.merge()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
