"""Classifiers to and from Hugging Face: every bit, the labels, the place that is read, the scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megalite.checkpoint.checkpoint import read_checkpoint_config
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface import compare
from megalite.checkpoint.huggingface.classes import padding_id, read_classes
from megalite.checkpoint.huggingface.export import megalite_to_huggingface
from megalite.checkpoint.huggingface.load import huggingface_to_megalite
from megalite.checkpoint.inspection import describe_checkpoint, report_lines
from megalite.checkpoint.storage import Retention
from megalite.config.errors import UserError
from megalite.config.schema import RunConfig, TokenizerConfig
from megalite.data.tokenizer_base import Tokenizer
from megalite.data.tokenizers import build_tokenizer
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.pieces import whole
from megalite.inference.load import load_huggingface_for_generation
from megalite.models.whole import build_whole, outputs
from megalite.nn.module import initialize, named_specs
from tests.checkpoint.huggingface import folders
from tests.checkpoint.logical import found
from tests.helpers import LLAMA, save_checkpoint, tiny_config

NAMES = ("bad", "so so", "good")
NULL = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=130)
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2ForSequenceClassification", {"openai_gelu": True}),
    "llama": ("LlamaForSequenceClassification", LLAMA),
    "llama, tied": (
        "LlamaForSequenceClassification",
        {**LLAMA, "untie_embeddings_and_output_weights": False},
    ),
    "qwen2": ("Qwen2ForSequenceClassification", {**LLAMA, "add_qkv_bias": True}),
    "glm": ("GlmForSequenceClassification", {**LLAMA, "rotary_interleaved": True, "rotary_percent": 0.5}),
}


def save_classifier(root: Path, **network: Any) -> torch.nn.Module:
    """A checkpoint as `--task classification` leaves it; the model."""
    config = RunConfig(model=tiny_config(init_method_std=0.4, **network), tokenizer=NULL)
    config.finetune.task, config.finetune.class_names = "classification", list(NAMES)
    mesh = single_process_mesh()
    model = build_whole(config, 131, mesh)
    initialize(model, 3)
    pieces = [whole(f"model.{name}", parameter, spec) for name, parameter, spec in named_specs(model)]
    kwargs: dict[str, Any] = {"config": config, "training_state": {"training": {}}, "retain": Retention()}
    save_checkpoint(root, 10, mesh=mesh, pieces=pieces, **kwargs)
    return model


def padded(lengths: tuple[int, ...], padding: int, *, left: bool = False) -> Tensor:
    """Texts of these lengths, filled up."""
    width = max(lengths)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, 130, (len(lengths), width), generator=generator)
    for row, length in zip(texts, lengths, strict=True):
        row[: width - length if left else 0] = padding
        row[width if left else length :] = padding
    return texts


@pytest.mark.parametrize("kind", NETWORKS)
@torch.no_grad()
def test_a_classifier_trained_here_decides_alike_in_transformers(kind: str, tmp_path: Path) -> None:
    name, network = NETWORKS[kind]
    model = save_classifier(tmp_path / "run", **network)
    assert megalite_to_huggingface(found(tmp_path / "run"), tmp_path / "hf") != []
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    assert type(theirs).__name__ == name
    assert theirs.config.num_labels == 3
    assert theirs.config.id2label == dict(enumerate(NAMES))
    assert theirs.config.label2id == {label: number for number, label in enumerate(NAMES)}
    assert theirs.config.pad_token_id == 130
    lengths = (9, 40, 23)
    texts = padded(lengths, 130)
    scores = theirs(texts, attention_mask=texts != 130).logits
    ours = torch.cat([outputs(model, text[None, :length])[:, -1] for text, length in zip(texts, lengths, strict=True)])
    assert scores.shape == (3, 3)
    assert ours.abs().max() > 0.3
    assert (scores - ours).abs().max() < 2e-5


@pytest.mark.parametrize("case", ["gpt2", "llama, grouped, tied", "glm"])
def test_bits_labels_and_scores_survive_there_and_back(case: str, tmp_path: Path) -> None:
    source = folders.save_classifier(case, tmp_path / "hf", NAMES, pad_token_id=7)
    huggingface_to_megalite(source, tmp_path / "run", build_whole)
    config = read_checkpoint_config(found(tmp_path / "run")).finetune
    assert (config.task, config.class_names) == ("classification", list(NAMES))
    megalite_to_huggingface(found(tmp_path / "run"), tmp_path / "back")
    folders.assert_equal(folders.tensors(tmp_path / "back"), folders.tensors(source))
    ours, theirs = (transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path / "back", source))
    assert {**ours, "_name_or_path": ""} == {**theirs, "_name_or_path": ""}
    line = compare.compare_with_transformers(found(tmp_path / "run"), tmp_path / "back", build_whole, outputs)
    assert float(line.partition("largest difference ")[2].split()[0]) < 2e-5, line


def test_without_padding_a_single_text_is_compared_and_the_user_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_classifier(tmp_path / "run")
    monkeypatch.setattr("megalite.checkpoint.huggingface.export.padding_id", lambda *_: None)
    notes = megalite_to_huggingface(found(tmp_path / "run"), tmp_path / "hf")
    assert "pad_token_id is null" in notes[-1]
    line = compare.compare_with_transformers(found(tmp_path / "run"), tmp_path / "hf", build_whole, outputs)
    assert float(line.partition("largest difference ")[2].split()[0]) < 2e-5, line


class Ids(Tokenizer):
    """Each character is its code; `end` follows every text."""

    vocab_size = 128

    def __init__(self, pad: int | None, eod: int | None, end: int | None = None):
        self.pad, self.eod, self.end = pad, eod, end

    def tokenize_batch(self, texts: Any) -> list[list[int]]:
        return [[*map(ord, text), *([] if self.end is None else [self.end])] for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("tokenizer", "stored", "padding"),
    [
        (Ids(pad=1, eod=2), 3, 1),
        (Ids(pad=None, eod=2), 3, 3),
        (Ids(pad=None, eod=2), None, 2),
        (Ids(pad=None, eod=2), -1, 2),  # some folders say so
        (Ids(pad=200, eod=2), 128, 2),  # ids that the table has no row for
        (Ids(pad=None, eod=None), None, None),
        (Ids(pad=None, eod=2, end=2), None, None),  # transformers would read the token before the end
        (Ids(pad=1, eod=2, end=2), None, 1),
        (None, 3, 3),
        (None, None, None),
        (build_tokenizer(NULL), None, 130),
    ],
)
def test_padding_is_an_id_that_ends_no_text(tokenizer: Tokenizer | None, stored: Any, padding: int | None) -> None:
    assert padding_id(tokenizer, stored, 131 if tokenizer is None or tokenizer.vocab_size > 128 else 128) == padding


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, ("no", "yes")),
        ({"id2label": {"1": "yes", "0": "no"}}, ("no", "yes")),
        ({}, ("LABEL_0", "LABEL_1")),
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
    ],
)
def test_labels_are_read_as_transformers_does(fields: dict[str, Any], names: tuple[str, ...]) -> None:
    values = {"architectures": ["LlamaForSequenceClassification"], **fields}
    assert read_classes(values, "") == names
    assert transformers.LlamaConfig(**fields).id2label == dict(enumerate(names))
    assert read_classes({**values, "architectures": ["LlamaForCausalLM"]}, "") is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_labels": 1}, "problem_type None with 1 labels is not supported"),
        ({"problem_type": "regression"}, "problem_type 'regression' with 2 labels is not supported"),
        ({"problem_type": "multi_label_classification"}, "classification with two or more labels"),
        ({"id2label": {"0": "no", "2": "yes"}}, "must give each class from 0 on a different name"),
        ({"id2label": {"0": "no", "1": "no"}}, "must give each class"),
    ],
)
def test_what_is_no_decision_for_one_class_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match="config.json: ") as raised:
        read_classes({"architectures": ["LlamaForSequenceClassification"], **fields}, "config.json")
    assert message in str(raised.value)


def test_a_classifier_writes_no_text(tmp_path: Path) -> None:
    source = folders.save_classifier("llama, grouped, tied", tmp_path, NAMES)
    with pytest.raises(UserError, match=r"is a classifier \(bad, so so, good\) and can't generate text"):
        load_huggingface_for_generation(str(source))


def test_its_classes_are_told_and_no_output_it_has_not(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    text = "\n".join(report_lines(describe_checkpoint(found(tmp_path))))
    assert "task: classification; classes: bad, so so, good" in text
    assert "tied output" not in text
    assert "classifier.weight" in text
