"""What is wrong with the data flags, found before any process group exists: missing files, bad headers, bad blends.

Ranges of single flags and flags that exclude each other are the configuration's own checks.
"""

from __future__ import annotations

from megalite.config.errors import UserError
from megalite.config.schema import RunConfig
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.splits import NOTHING_TO_TRAIN_ON, split_sources


def check(config: RunConfig) -> list[str]:
    """Problems with the files that the data flags name, one message each, naming flag and file. Reads headers alone."""
    data = config.data
    if data.mock_data or config.finetune.sft_data is not None:
        return []
    try:
        sources = split_sources(data)
    except UserError as error:
        return [str(error)]
    if sources[0] is None and not config.validation.skip_train:
        return [f"{NOTHING_TO_TRAIN_ON} (--split {data.split})" if data.split else NOTHING_TO_TRAIN_ON]
    flags = {prefix: source.blend.flag for source in sources if source for prefix in source.blend.prefixes}
    problems = []
    for prefix, flag in flags.items():
        try:
            IndexedDataset(prefix, mmap=False)
        except (UserError, OSError) as error:
            problems.append(f"{flag}: {error}")
    return problems
