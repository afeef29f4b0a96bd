"""A converted model against `transformers`: the same tokens, the largest difference of their logits, or of a
classifier's scores.

Key idea: both sides are read back from the disk in fp32, one after the other, so that the comparison covers every byte
that was written and never needs two models in memory.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from megalite.checkpoint.checkpoint import load_checkpoint, read_checkpoint_config
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.architecture import HEAD
from megalite.checkpoint.huggingface.load import BuildModel
from megalite.checkpoint.huggingface.weights import EMBEDDING
from megalite.checkpoint.index import stored_tensors
from megalite.checkpoint.storage import CONFIG_FILE, read_json
from megalite.config.schema import ModelConfig, PrecisionConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.pieces import whole
from megalite.estimate.memory import machine_memory
from megalite.nn.module import named_specs
from megalite.nn.rotary import scales_by_length

Logits = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Logits [b, s, vocabulary] of a model for tokens [b, s] at positions [s], or a classifier's scores [b, s, classes]."""

BATCH, LENGTH = 2, 64
LIMIT = 1e-4  # of the largest logit: many times the rounding, and a fraction of the least mistake


def compare_with_transformers(
    checkpoint: str | os.PathLike[str], folder: Path, build: BuildModel, logits: Logits
) -> str:
    """One line that tells the largest difference, or why nothing was compared. A `CheckpointError` where it is too
    large to be rounding."""
    if importlib.util.find_spec("transformers") is None:
        return "logits not compared: transformers is not installed"
    stored = stored_tensors(checkpoint)
    needed = 4 * sum(prod(info.shape) for key, info in stored.items() if key.startswith("model."))
    if needed > machine_memory() / 2:
        return f"logits not compared: each model needs {needed / 1e9:.0f} GB in fp32"
    config = read_checkpoint_config(checkpoint)
    vocab_size = stored[f"model.{EMBEDDING}"].shape[0]
    positions = _positions(config.model)
    size = (BATCH, len(positions[0]))
    tokens = torch.randint(vocab_size, size, generator=torch.Generator().manual_seed(0))
    if f"model.{HEAD}" in stored:
        padding = read_json(folder / CONFIG_FILE).get("pad_token_id")
        tokens, last = _end_early(tokens, padding, vocab_size)
        ours = _ours(checkpoint, vocab_size, build, logits, tokens, positions[:1])[torch.arange(len(tokens)), last]
        theirs = _theirs(folder, tokens, positions[:1], "AutoModelForSequenceClassification")
    else:
        ours = _ours(checkpoint, vocab_size, build, logits, tokens, positions)
        theirs = _theirs(folder, tokens, positions, "AutoModelForCausalLM")
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    text = f"{difference:.3g} (largest logit {largest:.3g}) over {tokens.numel() * len(positions)} tokens in fp32"
    if not difference <= LIMIT * largest:  # nan too
        raise CheckpointError(f"the logits differ from those of transformers by {text}: don't use this conversion")
    return f"logits against transformers: largest difference {text}"


def _positions(model: ModelConfig) -> list[Tensor]:
    """Positions [s] of the tokens that are compared, for each time that they are."""
    furthest = model.max_position_embeddings or LENGTH
    length = min(LENGTH, furthest)
    if not scales_by_length(model):
        return [torch.linspace(0, furthest - 1, length).long()]  # far apart, where a lost rotary scaling shows
    if model.position_embedding_type == "dynamic":
        furthest = 2 * model.rope_original_max_position_embeddings
    return [torch.arange(length), torch.arange(furthest - length, furthest)]  # in a short text and in a long one


def _end_early(tokens: Tensor, padding: int | None, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Texts of different lengths, and the last token of each; without an id for padding a single text."""
    if padding is None:
        return tokens[:1], torch.tensor([tokens.shape[1] - 1])
    tokens = torch.where(tokens == padding, (padding + 1) % vocab_size, tokens)
    last = tokens.shape[1] - 1 - torch.arange(len(tokens)) * (tokens.shape[1] // 3)
    return torch.where(torch.arange(tokens.shape[1]) > last[:, None], padding, tokens), last


@torch.no_grad()
def _ours(
    checkpoint: str | os.PathLike[str],
    vocab_size: int,
    build: BuildModel,
    logits: Logits,
    tokens: Tensor,
    positions: Sequence[Tensor],
) -> Tensor:
    config, mesh = read_checkpoint_config(checkpoint), single_process_mesh()
    config.precision = PrecisionConfig()
    model = build(config, vocab_size, mesh)
    pieces = [whole(f"model.{name}", parameter, spec) for name, parameter, spec in named_specs(model)]
    load_checkpoint(checkpoint, mesh=mesh, pieces=pieces)
    return torch.cat([logits(model, tokens, at) for at in positions])


@torch.no_grad()
def _theirs(folder: Path, tokens: Tensor, positions: Sequence[Tensor], kind: str) -> Tensor:
    import transformers  # here, since only this function needs it

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    loader = getattr(transformers, kind)
    model = loader.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    mask = torch.ones_like(tokens)  # said, or positions apart would be taken for texts apart
    places = [at.expand_as(tokens) for at in positions]
    return torch.cat([model(tokens, attention_mask=mask, position_ids=at, use_cache=False).logits for at in places])
