"""From a checkpoint of any layout to a Hugging Face folder, in one process.

Key idea: the files are planned from the checkpoint's index, which knows every shape and format; then one logical
parameter after the other is read and taken apart. Memory holds two of them at most, never the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.checkpoint import read_checkpoint_config
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.architecture import HEAD, Architecture
from megalite.checkpoint.huggingface.classes import (
    classifier_json,
    padding_id,
    padding_notes,
    with_number_format,
)
from megalite.checkpoint.huggingface.config import describe_network
from megalite.checkpoint.huggingface.files import SINGLE_FILE, check_absent, new_model_folder, write_weights
from megalite.checkpoint.huggingface.parts import Part
from megalite.checkpoint.huggingface.travel import (
    GENERATION_FILE,
    find_tokenizer,
    kept_files,
    kept_here,
    to_json,
    token_ids,
    use_kept,
    values_of,
    write_small_files,
)
from megalite.checkpoint.huggingface.weights import EMBEDDING, MULTI_TOKEN
from megalite.checkpoint.index import check_files, read_index
from megalite.checkpoint.rewrite import read_logical
from megalite.checkpoint.storage import CONFIG_FILE, CheckpointDirectory
from megalite.checkpoint.stored import Index, TensorInfo
from megalite.checkpoint.tensor_file import Entry
from megalite.config.schema import RunConfig
from megalite.config.schema_finetune import unnamed_classes
from megalite.files.remote import Place

SHARD_BYTES = 4 * 10**9
_PREFIX = "model."


def megalite_to_huggingface(source: CheckpointDirectory, target: Path, *, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write the Hugging Face folder `target`, which must not exist or be empty; notes for the user.

    Weights keep the checkpoint's number format, bit for bit; vocabulary padding isn't in it. `shard_bytes`: largest
    file, where no tensor is larger. `config.json`, tokenizer, template and ends of a text are those that the run kept
    beside its checkpoints. A classifier becomes one of transformers' `ForSequenceClassification`. Raises a
    `CheckpointError`, and nothing of the attempt stays.
    """
    check_absent(target)
    index = read_index(source)
    check_files(source, index.files)
    tensors = {key.removeprefix(_PREFIX): info for key, info in index.tensors.items() if key.startswith(_PREFIX)}
    left_out = [name for name in tensors if name.startswith(MULTI_TOKEN)]
    tensors = {name: info for name, info in tensors.items() if name not in left_out}
    config = read_checkpoint_config(source)
    if EMBEDDING not in tensors:
        raise CheckpointError(f"{source.path} {_what_it_is(source, config, target)}")
    beside = kept_files(source.path.parent, config)
    folder, _fetched = kept_here(source.path.parent)
    use_kept(config, folder)
    architecture, values = _config_json(config, tensors, beside)
    beside.pop(CONFIG_FILE, None)
    entries = _entries(source.path, index, architecture, tensors)
    with new_model_folder(target) as temporary:
        write_weights(temporary, _by_file(entries, shard_bytes))
        write_small_files(temporary, {CONFIG_FILE: to_json(values), **beside})
    notes = ["the layers of multi-token prediction are left out: generation doesn't use them"] if left_out else []
    padding = padding_notes(values["pad_token_id"]) if HEAD in tensors else []
    return [_note(config, sorted(beside)), *notes, *padding]


def _what_it_is(source: CheckpointDirectory, config: RunConfig, target: Path) -> str:
    """Of a checkpoint without a model, for a message."""
    if config.peft.peft == "none":
        return f"holds no {_PREFIX}{EMBEDDING}: it is not a checkpoint of a GPT"
    remedy = "to use it, load the folder of --save-adapter in PEFT, together with the model"
    if config.peft.peft == "lora":
        remedy = f"{merge_command(source, config, target)} adds it to the model"
    return f"holds only an adapter, not the model; {remedy}"


def merge_command(source: CheckpointDirectory, config: RunConfig, target: Path | str) -> str:
    """Makes a folder of a LoRA and its model, from the adapter's own folder, or where the run wrote none from the
    checkpoint."""
    base, adapter = config.finetune.load_hf or "MODEL", config.peft.save_adapter
    what = f"--load {source.path.parent}" if adapter is None else f"--adapter {adapter}"
    return f"python tools/merge_adapter.py --load-hf {base} {what} --hf {target}"


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


def _entries(
    checkpoint: Place, index: Index, architecture: Architecture, tensors: dict[str, TensorInfo]
) -> Iterator[Entry]:
    """Every tensor of the folder, those of one parameter behind each other, so that it's read once."""
    read = lru_cache(maxsize=1)(partial(read_logical, checkpoint, index))
    for name, (shape, dtype) in tensors.items():
        for part in architecture.parts(name, shape):

            def extract(part: Part = part, key: str = f"{_PREFIX}{name}") -> Tensor:
                return part.extract(read(key))

            yield Entry(part.name, part.shape, dtype, extract)


def _by_file(entries: Iterable[Entry], limit: int) -> dict[str, list[Entry]]:
    """The tensors of each file, none above `limit` bytes but for a single larger tensor."""
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, start=1)}


def _note(config: RunConfig, names: list[str]) -> str:
    if any(name != GENERATION_FILE for name in names):
        return f"beside the weights: {', '.join([CONFIG_FILE, *names])}"
    kind = config.tokenizer.tokenizer_type
    return f"no tokenizer beside the weights: {kind} has no files of Hugging Face's, or they were not found"
