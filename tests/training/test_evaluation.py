"""A classifier's scores against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from megalite.training.evaluation import scores_of


def test_accuracy_and_macro_f1_follow_from_the_counts() -> None:
    counts = torch.tensor([[5, 1, 0], [2, 2, 0], [0, 0, 0]])  # [true, decided]; the third class doesn't occur
    scores = scores_of(counts)
    assert scores["accuracy"] == pytest.approx(7 / 10)
    assert scores["macro_f1"] == pytest.approx((10 / 13 + 4 / 7) / 2)


def test_a_class_that_is_never_found_counts_as_zero() -> None:
    scores = scores_of(torch.tensor([[8, 0], [2, 0]]))
    assert scores == {"accuracy": pytest.approx(0.8), "macro_f1": pytest.approx(16 / 18 / 2)}


def test_of_nothing_there_are_no_scores_above_zero() -> None:
    assert scores_of(torch.zeros(2, 2, dtype=torch.int64)) == {"accuracy": 0.0, "macro_f1": 0.0}
