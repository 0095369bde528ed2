"""Area under the ROC curve (AUC) and log loss, exact or in memory of a fixed size."""

from __future__ import annotations

import numpy as np

AUC_BINS = 1 << 20
_SIGN = np.uint32(1 << 31)


def auc(labels: np.ndarray, scores: np.ndarray) -> float | None:
    """Exact probability that a positive scores above a negative, ties counting half.

    `labels` 0 or 1 [N], `scores` [N], any real dtype. None without samples of both classes, or if a
    score is not finite.
    """
    positives = int(labels.sum())
    negatives = labels.size - positives
    if not positives or not negatives or not np.isfinite(scores).all():
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    average_rank = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = average_rank[place][labels > 0].sum()
    return float((rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives))


def logit_losses(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Binary cross-entropy of each finite logit: float64 [N]."""
    logits = logits.astype(np.float64)
    losses: np.ndarray = np.logaddexp(0.0, logits) - labels * logits
    return losses


def bins_of(scores: np.ndarray) -> np.ndarray:
    """The bin of each finite score, int64 [N] in 0 to `AUC_BINS` - 1, ascending with the score.

    Floats of a bin share the upper 20 bits: sign, exponent and 11 bits of mantissa. So a bin is at
    most 2^-11 of its scores wide, at any scale. Equal scores, also +0 and -0, share a bin.
    """
    bits = (scores.astype(np.float32) + np.float32(0)).view(np.uint32)  # -0 + 0 is 0
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    return (ordered >> np.uint32(12)).astype(np.int64)


class Histogram:
    """Counts of scores by label and bin, for the AUC.

    The counts take 16 MB and do not depend on the order of counting.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(2 * AUC_BINS, np.int64)

    def add(self, labels: np.ndarray, scores: np.ndarray) -> None:
        """Count finite scores [N] with their labels, 0 or 1 [N]."""
        np.add.at(self._counts, bins_of(scores) + labels.astype(np.int64) * AUC_BINS, 1)

    @property
    def positives(self) -> int:
        """The number of counted samples with label 1."""
        return int(self._counts[AUC_BINS:].sum())

    def auc(self) -> tuple[float | None, float | None]:
        """The AUC, and its largest distance from the exact AUC; (None, None) without both classes.

        Scores of one bin are taken as ties. The exact AUC counts a pair of a positive and a
        negative in one bin as 0, a half or 1; the histogram counts a half. So the two differ by at
        most half the share of such pairs.
        """
        negatives, positives = self._counts.reshape(2, AUC_BINS).astype(np.float64)
        pairs = negatives.sum() * positives.sum()
        if not pairs:
            return None, None
        below = np.cumsum(negatives) - negatives
        together = float((positives * negatives).sum())
        return (float((positives * below).sum()) + together / 2) / pairs, together / 2 / pairs
