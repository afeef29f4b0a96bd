"""What the data flags give to train, valid and test."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config.errors import UserError
from megalite.config.schema import DataConfig, RunConfig
from megalite.data.splits import split_ranges, split_sizes, split_sources


@pytest.mark.parametrize("split", ["969,30,1", "969, 30, 1", "100,0,0", "9998,1,1", "1", "0.9,.1", "0,1,0", "3,3,3"])
@pytest.mark.parametrize("documents", [0, 1, 2, 3, 20, 999, 12345])
def test_ranges_of_documents_equal_megatron_cores(split: str, documents: int) -> None:
    theirs = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    matrix = theirs.convert_split_vector_to_split_matrix(theirs.parse_and_normalize_split(split))
    assert split_ranges(split) == matrix
    sources = split_sources(DataConfig(data_path=["p"], split=split))
    for source, share in zip(sources, matrix, strict=True):
        assert (source is None) == (share is None)
        if source is not None:
            expected = tuple(round(edge * float(documents)) for edge in share)
            assert source.documents(documents) == expected


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "1;2", "inf,1", "nan"])
def test_a_bad_split_is_refused(split: str) -> None:
    with pytest.raises(UserError, match="--split"):
        split_ranges(split)


def test_the_default_split_is_megatrons() -> None:
    shares = [source.share for source in split_sources(DataConfig(data_path=["p"])) if source]
    assert [round(1000 * end) - round(1000 * begin) for begin, end in shares] == [969, 30, 1]


def test_paths_of_their_own_leave_out_what_is_not_given() -> None:
    train, valid, test = split_sources(DataConfig(train_data_path=["p"], valid_data_path=["1", "q", "2", "r"]))
    assert train is not None
    assert train.share == (0.0, 1.0)
    assert valid is not None
    assert valid.blend.prefixes == ("q", "r")
    assert test is None


def test_data_args_path_holds_what_data_path_would(tmp_path: Path) -> None:
    (tmp_path / "args").write_text("30 p\n70 q\n")
    source = split_sources(DataConfig(data_args_path=str(tmp_path / "args")))[0]
    assert source is not None
    assert source.blend.prefixes == ("p", "q")
    with pytest.raises(UserError, match="no such file"):
        split_sources(DataConfig(data_args_path=str(tmp_path / "none")))


@pytest.mark.parametrize(
    "data",
    [
        DataConfig(data_path=["p"], train_data_path=["q"]),
        DataConfig(data_path=["p"], data_args_path="q"),
        DataConfig(train_data_path=["p"], split="1,1,1"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(data: DataConfig) -> None:
    with pytest.raises(UserError):
        split_sources(data)


def test_sizes_follow_the_evaluations_of_the_run() -> None:
    config = RunConfig()
    config.validation.eval_iters = 5
    sizes = {"train_samples": 800, "train_iters": 100, "global_batch_size": 8}
    assert split_sizes(config, **sizes) == (800, 40, 40)
    config.validation.eval_interval = 30
    assert split_sizes(config, **sizes) == (800, 4 * 40, 40)
    config.validation.skip_train = True
    assert split_sizes(config, **sizes) == (0, 40, 40)
    config.validation.skip_train = False
    config.validation.eval_iters = 0
    assert split_sizes(config, **sizes) == (800, 0, 0)
