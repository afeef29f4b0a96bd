"""Train, valid and test sets: sample for sample megatron-core's, and clear errors where the data can't give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.errors import UserError
from megalite.config.schema import RunConfig
from megalite.data.document_mask import SampleFormat, SampleSource
from megalite.data.gpt_dataset import Datasets, build_datasets
from tests.data.token_files import (
    EOD,
    SEQ_LENGTH,
    VOCABULARY,
    megatron_sets,
    random_documents,
    run_config,
    write_tokens,
)

SIZES = (300, 60, 20)


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[str, str]:
    """Prefixes of two corpora, the second with empty documents."""
    first = write_tokens(tmp_path / "first", random_documents(200, seed=1))
    return first, write_tokens(tmp_path / "second", random_documents(90, seed=2, empty=True), np.int32)


def build(config: RunConfig, sizes: tuple[int, int, int] = SIZES) -> Datasets:
    return build_datasets(config, EOD, VOCABULARY, sizes)


def assert_same_samples(ours: SampleSource | None, theirs: Any) -> None:
    assert (ours is None) == (theirs is None)
    if ours is None:
        return
    assert len(ours) == len(theirs)
    for place in range(len(ours)):
        mine, other = ours[place], theirs[place]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(mine[name], other[name].numpy())


FLAGS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
# `--data-path` with {0} and {1} for the corpora, `--split`, and more flags that both know.
SETS: list[tuple[str, str, dict[str, bool]]] = [
    ("{0}", "960,30,10", {}),
    ("{0}", "80,15,5", FLAGS),
    ("{0}", "100,0,0", {}),
    ("{0}", "50,50", {}),
    ("30 {0} 70 {1}", "80,15,5", {}),
    ("0.5 {0} 0.5 {1}", "80,15,5", {}),
    ("0.01 {0} 0.99 {1}", "80,15,5", {}),
    ("2.0 {0}", "80,15,5", {}),  # a blend of one
    ("{0} {1}", "80,15,5", {}),  # weighted by size
]


@pytest.mark.parametrize(("words", "split", "flags"), SETS)
def test_sets_have_megatron_cores_samples(
    corpora: tuple[str, str], words: str, split: str, flags: dict[str, bool]
) -> None:
    utils = pytest.importorskip("megatron.core.datasets.utils")
    path = words.format(*corpora).split()
    sizes = (200, 30, 10) if path == list(corpora) else SIZES  # no more than there are
    theirs = megatron_sets(sizes, blend=utils.get_blend_from_list(path), split=split, **flags)
    ours = build(run_config(*path, split=split, **flags), sizes)
    for mine, other in zip((ours.train, ours.valid, ours.test), theirs, strict=True):
        assert_same_samples(mine, other)
    assert ours.train is not None and ("document_ids" in ours.train[0]) == bool(flags)


def test_paths_per_split_give_megatron_cores_samples(corpora: tuple[str, str]) -> None:
    utils = pytest.importorskip("megatron.core.datasets.utils")
    first, second = corpora
    paths = [["1", first, "2", second], ["5", second], [first, second]]
    theirs = megatron_sets(SIZES, blend_per_split=[utils.get_blend_from_list(path) for path in paths])
    ours = build(run_config(train_data_path=paths[0], valid_data_path=paths[1], test_data_path=paths[2]))
    for mine, other in zip((ours.train, ours.valid, ours.test), theirs, strict=True):
        assert_same_samples(mine, other)


@pytest.mark.parametrize("tokens", [64, 65, 129, 50, 1])
def test_a_tiny_corpus_is_repeated_as_in_megatron_core(tmp_path: Path, tokens: int) -> None:
    prefix = write_tokens(tmp_path / "a", [np.arange(tokens) % EOD])
    ours = build(run_config(prefix, split="1,0,0"), (100, 0, 0))
    assert len(ours.train) >= 100
    text = np.concatenate([ours.train[0]["tokens"], ours.train[0]["labels"][-1:]])
    start = text[0]
    np.testing.assert_array_equal(text, (start + np.arange(SEQ_LENGTH + 1)) % tokens % EOD)
    if tokens > 1:
        pytest.importorskip("megatron.core.datasets.gpt_dataset")
        assert_same_samples(ours.train, megatron_sets((100, 0, 0), blend=([prefix], None), split="1,0,0")[0])


@pytest.mark.parametrize("mmap", [True, False])
def test_every_item_has_one_shape_and_labels_are_the_next_tokens(corpora: tuple[str, str], mmap: bool) -> None:
    dataset = build(run_config(corpora[1], split="100,0,0", mmap_bin_files=mmap, **FLAGS), (320, 0, 0)).train
    assert len(dataset) * SEQ_LENGTH > 1.5 * dataset.tokens_per_epoch  # type: ignore[attr-defined]
    shapes = set()
    for place in range(len(dataset)):
        item = dataset[place]
        shapes.add(tuple((name, array.shape, array.dtype.name) for name, array in sorted(item.items())))
        np.testing.assert_array_equal(item["tokens"][1:], item["labels"][:-1])
    assert len(shapes) == 1
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@pytest.mark.parametrize(
    "count, split, empty", [(20, "9998,1,1", "valid"), (2, "969,30,1", "valid"), (2, "1,1,998", "train")]
)
def test_a_split_without_documents_is_named(tmp_path: Path, count: int, split: str, empty: str) -> None:
    prefix = write_tokens(tmp_path / "a", random_documents(count))
    config = run_config(prefix, split=split)
    with pytest.raises(UserError, match=f"the {empty} split of {prefix} is empty: --split {split}"):
        build(config)
    if empty == "valid":  # which may be, where nothing is wanted of it
        assert build(config, (10, 0, 0)).valid is None


def test_data_without_tokens_a_share_or_a_whole_sample_is_an_error(tmp_path: Path) -> None:
    for documents in ([], [[], [], []]):
        prefix = write_tokens(tmp_path / "a", documents)
        for words in ([prefix], ["1", prefix], [prefix, prefix]):
            with pytest.raises(UserError):
                build(run_config(*words, split="1,0,0"))
    config = run_config(write_tokens(tmp_path / "b", [np.arange(100), np.arange(64)]), split="1,1,0")
    config.validation.full_validation = True
    with pytest.raises(UserError, match="has 64 tokens, and one sample needs --seq-length . 1 = 65"):
        build(config)
    config.data.split = "0,1,0"
    with pytest.raises(UserError, match="nothing to train on"):
        build(config)


def test_full_validation_is_the_whole_split_once(corpora: tuple[str, str]) -> None:
    config = run_config("1", corpora[0], "9", corpora[1], split="50,25,25")
    config.validation.full_validation = True
    sets = build(config, (10, 3, 3))
    assert sets.test is not None
    by_split = [summary for summary in sets.summaries if summary.split == "valid"]
    assert len(sets.valid) == sum(summary.samples_per_epoch for summary in by_split) > 0
    assert all(0.9 < summary.epochs <= 1 for summary in by_split)
    tokens = np.concatenate([sets.valid[place]["tokens"] for place in range(len(sets.valid))])
    assert len(tokens) == SEQ_LENGTH * len(sets.valid)
    never_evaluated = build(config, (10, 0, 0))
    assert never_evaluated.valid is None and never_evaluated.test is None


@pytest.mark.parametrize(
    ("documents", "dtype", "says"),
    [
        (
            [[1, 2, 3], [VOCABULARY]],
            np.uint16,
            f"a.bin holds token id {VOCABULARY}, but .* has {VOCABULARY}",
        ),
        ([[1, -1] * 50], np.int32, "token id -1"),
        ([[1, 2] * 50], np.float32, "holds float32 values"),
    ],
)
def test_what_is_no_id_of_the_vocabulary_is_found_before_training(
    tmp_path: Path, documents: list[list[int]], dtype: type, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        build(run_config(write_tokens(tmp_path / "a", documents, dtype), split="1,0,0"))


def test_an_id_outside_the_vocabulary_is_found_when_read(tmp_path: Path) -> None:
    documents = [np.zeros(70000, dtype=np.int64), np.full(64, VOCABULARY)]
    dataset = build(run_config(write_tokens(tmp_path / "a", documents), split="1,0,0")).train
    with pytest.raises(UserError, match="a.bin holds token id 131"):
        [dataset[place] for place in range(len(dataset))]


def test_summaries_say_how_often_the_data_is_seen(tmp_path: Path) -> None:
    documents = [np.arange(100)] * 100
    sets = build(run_config(write_tokens(tmp_path / "a", documents), split="1,0,0"), (1000, 0, 0))
    (summary,) = sets.summaries
    assert (summary.documents, summary.tokens_per_epoch, summary.samples_per_epoch) == (100, 10000, 156)
    assert summary.epochs == pytest.approx(6.4)
    assert "156 samples per epoch" in summary.line()
    assert "6.40 epochs (data is repeated)" in summary.line()


def test_the_cache_lies_beside_the_data_or_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    prefix = write_tokens(tmp_path / "data" / "a", random_documents(50))
    build(run_config(prefix, split="1,0,0"))
    assert len(list((tmp_path / "data" / "cache").iterdir())) == 3
    build(run_config("1", prefix, "1", prefix, split="1,0,0", data_cache_path=str(tmp_path / "elsewhere")))
    assert len(list((tmp_path / "elsewhere").iterdir())) == 5
    assert len(list((tmp_path / "data" / "cache").iterdir())) == 3


def test_more_samples_than_unweighted_prefixes_hold_are_noted(corpora: tuple[str, str]) -> None:
    sets = build(run_config(*corpora, split="1,0,0"), (10**5, 0, 0))
    assert len(sets.train) < 10**5
    assert "repeats them" in sets.notes[0]


def test_mock_data_needs_no_files() -> None:
    sets = build(run_config(mock_data=True))
    assert [0 if each is None else len(each) for each in (sets.train, sets.valid, sets.test)] == list(SIZES)
    assert sets.train[0]["tokens"].shape == (SEQ_LENGTH,)
    assert build(run_config(mock_data=True), (5, 0, 0)).valid is None


def test_documents_without_eod_are_separate_where_the_index_ends_them(tmp_path: Path) -> None:
    lengths = [3, 9, 1, 14, 6]
    documents = [np.full(length, 10 + n) for n, length in enumerate(lengths)]  # each of one id, and no EOD
    prefix = write_tokens(tmp_path / "a", documents)
    config = run_config(prefix, seq_length=16, split="1,0,0", **FLAGS)
    train = build_datasets(config, EOD, VOCABULARY, (6, 0, 0)).train
    for index in range(6):
        item = train[index]
        changes = np.flatnonzero(np.diff(item["tokens"])) + 1
        assert np.flatnonzero(np.diff(item["document_ids"])).tolist() == (changes - 1).tolist()
        assert np.flatnonzero(item["position_ids"][1:] == 0).tolist() == (changes - 1).tolist()
        np.testing.assert_array_equal(item["loss_mask"], item["tokens"] == item["labels"])


def test_masks_equal_megatron_cores() -> None:
    theirs = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    random = np.random.default_rng(1)
    for _ in range(20):
        tokens = random.integers(EOD - 4, EOD + 1, 30)
        attention, loss, positions = theirs._get_ltor_masks_and_position_ids(
            torch.from_numpy(tokens), EOD, True, True, True, True
        )
        item = SampleFormat(EOD, True, True, True).item(np.append(tokens, 0))
        assert item["position_ids"].tolist() == positions.tolist()
        assert item["loss_mask"].tolist() == loss.bool().tolist()
        ids = item["document_ids"]
        visible = (ids[:, None] == ids[None, :]) & np.tri(30, dtype=bool)
        np.testing.assert_array_equal(visible, ~attention[0].numpy())
