"""A classifier of transformers in `config.json`: its class, its labels, its padding.

Key idea: transformers' `ForSequenceClassification` on a decoder is the network with one more weight in place of its
output, `score` [classes, hidden] without a bias, read at the last token that isn't padding. So a classifier is the same
network with other fields beside it, and which id is padding belongs to what it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.architecture import CLASSIFIER, Architecture
from megalite.config.errors import UserError
from megalite.config.schema_finetune import unnamed_classes
from megalite.data.tokenizer_base import Tokenizer

_DEFAULT_COUNT = 2  # of classes, where config.json says nothing
_COUNTS = ("num_labels", "_num_labels")


def read_classes(values: Mapping[str, Any], where: str) -> tuple[str, ...] | None:
    """The names of the classes in the order of the head's rows; None where `values` is of no such classifier.

    A `CheckpointError` where it doesn't decide for one of several classes, or its labels aren't numbered from 0.
    """
    if not any(str(name).endswith(CLASSIFIER) for name in values.get("architectures") or ()):
        return None
    labels, kind = values.get("id2label"), values.get("problem_type")
    count = next((values[name] for name in _COUNTS if isinstance(values.get(name), int)), _DEFAULT_COUNT)
    if labels is None:
        labels = dict(enumerate(unnamed_classes(count)))
    if not isinstance(labels, Mapping):
        raise CheckpointError(f"{where}: id2label {labels!r} must be a JSON object of class numbers and names")
    if kind not in (None, "single_label_classification") or len(labels) < 2:
        raise CheckpointError(
            f"{where}: problem_type {kind!r} with {len(labels)} labels is not supported; only single-label "
            "classification with two or more labels is"
        )
    by_number = {str(number): name for number, name in labels.items()}
    names = tuple(str(by_number.get(str(number))) for number in range(len(by_number)))
    if by_number.keys() != {str(number) for number in range(len(names))} or len(set(names)) < len(names):
        raise CheckpointError(f"{where}: id2label {labels} must give each class from 0 on a different name")
    return names


def classifier_json(
    values: Mapping[str, Any], architecture: Architecture, names: Sequence[str], padding: int | None
) -> dict[str, Any]:
    """`values` of the network, as `config.json` of a classifier of the classes `names`."""
    kept = {name: value for name, value in values.items() if name not in (*_COUNTS, "problem_type")}
    return kept | {"architectures": [architecture.classifier_name], **labels_json(names), "pad_token_id": padding}


def with_number_format(values: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """`config.json` with the weights' number format under the one name that it has there, or the newer of two."""
    name = "torch_dtype" if "torch_dtype" in values and "dtype" not in values else "dtype"
    return {key: value for key, value in values.items() if key not in ("dtype", "torch_dtype")} | {name: dtype}


def labels_json(names: Sequence[str]) -> dict[str, Any]:
    """The fields that name classes."""
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def padding_notes(padding: int | None) -> list[str]:
    """What the user of a classifier must know of its padding."""
    if padding is not None:
        return []
    return ["pad_token_id is null, as no id is known that never ends a text: give transformers one text at a time"]


def padding_id(tokenizer: Tokenizer | None, stored: Any, rows: int) -> int | None:
    """The id to pad texts with, of `rows`: the tokenizer's own, else the `stored` one of the model's folder, else the
    end of a document. None where there is none, or texts end with it: transformers would read the token before it.
    """
    candidates = [None if tokenizer is None else tokenizer.pad, stored, None if tokenizer is None else tokenizer.eod]
    found = next((one for one in candidates if isinstance(one, int) and 0 <= one < rows), None)
    return None if found is not None and found == _last_id(tokenizer) else found


def _last_id(tokenizer: Tokenizer | None) -> int | None:
    """What every text ends with, if it is more than the text itself."""
    if tokenizer is None:
        return None
    try:
        ends = {tokenizer.tokenize(text)[-1] for text in ("1", "2")}
    except (UserError, IndexError):
        return None
    return ends.pop() if len(ends) == 1 else None
