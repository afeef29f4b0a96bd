"""A converted model against `transformers`: the same tokens, the largest difference of their logits.

Key idea: both sides are read back from the disk in fp32, one after the other, so that the comparison covers every byte
that was written and never needs two models in memory.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from megalite.checkpoint.checkpoint import load_checkpoint, read_config
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.convert import BuildModel
from megalite.checkpoint.huggingface.weights import EMBEDDING
from megalite.checkpoint.metadata import describe
from megalite.config.schema import PrecisionConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.pieces import whole
from megalite.nn.module import named_specs

Logits = Callable[[nn.Module, Tensor], Tensor]
"""Logits [b, s, vocabulary] of a model for tokens [b, s]."""

BATCH, LENGTH = 2, 64
LIMIT = 1e-2  # of the largest logit: rounding stays far below, a wrong conversion is far above


def compare_with_transformers(
    checkpoint: str | os.PathLike[str], folder: Path, build: BuildModel, logits: Logits
) -> str:
    """One line that tells the largest difference, or why nothing was compared. A `CheckpointError` where it is too
    large to be rounding."""
    if importlib.util.find_spec("transformers") is None:
        return "logits not compared: transformers is not installed"
    stored = describe(checkpoint)
    needed = 4 * sum(prod(info.shape) for key, info in stored.items() if key.startswith("model."))
    if needed > _memory() / 2:
        return f"logits not compared: each model needs {needed / 1e9:.0f} GB in fp32"
    config = read_config(checkpoint)
    vocab_size = stored[f"model.{EMBEDDING}"].shape[0]
    length = min(LENGTH, config.model.max_position_embeddings or LENGTH)
    tokens = torch.randint(vocab_size, (BATCH, length), generator=torch.Generator().manual_seed(0))
    ours, theirs = _ours(checkpoint, vocab_size, build, logits, tokens), _theirs(folder, tokens)
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    text = f"{difference:.3g} (largest logit {largest:.3g}) over {tokens.numel()} tokens in fp32"
    if not difference <= LIMIT * largest:  # nan too
        raise CheckpointError(f"the logits differ from those of transformers by {text}: don't use this conversion")
    return f"logits against transformers: largest difference {text}"


@torch.no_grad()
def _ours(
    checkpoint: str | os.PathLike[str], vocab_size: int, build: BuildModel, logits: Logits, tokens: Tensor
) -> Tensor:
    config, mesh = read_config(checkpoint), single_process_mesh()
    config.precision = PrecisionConfig()
    model = build(config, vocab_size, mesh)
    pieces = [whole(f"model.{name}", parameter, spec) for name, parameter, spec in named_specs(model)]
    load_checkpoint(checkpoint, mesh=mesh, pieces=pieces)
    return logits(model, tokens)


@torch.no_grad()
def _theirs(folder: Path, tokens: Tensor) -> Tensor:
    import transformers  # here, since only this function needs it

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    result: Tensor = model.eval()(tokens, use_cache=False).logits
    return result


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
