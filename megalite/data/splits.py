"""From the data flags to three sources: which blend, which share of its documents and how many samples each split has.

The key idea: everything that the flags say about train, valid and test is decided here, before a token is read, and
what is wrong with the files is found before any process group exists. Ranges of single flags and flags that exclude
each other are the configuration's own checks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.blends import Blend, parse_blend
from megalite.config.errors import UserError
from megalite.config.resolve import DEFAULT_SPLIT, parse_split
from megalite.config.schema import DataConfig, RunConfig
from megalite.data.cache import file_digest
from megalite.data.indexed_dataset import IndexedDataset, idx_path
from megalite.data.origin import origin_note, origin_of
from megalite.data.remote_files import local_prefix, remote_problem
from megalite.data.tokenizer_base import Tokenizer
from megalite.files.remote import is_address

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
    weights = parse_split(split)
    ends = list(itertools.accumulate((weight / sum(weights) for weight in weights), initial=0.0))
    return [(begin, end) if end > begin else None for begin, end in itertools.pairwise(ends)]


def split_sources(data: DataConfig) -> list[SplitSource | None]:
    """Sources of train, valid and test; None where the flags give a split nothing. Raises UserError on a bad blend."""
    paths = [data.train_data_path, data.valid_data_path, data.test_data_path]
    if any(paths):
        flags = [f"--{name}-data-path" for name in SPLITS]
        return [
            SplitSource(name, parse_blend(words, flag), (0.0, 1.0), True, flag) if words else None
            for name, words, flag in zip(SPLITS, paths, flags, strict=True)
        ]
    words, flag = data.data_path or [], "--data-path"
    if data.data_args_path is not None:
        flag = f"--data-args-path {data.data_args_path}"
        if not os.path.isfile(data.data_args_path):
            raise UserError(f"{flag}: no such file")
        words = Path(data.data_args_path).read_text("utf-8").split()
    if not words:
        return [None, None, None]
    blend, split = parse_blend(words, flag), data.split or DEFAULT_SPLIT
    return [
        SplitSource(name, blend, share, False, f"--split {split}") if share else None
        for name, share in zip(SPLITS, split_ranges(split), strict=True)
    ]


def check_token_files(config: RunConfig) -> list[str]:
    """Problems with the token files that the data flags name, one message each, naming flag and file. Reads headers
    alone."""
    if not _reads_token_files(config):
        return []
    try:
        sources = split_sources(config.data)
    except UserError as error:
        return [str(error)]
    if sources[0] is None and not config.validation.skip_train:
        return [NOTHING_TO_TRAIN_ON + (f" (--split {config.data.split})" if config.data.split else "")]
    problems = []
    for prefix, flag in _flags(sources).items():
        if is_address(prefix):
            problem = remote_problem(prefix, config.data.data_cache_path)
            problems += [f"{flag}: {problem}"] if problem else []
            continue
        try:
            IndexedDataset(prefix, mmap=False)
        except (UserError, OSError) as error:
            problems.append(f"{flag}: {error}")
    return problems


def tokenizer_notes(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """One line for each pair of token files that another tokenizer than the run's made."""
    if not _reads_token_files(config):
        return []
    mine = origin_of(tokenizer, config.tokenizer)
    return [note for prefix in _flags(split_sources(config.data)) if (note := origin_note(prefix, mine)) is not None]


def _reads_token_files(config: RunConfig) -> bool:
    return not config.data.mock_data and config.finetune.sft_data is None


def _flags(sources: Sequence[SplitSource | None]) -> dict[str, str]:
    """The flag that names each prefix."""
    return {prefix: source.blend.flag for source in sources if source for prefix in source.blend.prefixes}


def data_digests(config: RunConfig) -> dict[str, str]:
    """Hash of every file of samples that the run reads, by its path; of a pair of token files the index, which says how
    long each document is."""
    paths = [*(config.finetune.sft_data or []), *(config.finetune.sft_valid_data or [])]
    if _reads_token_files(config):
        prefixes, cache = _flags(split_sources(config.data)), config.data.data_cache_path
        return {idx_path(prefix): file_digest(idx_path(local_prefix(prefix, cache))) for prefix in prefixes}
    return {path: file_digest(path) for path in paths}


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
