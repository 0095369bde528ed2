"""AUC and log loss: the counted ones against the exact ones, and what has no answer."""

import warnings

import numpy as np
import pytest

from ecrm.data.metrics import AUC_BINS, Histogram, auc, bins_of, logit_losses


def drawn(size: int, scale: float = 1.0, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Labels that depend on float32 logits around -1."""
    random = np.random.default_rng(seed)
    logits = (random.normal(-1, 1, size) * scale).astype(np.float32)
    return (random.random(size) < 1 / (1 + np.exp(-logits / scale))).astype(np.float32), logits


def counted(*parts: tuple[np.ndarray, np.ndarray]) -> Histogram:
    histogram = Histogram()
    for labels, scores in parts:
        histogram.add(labels, scores)
    return histogram


def test_exact_auc_is_the_share_of_pairs_in_order():
    labels, scores = np.array([1, 0, 1, 0, 0]), np.array([3.0, 3.0, 1.0, 0.0, 2.0])
    pairs = [(p > n) + (p == n) / 2 for p in scores[labels == 1] for n in scores[labels == 0]]
    assert auc(labels, scores) == pytest.approx(np.mean(pairs), abs=1e-15)
    assert counted((labels, scores)).auc() == (auc(labels, scores), pytest.approx(0.5 / 6))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 50.0, 1e30])
def test_counted_auc_is_within_its_bound_at_every_scale(scale):
    labels, logits = drawn(200_000, scale)
    area, error = counted((labels, logits)).auc()
    assert abs(area - auc(labels, logits)) <= error < 1e-4


def test_the_bound_holds_for_scores_made_to_break_it_and_is_reached():
    """All negatives just above all positives, in one bin: the exact AUC is 0."""
    scores = np.float32(1) + np.arange(200, dtype=np.float32) * np.float32(2**-23)
    labels = (np.arange(200) < 100).astype(np.float32)
    assert auc(labels, scores) == 0.0
    assert counted((labels, scores)).auc() == (0.5, 0.5)


def test_ties_count_half_exactly():
    labels, logits = drawn(50_000)
    coarse = np.round(logits * 4) / 4
    assert counted((labels, coarse)).auc()[0] == pytest.approx(auc(labels, coarse), abs=1e-14)
    zeros = np.array([-0.0, 0.0], np.float32)
    assert counted((np.array([0, 1]), zeros)).auc()[0] == 0.5


def test_bins_ascend_with_the_score():
    random = np.random.default_rng(3)
    scores = np.sort(random.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32))
    scores = scores[np.isfinite(scores)]
    bins = bins_of(scores)
    assert (np.diff(bins) >= 0).all() and bins[0] >= 0 and bins[-1] < AUC_BINS
    first, last = (
        np.flatnonzero(np.r_[True, np.diff(bins) > 0]),
        np.flatnonzero(np.r_[np.diff(bins) > 0, True]),
    )
    normal = np.abs(scores[first]) > 1e-37
    wide = scores[last].astype(float) - scores[first].astype(float)
    assert (wide[normal] <= np.abs(scores[first][normal].astype(float)) * 2**-11).all()


def test_what_has_no_answer_is_none_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Histogram().auc() == (None, None)
        assert counted((np.ones(3), np.zeros(3))).auc() == (None, None)
        assert auc(np.array([0, 1]), np.array([np.nan, 1.0])) is None
        assert auc(np.array([0, 1]), np.array([np.inf, 1.0])) is None
        assert auc(np.array([]), np.array([])) is None


def test_losses_are_binary_cross_entropy_also_far_out():
    labels, logits = np.array([0, 1, 1, 0]), np.array([1.5, -2.0, -1000.0, -1000.0], np.float32)
    chance = 1 / (1 + np.exp(-logits[:2].astype(float)))
    expected = [-np.log(1 - chance[0]), -np.log(chance[1]), 1000.0, 0.0]
    assert logit_losses(labels, logits) == pytest.approx(expected)
