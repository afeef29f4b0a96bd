"""What is wrong with the data flags, found before any process group exists: missing files, bad headers, bad blends.

Ranges of single flags and flags that exclude each other are the configuration's own checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.config.errors import UserError
from megalite.config.schema import RunConfig
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.origin import origin_note, origin_of
from megalite.data.splits import NOTHING_TO_TRAIN_ON, SplitSource, split_sources
from megalite.data.tokenizer_base import Tokenizer


def check(config: RunConfig) -> list[str]:
    """Problems with the files that the data flags name, one message each, naming flag and file. Reads headers alone."""
    data = config.data
    if not _reads_token_files(config):
        return []
    try:
        sources = split_sources(data)
    except UserError as error:
        return [str(error)]
    if sources[0] is None and not config.validation.skip_train:
        return [f"{NOTHING_TO_TRAIN_ON} (--split {data.split})" if data.split else NOTHING_TO_TRAIN_ON]
    problems = []
    for prefix, flag in _flags(sources).items():
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
