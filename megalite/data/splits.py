"""From the data flags to three sources: which blend, which share of its documents and how many samples each split has.

The key idea: everything that the flags say about train, valid and test is decided here, before a token is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from megalite.config.errors import UserError
from megalite.config.resolve import DEFAULT_SPLIT, parse_split
from megalite.config.schema import DataConfig, RunConfig
from megalite.data.blend import Blend, parse_blend
from megalite.data.cache import file_digest
from megalite.data.indexed_dataset import idx_path

SPLITS = ("train", "valid", "test")
NOTHING_TO_TRAIN_ON = (
    "there is nothing to train on: give --data-path (with a share for train in --split), --train-data-path or "
    "--mock-data"
)


@dataclass(frozen=True)
class SplitSource:
    """Where one split comes from. share: begin and end of its part of each corpus's sequences, between 0 and 1."""

    name: str
    blend: Blend
    share: tuple[float, float]
    # False where --split divides one --data-path among the splits.
    own_path: bool
    # What to name in an error about the share.
    described: str

    def documents(self, total: int) -> tuple[int, int]:
        """First and one past the last of this split's sequences among `total`. Rounds as Megatron-LM."""
        return round(self.share[0] * total), round(self.share[1] * total)


def split_ranges(split: str) -> list[tuple[float, float] | None]:
    """`969,30,1` as three ranges between 0 and 1 that follow each other; None for a share of zero."""
    try:
        weights = parse_split(split)
    except ValueError as error:
        raise UserError(f"--split: {error}") from error
    total = sum(weights)
    ranges: list[tuple[float, float] | None] = []
    begin = 0.0
    for weight in weights:
        end = begin + weight / total
        ranges.append((begin, end) if end > begin else None)
        begin = end
    return ranges


def split_sources(data: DataConfig) -> list[SplitSource | None]:
    """Sources of train, valid and test; None where the flags give a split nothing. Raises UserError on a bad flag."""
    per_split = [data.train_data_path, data.valid_data_path, data.test_data_path]
    if any(per_split):
        if data.data_path or data.data_args_path:
            raise UserError("--data-path and --train-data-path, --valid-data-path, --test-data-path exclude each other")
        if data.split:
            raise UserError("--split divides --data-path; leave it out with --train-data-path and the like")
        flags = [f"--{name}-data-path" for name in SPLITS]
        return [
            SplitSource(name, parse_blend(paths, flag), (0.0, 1.0), True, flag) if paths else None
            for name, paths, flag in zip(SPLITS, per_split, flags, strict=True)
        ]
    items, flag = _data_path(data)
    if not items:
        return [None, None, None]
    blend = parse_blend(items, flag)
    split = data.split or DEFAULT_SPLIT
    return [
        SplitSource(name, blend, share, False, f"--split {split}") if share else None
        for name, share in zip(SPLITS, split_ranges(split), strict=True)
    ]


def _data_path(data: DataConfig) -> tuple[list[str], str]:
    if data.data_args_path is None:
        return data.data_path or [], "--data-path"
    if data.data_path:
        raise UserError("--data-path and --data-args-path exclude each other")
    if not os.path.isfile(data.data_args_path):
        raise UserError(f"--data-args-path {data.data_args_path}: no such file")
    with open(data.data_args_path, encoding="utf-8") as stream:
        return stream.read().split(), f"--data-args-path {data.data_args_path}"


def data_digests(config: RunConfig) -> dict[str, str]:
    """Hash of every file of samples that the run reads, by its path; of a pair of token files the index, which says how
    long each document is."""
    paths = [*(config.finetune.sft_data or []), *(config.finetune.sft_valid_data or [])]
    if not paths and not config.data.mock_data:
        sources = split_sources(config.data)
        paths = [idx_path(prefix) for source in sources if source for prefix in source.blend.prefixes]
    return {path: file_digest(path) for path in dict.fromkeys(paths)}


def split_sizes(
    config: RunConfig, *, train_samples: int, train_iters: int, global_batch_size: int
) -> tuple[int, int, int]:
    """Samples that the run will draw from (train, valid, test).

    train_samples: all that training consumes, ramp-up counted. valid: an evaluation every --eval-interval steps and
    one at the end, each of --eval-iters global batches; test: one. With --skip-train one evaluation each.
    """
    one = config.validation.eval_iters * global_batch_size
    if config.validation.skip_train:
        return 0, one, one
    interval = config.validation.eval_interval
    evaluations = (train_iters // interval if interval else 0) + 1
    return train_samples, evaluations * one, one
