"""What is wrong with the data flags, found before any process group exists: missing files, bad headers, bad blends."""

from __future__ import annotations

from megalite.config.errors import UserError
from megalite.config.schema import DataConfig, RunConfig
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.splits import split_sources


def check(config: RunConfig) -> list[str]:
    """Problems with the data flags, one message each, naming flag and file. Reads headers, no tokens."""
    problems = []
    if config.data.num_workers < 0:
        problems.append(f"--num-workers {config.data.num_workers} must be 0 or more")
    if config.data.seq_length is None or config.data.seq_length < 1:
        problems.append(f"--seq-length {config.data.seq_length} must be at least 1")
    if not 0 <= config.training.seed < 2**32:
        problems.append(f"--seed {config.training.seed} must be between 0 and {2**32 - 1}")
    return problems + _check_paths(config)


def _check_paths(config: RunConfig) -> list[str]:
    data = config.data
    named = _flags_given(data)
    if data.mock_data:
        return [f"--mock-data and {flag} exclude each other" for flag in named]
    try:
        sources = split_sources(data)
    except UserError as error:
        return [str(error)]
    if sources[0] is None and not config.validation.skip_train:
        where = f"; {', '.join(named)} leave train nothing" if named else ""
        return [f"there is nothing to train on: give --data-path, --train-data-path or --mock-data{where}"]
    flags = {prefix: source.blend.flag for source in sources if source for prefix in source.blend.prefixes}
    problems = []
    for prefix, flag in flags.items():
        try:
            IndexedDataset(prefix, mmap=False)
        except (UserError, OSError) as error:
            problems.append(f"{flag}: {error}")
    return problems


def _flags_given(data: DataConfig) -> list[str]:
    values = {
        "--data-path": data.data_path,
        "--data-args-path": data.data_args_path,
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }
    return [flag for flag, value in values.items() if value]
