"""LoRA added into the weights of a Hugging Face folder.

Key idea: sum and product are taken in fp32 and cast once to the weight's own format; so the only error is that one
rounding, and it is measured. Memory holds one weight at a time. A classifier's head takes the place of the output over
the vocabulary, in the files and in `config.json`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.classes import classifier_json, padding_id, padding_notes, with_number_format
from megalite.checkpoint.huggingface.config import HuggingFaceModel, read_huggingface_config
from megalite.checkpoint.huggingface.files import TensorFiles, check_absent, new_model_folder, write_weights
from megalite.checkpoint.huggingface.travel import (
    GENERATION_FILE,
    find_tokenizer,
    laid_over,
    read_small_files,
    to_json,
    token_ids,
    tokenizer_of,
    write_small_files,
)
from megalite.checkpoint.huggingface.weights import FLOATING, OUTPUT
from megalite.checkpoint.storage import CONFIG_FILE, read_json
from megalite.checkpoint.tensor_file import Entry
from megalite.config.schema_finetune import unnamed_classes
from megalite.files.remote import Place
from megalite.peft.convert import from_peft
from megalite.peft.files import CLASSES_FILE, PREFIX, SCORE, Adapter, read_adapter, read_class_names
from megalite.peft.modules import hf_linears

_HEAD = SCORE.removeprefix(PREFIX)


class _Change(NamedTuple):
    """What is added to a stored weight: factor · B A, transposed where the weight is [in, out]."""

    a: Tensor
    b: Tensor
    factor: float
    transposed: bool


@dataclass
class Rounding:
    """Errors of the cast. `largest`: of any weight. `share`: root mean square of the errors over that of the change."""

    layers: int = 0
    largest: float = 0.0
    _errors: float = 0.0
    _change: float = 0.0

    @property
    def share(self) -> float:
        return math.sqrt(self._errors / self._change) if self._change else 0.0

    def add(self, change: Tensor, error: Tensor) -> None:
        """One weight's."""
        self.layers += 1
        self.largest = max(self.largest, error.abs().max().item())
        self._errors += error.double().square().sum().item()
        self._change += change.double().square().sum().item()

    def __str__(self) -> str:
        return (
            f"{self.layers} weights changed; rounding error: largest {self.largest:.3g}, root mean square "
            f"{self.share:.3g} x that of the change"
        )


class _Merge:
    """A folder `source` with an adapter `added`; `files` are the folder's.

    Raises a `CheckpointError` where the adapter isn't LoRA or is of another model.
    """

    def __init__(self, source: Path, added: Adapter, files: TensorFiles, ignored: Collection[str] | None):
        self.source, self.added, self.files = source, added, files
        if added.kind != "lora":
            raise CheckpointError(
                f"{added.where} is a {added.kind}, and only LoRA can be merged into weights. Use it together "
                f"with the model: python tools/generate.py --load-hf {source} --adapter {added.where} --chat"
            )
        self.found: HuggingFaceModel = read_huggingface_config(source, ignored)
        self.rounding = Rounding()
        prefix = self.found.architecture.prefix
        self.bare = not any(name.startswith(prefix) for name in files.stored)  # a model without output or head
        self.head = added.tensors.get(SCORE)
        classes = len(self.found.classes or ()) if self.head is not None else None
        from_peft(added, self.found.model, self.found.vocab_size, classes)  # refuses one of another model
        self.names = () if self.head is None else _class_names(added, self.head, self.found.classes)
        self.changes = self._changes()
        self.dtype = self._format(next(iter(self.changes)))  # of a head too, as transformers has it

    def _changes(self) -> dict[str, _Change]:
        """By the name of the stored weight."""
        architecture, stored = self.found.architecture, self.files.stored
        transposed = any(layer.transposed for layer in hf_linears(architecture, self.found.model))
        changes = {}
        for module, (a, b) in self.added.pairs().items():
            name = f"{module.removeprefix(architecture.prefix) if self.bare else module}.weight"
            there = stored.get(name)
            shape = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
            if there is None or there.dtype not in FLOATING or there.shape != shape:
                raise CheckpointError(f"{self.source} has no floating-point weight {name} of shape {list(shape)}")
            changes[name] = _Change(a, b, self.added.factor(module, a.shape[0]), transposed)
        return changes

    def write(self, target: Path) -> list[str]:
        """Into an empty folder; lines for the user."""
        write_weights(target, {file: [*map(self._entry, names)] for file, names in self._names_by_file().items()})
        write_small_files(target, laid_over(read_small_files(self.source), read_small_files(self.added.where)))
        return [str(self.rounding), *self.found.notes, *self._write_config(target)]

    def _names_by_file(self) -> dict[str, list[str]]:
        """The stored tensors that go on, and the head in the place of the output."""
        (output,) = self.found.architecture.parts(OUTPUT, ())
        replaced = () if self.head is None else (output.name, _HEAD)
        result: dict[str, list[str]] = {}
        place = None
        for name, file in self.files.file_of.items():
            names = result.setdefault(file, [])
            if name in replaced:
                place = place or file
            else:
                names.append(name)
        if self.head is not None:
            result[place or next(reversed(result))].append(_HEAD)
        return result

    def _entry(self, name: str) -> Entry:
        """What becomes of a stored tensor, or the head. Beside a head, names have their prefix."""
        if self.head is not None and name == _HEAD:
            return Entry(name, tuple(self.head.shape), self.dtype, partial(self.head.to, self.dtype))
        prefix = self.found.architecture.prefix if self.head is not None and self.bare else ""
        return Entry(f"{prefix}{name}", self.files.stored[name].shape, self._format(name), partial(self._value, name))

    def _format(self, name: str) -> torch.dtype:
        dtype = self.files.stored[name].dtype
        if dtype is None:
            raise CheckpointError(f"{self.source}: the number format of {name} is not supported")
        return dtype

    def _value(self, name: str) -> Tensor:
        tensor = self.files.read(name, tuple(slice(0, size) for size in self.files.stored[name].shape))
        return _merged(tensor, self.changes[name], self.rounding) if name in self.changes else tensor

    def _write_config(self, target: Path) -> list[str]:
        """`config.json`, with the ends of a text that the adapter's folder names; lines for the user."""
        found, values = self.found, read_json(self.source / CONFIG_FILE)
        values = with_number_format(values, str(self.dtype).removeprefix("torch."))
        beside = self.added.where / GENERATION_FILE
        values |= token_ids(read_json(beside) if beside.is_file() else {})
        notes = []
        if self.head is not None:
            given = tokenizer_of(target, found.vocab_size)
            # Without its files the tokenizer that was used is unknown, and may end texts with any id: none is guessed.
            tokenizer = None if given.tokenizer_type == "NullTokenizer" else find_tokenizer(given)
            padding = padding_id(tokenizer, values.get("pad_token_id"), found.vocab_size)
            values = classifier_json(values, found.architecture, self.names, padding)
            notes = [f"a classifier: {', '.join(self.names)}", *padding_notes(padding)]
        (target / CONFIG_FILE).write_bytes(to_json(values))
        return notes


def merge_adapter(source: Path, adapter: Place, target: Path, ignored: Collection[str] | None = ()) -> list[str]:
    """Write the Hugging Face folder `target`, which must not exist or be empty: `source` with the LoRA adapter added;
    lines for the user, the first with the error of rounding.

    With the adapter of a classifier it becomes one of transformers' `ForSequenceClassification`. Tokenizer, template
    and ends of a text that lie beside the adapter replace the folder's; all else is copied as it is. `ignored`: see
    `read_huggingface_config`. Raises a `CheckpointError`, and nothing of the attempt stays, where a folder is damaged,
    the adapter isn't LoRA or is of another model.
    """
    check_absent(target)
    with TensorFiles(source) as files:
        merge = _Merge(source, read_adapter(adapter), files, ignored)
        with new_model_folder(target) as temporary:
            return merge.write(temporary)


def _class_names(added: Adapter, head: Tensor, base: tuple[str, ...] | None) -> tuple[str, ...]:
    """Those beside the adapter, else those of the `base` model, else numbers."""
    count, names = head.shape[0], read_class_names(added.where)
    if names is not None and len(names) != count:
        raise CheckpointError(
            f"{added.where / CLASSES_FILE} names {len(names)} classes ({', '.join(names)}), but the head has {count}"
        )
    if count < 2:
        raise CheckpointError(f"{added.where}: its head has {count} class, but a classifier needs two or more")
    return names or base or tuple(unnamed_classes(count))


def _merged(weight: Tensor, change: _Change, rounding: Rounding) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    added = (change.b.to(wide) @ change.a.to(wide)) * change.factor
    return rounded_sum(weight, added.t() if change.transposed else added, rounding)


def rounded_sum(weight: Tensor, added: Tensor, rounding: Rounding) -> Tensor:
    """`weight` + `added` in at least fp32, rounded once to the weight's format."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    exact = weight.to(wide) + added.to(wide)
    result = exact.to(weight.dtype)
    rounding.add(added, result.to(wide) - exact)
    return result
