"""Area under the ROC curve and log loss, exact."""

from __future__ import annotations

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float | None:
    """Probability that a positive scores above a negative, ties counting half; None without both classes.

    `labels` 0 or 1 [N], `scores` [N], any real dtype.
    """
    positives = int(labels.sum())
    negatives = labels.size - positives
    if not positives or not negatives:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    average_rank = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = average_rank[place][labels > 0].sum()
    return float((rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives))


def log_loss(labels: np.ndarray, logits: np.ndarray) -> float | None:
    """Mean binary cross-entropy of logits [N], in float64; None for no samples."""
    if not labels.size:
        return None
    logits = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, logits) - labels * logits))
