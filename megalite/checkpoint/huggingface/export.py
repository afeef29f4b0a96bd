"""From a checkpoint of any layout to a Hugging Face folder, in one process.

Key idea: the files are planned from the checkpoint's index, which knows every shape and format; then one logical
parameter after the other is read and taken apart. Memory holds one parameter and one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.checkpoint import read_config
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.architecture import HEAD, Architecture
from megalite.checkpoint.huggingface.classes import (
    classifier_json,
    padding_id,
    padding_notes,
    with_number_format,
)
from megalite.checkpoint.huggingface.config import describe_network
from megalite.checkpoint.huggingface.files import SINGLE_FILE, Entry, new_folder, write_index, write_safetensors
from megalite.checkpoint.huggingface.parts import Part
from megalite.checkpoint.huggingface.travel import (
    GENERATION_FILE,
    find_tokenizer,
    kept_files,
    to_json,
    token_ids,
    use_kept,
    values_of,
    write_small_files,
)
from megalite.checkpoint.huggingface.weights import EMBEDDING
from megalite.checkpoint.metadata import Index, TensorInfo, check_files, read_index
from megalite.checkpoint.storage import CONFIG_FILE, CheckpointDirectory
from megalite.checkpoint.streaming import read_logical
from megalite.config.schema import RunConfig
from megalite.config.schema_finetune import unnamed_classes

SHARD_BYTES = 4 * 10**9
_PREFIX = "model."


@dataclass(frozen=True)
class _Planned:
    """A tensor of the folder: a part of the logical parameter `parent`."""

    parent: str
    part: Part
    nbytes: int


def megalite_to_huggingface(source: CheckpointDirectory, target: Path, *, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write the Hugging Face folder `target`, which must not exist or be empty; notes for the user.

    Weights keep the checkpoint's number format, bit for bit; vocabulary padding isn't in it. `shard_bytes`: largest
    file, where no tensor is larger. `config.json`, tokenizer, template and ends of a text are those that the run kept
    beside its checkpoints. A classifier becomes one of
    transformers' `ForSequenceClassification`. Raises a `CheckpointError`, and nothing of the attempt stays.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"--hf {target} exists and is not an empty folder: choose a new one")
    index = read_index(source)
    check_files(source, index.files)
    tensors = {key.removeprefix(_PREFIX): info for key, info in index.tensors().items() if key.startswith(_PREFIX)}
    config = read_config(source)
    if EMBEDDING not in tensors and config.peft.peft != "none":
        remedy = "to use it, load the folder of --save-adapter in PEFT, together with the model"
        if config.peft.peft == "lora":
            base = config.finetune.load_hf or "MODEL"
            adapter = config.peft.save_adapter or "FOLDER_OF_SAVE_ADAPTER"
            remedy = (
                f"python tools/merge_adapter.py --load-hf {base} --adapter {adapter} --hf {target} adds it to the model"
            )
        raise CheckpointError(f"{source.path} holds only an adapter, not the model; {remedy}")
    if EMBEDDING not in tensors:
        raise CheckpointError(f"{source.path} holds no {_PREFIX}{EMBEDDING}: it is not a checkpoint of a GPT")
    beside = kept_files(source.path.parent, config)
    use_kept(config, source.path.parent)
    architecture, values = _config_json(config, tensors, beside)
    beside.pop(CONFIG_FILE, None)
    plan = list(_plan(architecture, tensors))
    with new_folder(target) as temporary:
        _write_tensors(source.path, index, _files(plan, shard_bytes), temporary)
        write_small_files(temporary, {CONFIG_FILE: to_json(values), **beside})
    return [_told(config, sorted(beside)), *(padding_notes(values["pad_token_id"]) if HEAD in tensors else [])]


def _config_json(
    config: RunConfig, tensors: dict[str, TensorInfo], beside: Mapping[str, bytes]
) -> tuple[Architecture, dict[str, Any]]:
    table = tensors[EMBEDDING]
    source = values_of(beside, CONFIG_FILE)
    architecture, values = describe_network(config.model, table.shape[0], source)
    values |= token_ids(source)
    if HEAD in tensors:
        names = config.finetune.class_names or unnamed_classes(tensors[HEAD].shape[0])
        padding = padding_id(find_tokenizer(config.tokenizer), values.get("pad_token_id"), table.shape[0])
        values = classifier_json(values, architecture, names, padding)
    return architecture, with_number_format(values, str(table.dtype).removeprefix("torch."))


def _plan(architecture: Architecture, tensors: dict[str, TensorInfo]) -> Iterator[_Planned]:
    """Every tensor of the folder, those of one parameter behind each other."""
    for name, info in tensors.items():
        for part in architecture.parts(name, info.shape):
            count = torch.Size(part.shape).numel()
            yield _Planned(name, part, count * info.dtype.itemsize)


def _files(plan: list[_Planned], limit: int) -> dict[str, list[_Planned]]:
    """The tensors of each file, none above `limit` bytes but for a single larger tensor."""
    groups: list[list[_Planned]] = [[]]
    size = 0
    for one in plan:
        if groups[-1] and size + one.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += one.nbytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, start=1)}


class _Parents:
    """Logical parameters of a checkpoint, the last one kept: its parts follow each other."""

    def __init__(self, checkpoint: Path, index: Index):
        self.checkpoint, self.index = checkpoint, index
        self._name, self._value = "", torch.empty(0)

    def part(self, one: _Planned) -> Tensor:
        if one.parent != self._name:
            self._value = torch.empty(0)  # let go before the next is read
            self._name, self._value = one.parent, read_logical(self.checkpoint, self.index, f"{_PREFIX}{one.parent}")
        return one.part.extract(self._value)


def _write_tensors(checkpoint: Path, index: Index, files: dict[str, list[_Planned]], target: Path) -> None:
    parents, dtypes = _Parents(checkpoint, index), index.tensors()
    for file, group in files.items():
        entries = [
            Entry(one.part.name, one.part.shape, dtypes[f"{_PREFIX}{one.parent}"].dtype, partial(parents.part, one))
            for one in group
        ]
        with open(target / file, "xb") as stream:
            write_safetensors(stream, entries, {"format": "pt"})
    if len(files) > 1:
        total = sum(one.nbytes for group in files.values() for one in group)
        places = {one.part.name: file for file, group in files.items() for one in group}
        write_index(target, places, total)


def _told(config: RunConfig, names: list[str]) -> str:
    if any(name != GENERATION_FILE for name in names):
        return f"beside the weights: {', '.join([CONFIG_FILE, *names])}"
    kind = config.tokenizer.tokenizer_type
    return f"no tokenizer beside the weights: {kind} has no files of Hugging Face's, or they were not found"
