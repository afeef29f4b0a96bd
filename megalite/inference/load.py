"""From a checkpoint folder to a model and its tokenizer on one device.

Key idea: the checkpoint's own configuration says what the network, the number format and the tokenizer are; flags only
override where things have moved. Weights lie there in global coordinates, so one process reads what any layout wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.checkpoint import load_checkpoint, read_config
from megalite.checkpoint.metadata import describe
from megalite.checkpoint.storage import find_checkpoint
from megalite.config.errors import FlagError, UserError
from megalite.config.fields import put
from megalite.config.schema import RunConfig, TokenizerConfig
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.distributed.launch import Environment, choose_device, set_threads
from megalite.distributed.mesh import Mesh, single_process_mesh
from megalite.distributed.pieces import whole
from megalite.models.gpt import GPTStage
from megalite.models.stages import whole_model
from megalite.nn.attention_backend import choose_backend
from megalite.nn.module import Build, named_specs
from megalite.precision.policy import Precision

EMBEDDING_KEY = "model.embedding.word_embeddings.weight"


@dataclass(frozen=True)
class LoadedModel:
    """`notes`: what the user should know of the checkpoint that was chosen."""

    model: GPTStage
    tokenizer: Tokenizer
    config: RunConfig
    notes: list[str]


def load_for_generation(root: str, *, step: int | None = None, given: Mapping[str, Any] | None = None) -> LoadedModel:
    """The model of the newest checkpoint in `root`, or of iteration `step`.

    `given`: values by `section.field` that override the checkpoint's configuration; of tokenizer, precision and device
    alone. Raises a FlagError for a bad combination, a UserError for a checkpoint that is missing, damaged or of another
    vocabulary than the tokenizer's.
    """
    found = find_checkpoint(Path(root), step)
    if found is None:
        raise UserError(f"--load {root}: there is no checkpoint in this folder")
    config = override(read_config(found.path), given or {})
    device = choose_device(config.layout.device, Environment())
    set_threads(config.layout.threads_per_rank, 1)
    tokenizer = build_tokenizer(config.tokenizer)
    _check_vocabulary(found.path, tokenizer, config.tokenizer)
    mesh = single_process_mesh(device)
    model = _build(config, tokenizer.vocab_size, mesh)
    pieces = [whole(f"model.{name}", parameter, spec) for name, parameter, spec in named_specs(model)]
    load_checkpoint(found.path, mesh=mesh, pieces=pieces, strict=True)
    notes = [found.note] if found.note else []
    notes.append(f"iteration {found.iteration} of {root}, {Precision.from_config(config.precision).name} on {device}")
    return LoadedModel(model, tokenizer, config, notes)


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
    config.data.reset_attention_mask = False
    return config


def _check_vocabulary(path: Path, tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    embedding = describe(path).get(EMBEDDING_KEY)
    if embedding is not None and embedding.shape[0] != tokenizer.vocab_size:
        what = config.tokenizer_model or config.vocab_file or config.tokenizer_type
        raise UserError(
            f"the tokenizer {what} has {tokenizer.vocab_size} ids, but the checkpoint {path} was trained with "
            f"{embedding.shape[0]}: name its own tokenizer with --tokenizer-type and --tokenizer-model"
        )


def _build(config: RunConfig, vocab_size: int, mesh: Mesh) -> GPTStage:
    """The whole model, its weights still undefined."""
    assert config.model.num_layers is not None
    build = Build(config.model, mesh, Precision.from_config(config.precision))
    backend = choose_backend(config, mesh.device.type)
    model = GPTStage(build, vocab_size, whole_model(config.model.num_layers), backend)
    return model.eval().requires_grad_(False)
