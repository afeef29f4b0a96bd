"""The model that `--load-hf` names, and the adapter of `--load-adapter`: what their folders say of the run, and the
model's weights at any layout.

Key idea: the folder describes network and tokenizer, so the command line needn't; what it says beside the folder must
agree with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.architecture import HEAD
from megalite.checkpoint.huggingface.config import read_huggingface_config
from megalite.checkpoint.huggingface.files import TensorFiles
from megalite.checkpoint.huggingface.hub import local_folder
from megalite.checkpoint.huggingface.load import load_huggingface
from megalite.checkpoint.huggingface.travel import tokenizer_of
from megalite.checkpoint.huggingface.weights import OUTPUT
from megalite.checkpoint.planner import parameter_name
from megalite.checkpoint.upcycling import is_of_router, of_dense
from megalite.config.errors import FlagError, UserError
from megalite.config.schema import ModelConfig, TokenizerConfig
from megalite.config.schema_finetune import FinetuneConfig
from megalite.distributed.mesh import Mesh
from megalite.distributed.pieces import Piece
from megalite.peft.files import adapter_settings


def read_base_model(finetune: FinetuneConfig) -> tuple[ModelConfig, TokenizerConfig, tuple[str, ...] | None, list[str]]:
    """Network and tokenizer of the Hugging Face folder of `--load-hf`, a classifier's classes, and notes for the user.
    In place of a hub's name, `finetune` gets the folder. A FlagError where they can't be read or aren't supported."""
    assert finetune.load_hf is not None
    try:
        folder = local_folder(finetune.load_hf, finetune.hub)
        found = read_huggingface_config(folder, finetune.ignore_config_field or ())
    except UserError as error:
        raise FlagError(f"--load-hf {finetune.load_hf}: {error}") from None
    finetune.load_hf = folder
    found.model.model_vocab_size = found.vocab_size
    return found.model, tokenizer_of(Path(folder), found.vocab_size), found.classes, found.notes


def check_base_weights(folder: str) -> list[str]:
    """What is wrong with the folder's files of weights, as far as their headers tell."""
    try:
        with TensorFiles(folder):
            return []
    except CheckpointError as error:
        return [f"--load-hf: {error}"]


def base_names(folder: str, names: Iterable[str], *, upcycled: bool = False) -> set[str]:
    """Which of a model's parameters take their values from the folder: all but a head that it hasn't. `upcycled`: and
    but routers."""
    has_head = read_huggingface_config(folder, None).classes is not None
    return {name for name in names if (name != HEAD or has_head) and not (upcycled and is_of_router(name))}


def read_adapter_flags(folder: str) -> dict[str, Any]:
    """The fields of `PeftConfig` that an adapter's folder decides. A FlagError where it can't be read or isn't
    supported."""
    try:
        return adapter_settings(folder)
    except UserError as error:
        raise FlagError(f"--load-adapter: {error}") from None


def load_base_model(
    folder: str,
    *,
    mesh: Mesh,
    pieces: Iterable[Piece],
    names: Collection[str],
    classes: Sequence[str] | None,
    upcycled: bool = False,
) -> None:
    """Fill those of `pieces` whose parameters are among `names` from the folder. Collective over the world.

    `classes`: of a classifier, which has no output over the vocabulary, so the folder's isn't missed. A UserError where
    the folder decides between another number of them. `upcycled`: experts are copies of the folder's dense MLP.
    """
    theirs = read_huggingface_config(folder, None).classes
    if classes is not None and theirs is not None and len(classes) != len(theirs):
        raise CheckpointError(
            f"--load-hf {folder} has {len(theirs)} classes ({', '.join(theirs)}), but --sft-data has "
            f"{len(classes)}: {', '.join(classes)}"
        )
    wanted = [piece for piece in pieces if parameter_name(piece.name) in names]
    wanted = [*of_dense(wanted)] if upcycled else wanted
    load_huggingface(folder, mesh=mesh, pieces=wanted, left_out=() if classes is None else (OUTPUT,))
