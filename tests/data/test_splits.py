"""What the data flags give to train, valid and test."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config.errors import UserError
from megalite.config.schema import DataConfig, RunConfig
from megalite.data.splits import check_token_files, split_ranges, split_sizes, split_sources
from tests.data.token_files import random_documents, run_config, write_tokens


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


def test_data_args_path_holds_what_data_path_would(tmp_path: Path) -> None:
    (tmp_path / "args").write_text("30 p\n70 q\n")
    source = split_sources(DataConfig(data_args_path=str(tmp_path / "args")))[0]
    assert source.blend.prefixes == ("p", "q")
    with pytest.raises(UserError, match="no such file"):
        split_sources(DataConfig(data_args_path=str(tmp_path / "none")))


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


def test_a_missing_or_damaged_file_is_named_with_its_flag(tmp_path: Path) -> None:
    good = write_tokens(tmp_path / "good", random_documents(3))
    bad = write_tokens(tmp_path / "bad", random_documents(3))
    for config in (run_config("1", good, "2", good), run_config(train_data_path=[good]), run_config(mock_data=True)):
        assert check_token_files(config) == []
    Path(f"{bad}.idx").write_bytes(b"PK" * 30)
    missing, damaged = check_token_files(run_config("1", f"{tmp_path}/none", "1", good, "2", bad))
    assert missing.startswith("--data-path: ")
    assert f"{tmp_path}/none.idx" in missing
    assert f"{bad}.idx" in damaged
    (problem,) = check_token_files(run_config(train_data_path=[good], valid_data_path=[bad]))
    assert problem.startswith("--valid-data-path: ")


@pytest.mark.parametrize(
    "config, says",
    [
        (run_config(), "nothing to train on"),
        (run_config("p", split="0,1,1"), "nothing to train on"),
        (run_config("1", "p", "2"), "--data-path"),
    ],
)
def test_bad_data_flags_are_named(config: RunConfig, says: str) -> None:
    (problem,) = check_token_files(config)
    assert says in problem
