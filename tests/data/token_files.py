"""Token files of random documents, run configurations over them, and the same sets as megatron-core builds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.schema import RunConfig
from megalite.data.indexed_dataset import IndexedDatasetBuilder

EOD = 130
VOCABULARY = 131
SEQ_LENGTH = 64


def random_documents(
    count: int, *, low: int = 5, high: int = 300, seed: int = 0, empty: bool = False
) -> list[np.ndarray]:
    """Documents of `low` to `high` ids that end with EOD; with `empty`, every seventh has no token at all."""
    random = np.random.default_rng(seed)
    documents = []
    for place in range(count):
        ids = random.integers(0, EOD, random.integers(low, high))
        documents.append(ids[:0] if empty and place % 7 == 0 else np.append(ids, EOD))
    return documents


def write_tokens(prefix: Path | str, documents: Sequence[Any], dtype: Any = np.uint16) -> str:
    with IndexedDatasetBuilder(str(prefix), dtype) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


def run_config(*data_path: str, seq_length: int = SEQ_LENGTH, seed: int = 1234, **data: Any) -> RunConfig:
    """A run over `data_path`; `data` are fields of DataConfig."""
    config = RunConfig()
    config.data.data_path = list(data_path) or None
    config.data.seq_length = seq_length
    config.training.seed = seed
    for name, value in data.items():
        assert hasattr(config.data, name)
        setattr(config.data, name, value)
    return config


class _Tokenizer:
    """As much of a tokenizer as megatron-core's datasets ask for."""

    vocab_size = VOCABULARY
    eod = EOD
    unique_identifiers: dict[str, str] = {}


def megatron_sets(sizes: tuple[int, int, int], *, seq_length: int = SEQ_LENGTH, seed: int = 1234, **config: Any) -> Any:
    """[train, valid, test] of megatron-core; `config` are fields of its GPTDatasetConfig."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    flags = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    settings = GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, tokenizer=_Tokenizer(), **{**flags, **config}
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, settings).build()
