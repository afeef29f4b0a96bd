"""From a checkpoint folder, or a Hugging Face folder, to a model and its tokenizer on one device.

Key idea: the folder's own configuration says what the network, the number format and the tokenizer are; flags only
override where things have moved. Weights lie there in global coordinates, so one process reads what any layout wrote.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.checkpoint import load_checkpoint, read_checkpoint_config
from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.checkpoint.huggingface.export import merge_command
from megalite.checkpoint.huggingface.files import TensorFiles
from megalite.checkpoint.huggingface.hub import published_name
from megalite.checkpoint.huggingface.load import load_huggingface
from megalite.checkpoint.huggingface.travel import kept_here, origin, shares_ids, tokenizer_of, use_kept
from megalite.checkpoint.index import stored_tensors
from megalite.checkpoint.storage import CONFIG_FILE, CheckpointDirectory, find_checkpoint, read_json
from megalite.config.errors import FlagError, UserError
from megalite.config.fields import put
from megalite.config.schema import RunConfig, TokenizerConfig
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.distributed.launch import Environment, choose_device, set_threads
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pieces import Piece, whole
from megalite.files.atomic import together
from megalite.files.remote import Place, place
from megalite.inference.generate import virtual_tokens
from megalite.inference.vocabulary import characters_per_id, unknown_ids
from megalite.models.gpt import GPTStage
from megalite.models.whole import build_whole
from megalite.nn.module import named_specs
from megalite.precision.policy import Precision

EMBEDDING_KEY = "model.embedding.word_embeddings.weight"
_UNBOUNDED = 4096  # tokens of a context where neither the network nor its training has a length


@dataclass(frozen=True)
class LoadedModel:
    """`fetched`: has the files that `config` names, where they were in object storage; it ends with the model.
    `notes`: what the user should know of what was loaded. `ends`: ids at which a text ends. `unknown` int64: rows of
    the vocabulary that the tokenizer has no id for, never to be chosen. `name`: of the folder as the user gave it, then
    a plus sign and the adapter's where there is one."""

    model: GPTStage
    tokenizer: Tokenizer
    config: RunConfig
    mesh: Mesh
    notes: list[str]
    ends: frozenset[int]
    unknown: Tensor | None
    name: str
    fetched: object = None

    @property
    def context(self) -> int:
        """Tokens of the longest text that the model was made for."""
        whole = self.config.model.max_position_embeddings or self.config.data.seq_length or _UNBOUNDED
        return whole - virtual_tokens(self.model)

    @cached_property
    def most_characters(self) -> int | None:
        """A longer prompt leaves no room in the context, whatever its text; None where no such length is known."""
        each = characters_per_id(self.tokenizer)
        return None if each is None else each * (self.context - 1)

    @property
    def format(self) -> str:
        """Number format and device."""
        return f"{Precision.from_config(self.config.precision).name} on {self.mesh.device}"

    def pieces(self) -> list[Piece]:
        """Its weights, as checkpoints name them."""
        return [whole(f"model.{name}", parameter, spec) for name, parameter, spec in named_specs(self.model)]

    def with_adapter(self, folder: str, notes: Iterable[str]) -> LoadedModel:
        """What it is once the adapter in `folder` has been put on, which may know more ends of a text."""
        name, ends = f"{self.name}+{name_of(folder)}", self.ends | stored_ends(together(place(folder)))
        return dataclasses.replace(self, name=name, notes=[*self.notes, *notes], ends=ends)


def load_for_generation(root: str, *, step: int | None = None, given: Mapping[str, Any] | None = None) -> LoadedModel:
    """The model of the newest checkpoint in `root`, or of iteration `step`.

    `given`: values by `section.field` that override the checkpoint's configuration; of tokenizer, precision and device
    alone. Raises a FlagError for a bad combination, a UserError for a checkpoint that is missing, damaged or of another
    vocabulary than the tokenizer's.
    """
    found = find_checkpoint(root, step)
    if found is None:
        raise UserError(f"--load {root}: there is no checkpoint in this folder")
    config = read_checkpoint_config(found.path)
    kept, fetched = kept_here(place(root))
    use_kept(config, kept)
    config = override(config, given or {})
    embedding = stored_tensors(found.path).get(EMBEDDING_KEY)
    _check_kind(found, config, whole_model=embedding is not None)
    source = kept if any(kept.glob("*")) else origin(config)
    rows = None if embedding is None else embedding.shape[0]
    loaded = dataclasses.replace(_without_weights(config, rows, str(found.path), root, source), fetched=fetched)
    load_checkpoint(found.path, mesh=loaded.mesh, pieces=loaded.pieces(), strict=True)
    loaded.notes.extend(filter(None, [found.note, f"iteration {found.iteration} of {root}, {loaded.format}"]))
    return loaded


def load_huggingface_for_generation(
    folder: str, *, given: Mapping[str, Any] | None = None, ignored: Collection[str] = ()
) -> LoadedModel:
    """The model of a Hugging Face folder, in the number format that it is stored in. `given` and errors as above.
    `ignored`: see `read_huggingface_config`."""
    found = read_huggingface_config(folder, ignored)
    if found.classes is not None:
        raise UserError(f"--load-hf {folder} is a classifier ({', '.join(found.classes)}) and can't generate text")
    config = RunConfig(model=found.model, tokenizer=tokenizer_of(Path(folder), found.vocab_size))
    config.model.model_vocab_size = found.vocab_size
    with TensorFiles(folder) as files:
        sizes = [(prod(tensor.shape), str(tensor.dtype)) for tensor in files.stored.values()]
    _, largest = max(sizes, default=(0, ""))
    config.precision.bf16 = largest == "torch.bfloat16"
    config.precision.fp16 = largest == "torch.float16"
    config.precision.fp64 = largest == "torch.float64"
    config = override(config, given or {})
    loaded = _without_weights(config, found.vocab_size, folder, folder, Path(folder))
    load_huggingface(folder, mesh=loaded.mesh, pieces=loaded.pieces())
    loaded.notes.extend([*found.notes, f"{folder}, {loaded.format}"])
    return loaded


def _without_weights(config: RunConfig, rows: int | None, where: str, folder: str, source: Place | None) -> LoadedModel:
    """All but the weights. `rows`: of the stored vocabulary, None where it isn't known. `where`: for messages.
    `folder`: as the user gave it. `source`: the Hugging Face folder that the weights descend from."""
    device = choose_device(config.layout.device, Environment())
    set_threads(config.layout.threads_per_rank, 1)
    tokenizer = build_tokenizer(config.tokenizer)
    rows = tokenizer.vocab_size if rows is None else rows
    _check_vocabulary(rows, tokenizer, config, where)
    mesh = single_process_mesh(device)
    model = build_whole(config, rows, mesh).requires_grad_(False)
    own = source is not None and shares_ids(source, config.tokenizer)
    ends = stored_ends(source) if own else set()
    if tokenizer.eod is not None:
        ends.add(tokenizer.eod)
    unknown = torch.tensor(unknown_ids(tokenizer, rows), dtype=torch.int64)
    return LoadedModel(model, tokenizer, config, mesh, [], frozenset(ends), unknown, name_of(folder))


def name_of(folder: str) -> str:
    """The hub's name of a model in its cache. Else the last part of a path as it was given: of a link its own, not its
    target's."""
    name = published_name(folder)
    return name if name != folder else os.path.basename(os.path.abspath(folder)) or "model"


def override(config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """`config` for generation: `given` values on top, no dropout, the attention kernel free.

    A number format or a kind of tokenizer that is given replaces the checkpoint's as a whole.
    """
    formats = [name for name in ("bf16", "fp16", "fp64") if given.get(f"precision.{name}")]
    if len(formats) > 1:
        raise FlagError(" and ".join(f"--{name}" for name in formats) + " exclude each other")
    if formats:
        config.precision.bf16 = config.precision.fp16 = config.precision.fp64 = False
    if "tokenizer.tokenizer_type" in given:
        config.tokenizer = TokenizerConfig()
    elif config.tokenizer.tokenizer_type not in ("NullTokenizer", "TikTokenizer"):
        config.tokenizer.vocab_size = None  # it only repeats what the tokenizer's file says
    config.layout.device, config.layout.threads_per_rank = "auto", None  # of the machine that trained
    for path, value in given.items():
        put(config, path, value)
    config.model.attention_backend = "auto"
    config.model.attention_dropout = config.model.hidden_dropout = 0.0
    config.data.reset_attention_mask = config.finetune.sft_packing = False
    return config


def _check_kind(found: CheckpointDirectory, config: RunConfig, *, whole_model: bool) -> None:
    """A UserError where a checkpoint writes no text."""
    if config.finetune.task == "classification":
        raise UserError(f"the checkpoint {found.path} is a classifier and can't generate text")
    if config.peft.peft == "none" or whole_model:
        return
    base, adapter = config.finetune.load_hf or "MODEL", config.peft.save_adapter
    use = f"use --load-hf {base} --adapter {adapter or 'FOLDER_OF_SAVE_ADAPTER'}"
    if config.peft.peft == "lora" and adapter is None:
        use = f"{merge_command(found, config, 'FOLDER')} adds it to the model; then use --load-hf FOLDER"
    raise UserError(f"the checkpoint {found.path} holds only an adapter, not the model: {use}")


def _check_vocabulary(rows: int, tokenizer: Tokenizer, config: RunConfig, where: str) -> None:
    """A UserError where the weights weren't made for this tokenizer. A table that was given a size of its own may have
    more rows than the tokenizer has ids."""
    spare = config.model.model_vocab_size == rows
    if tokenizer.vocab_size != rows and not (spare and tokenizer.vocab_size < rows):
        given = config.tokenizer
        what = given.tokenizer_model or given.vocab_file or given.tokenizer_type
        raise UserError(
            f"the tokenizer {what} has {tokenizer.vocab_size} ids, but the checkpoint {where} was trained with "
            f"{rows}: give its own tokenizer with --tokenizer-type and --tokenizer-model"
        )


def stored_ends(source: Place | None) -> set[int]:
    """The ids that end a text by a Hugging Face folder's generation settings, else by its `config.json`."""
    for file in ("generation_config.json", CONFIG_FILE):
        if source is None or not (source / file).is_file():
            continue
        value = read_json(source / file).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if ends := {one for one in ids if isinstance(one, int)}:
            return ends
    return set()
