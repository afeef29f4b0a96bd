"""Tiny checkpoints as training leaves them, for tests of generation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.storage import Retention
from megalite.config.schema import PrecisionConfig, RunConfig, TokenizerConfig
from megalite.data.tokenizers import Tokenizer
from megalite.distributed.mesh import single_process_mesh
from megalite.inference.generate import stream
from megalite.inference.load import LoadedModel
from megalite.inference.options import GenerationOptions
from megalite.inference.vocabulary import unknown_ids
from megalite.models.gpt import GPTStage
from megalite.nn.module import named_specs
from megalite.precision.policy import Precision
from tests.data.chat_files import chat_tokenizer
from tests.helpers import pieces_of, save_checkpoint, tiny_model
from tests.models import hf_models

NULL = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=130)  # 131 ids with its EOD, 130


def save_tiny(
    root: Path,
    *,
    iteration: int = 10,
    precision: PrecisionConfig | None = None,
    tokenizer: TokenizerConfig = NULL,
    vocab_size: int = 131,
    **network: Any,
) -> GPTStage:
    """A checkpoint of an untrained model in `root`, with optimizer state beside the weights; the model."""
    config = RunConfig(precision=precision or PrecisionConfig(), tokenizer=tokenizer)
    mesh, policy = single_process_mesh(), Precision.from_config(config.precision)
    values: dict[str, Any] = {"init_method_std": 0.4, **network}
    model = tiny_model(mesh, policy, vocab_size=vocab_size, seed=iteration, **values)
    config.model = model.config
    config.model.attention_dropout = config.model.hidden_dropout = 0.1
    weights = [(name, parameter.detach(), spec) for name, parameter, spec in named_specs(model)]
    tensors = [(f"model.{name}", tensor, spec) for name, tensor, spec in weights]
    tensors += [(f"optimizer.exp_avg.{name}", tensor.to(policy.wide), spec) for name, tensor, spec in weights]
    state: dict[str, Any] = {"training": {"iteration": iteration}}
    kwargs: dict[str, Any] = {"config": config, "training_state": state, "retain": Retention()}
    save_checkpoint(root, iteration, mesh=mesh, pieces=pieces_of(tensors), **kwargs)
    return model


HF_ROWS = 448  # of the embedding table; the tokenizer has fewer ids


def save_hf(folder: Path, *, template: bool = True) -> Path:
    """A Hugging Face folder of a random Llama with a byte-level tokenizer of 404 ids and, perhaps, a chat template."""
    network: dict[str, Any] = {"vocab_size": HF_ROWS, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = hf_models.llama_like("Llama", max_position_embeddings=256, eos_token_id=None, **network)
    model.save_pretrained(folder)  # type: ignore[operator]
    chat_tokenizer(folder, **({} if template else {"chat_template": None}))
    return folder


def loaded_of(model: GPTStage, tokenizer: Tokenizer) -> LoadedModel:
    """What loading gives, of a model in memory."""
    ends = frozenset(() if tokenizer.eod is None else (tokenizer.eod,))
    unknown = torch.tensor(unknown_ids(tokenizer, model.vocab_size), dtype=torch.int64)
    config, mesh = RunConfig(model=model.config), single_process_mesh()
    return LoadedModel(model, tokenizer, config, mesh, [], ends, unknown, "tiny")


def generate(
    model: GPTStage, prompts: Sequence[Sequence[int]], options: GenerationOptions, **how: Any
) -> list[list[int]]:
    """The new ids of each prompt, fewer than `max_new_tokens` where the model chose one of `stop`. `how`: see
    `stream`."""
    results: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, options, **how):
        for result, token in zip(results, step, strict=True):
            if token is not None:
                result.append(token)
    return results
