"""Criteo-like click logs of any length from a seed, with a signal for a model to learn.

Columns have the published Kaggle cardinalities and are drawn to look like the Kaggle training set:
Zipf-like ids, missing values, skewed integers, a quarter of the rows clicks. Category values may be
drawn by a different law (`categories.py`). A click is drawn from a known probability, so the best
AUC possible for any model is known as well.

The log-odds of a click are, up to a scale and an intercept, the sum of
  - an effect of each category value (missing is a value too), a hash of (seed, column, value);
  - for each integer column a weight times the standardised `ln(max(x, -2) + 3)`, missing as 0;
  - for some pairs of columns the product of two hidden numbers, hashes of the two values.
Scale and intercept are set on separate rows. So the log-odds have the same spread and the published
click rate for any seed.

Legend: R rows of one block.
"""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ecrm.base.atomic_files import staged_file
from ecrm.base.console import Progress
from ecrm.base.errors import UsageError
from ecrm.data import kaggle_shape as shape
from ecrm.data.categories import KAGGLE, Categories
from ecrm.data.criteo_text import format_rows
from ecrm.data.hashing import mix64
from ecrm.data.layout import CATEGORIES, INTEGERS
from ecrm.data.metrics import Histogram, logit_losses

BLOCK_ROWS = 8192  # part of the definition of the rows: every block has its own random stream
LOG_ODDS_SPREAD = 1.4
_CALIBRATION_BLOCKS = 4
_ROWS_STREAM, _CALIBRATION_STREAM = range(2)

_INTEGER_MEDIAN = np.array((1, 5, 6, 4, 2800, 32, 3, 7, 38, 0.5, 1, 0.3, 4))
_PAIRS = ((0, 13), (4, 16), (7, 22), (12, 17))
_PAIR_WEIGHT = 0.3
_INTEGER_WEIGHT = 0.2


@dataclass(frozen=True)
class Drawn:
    """Rows as drawn, with the log-odds of a click.

    `labels` uint8 [R], `integers` int64 [R, 13], `ids` int64 [R, 26] in 0 to the column's
    cardinality - 1, `missing` bool [R, 39], integers first; a missing integer or id is 0.
    `log_odds` float64 [R].
    """

    labels: np.ndarray
    integers: np.ndarray
    ids: np.ndarray
    missing: np.ndarray
    log_odds: np.ndarray

    @property
    def probability(self) -> np.ndarray:
        """The probability of a click in every row, float64 [R]."""
        return _sigmoid(self.log_odds)


@dataclass(frozen=True)
class Generated:
    """The counts of a generated file, and the AUC and logloss of the true probabilities.

    No model does better, except by luck. `attainable_auc` is NaN if only one label occurs.
    """

    rows: int
    clicks: int
    file_bytes: int
    attainable_auc: float
    attainable_logloss: float


class Population:
    """All rows of a seed: an endless sequence of independent blocks of `BLOCK_ROWS` rows."""

    def __init__(self, seed: int, categories: Categories = KAGGLE) -> None:
        """`seed` is in 0 to 2^64 - 1, `categories` is the law of category values.

        Raises `UsageError` for a seed out of range.
        """
        if not 0 <= seed < 2**64:
            raise UsageError(f"seed {seed} is not in 0 to 2^64 - 1")
        self._seed, self._categories = seed, categories
        # Columns of many values have small weights, so a model learns most of the signal from
        # thousands of rows.
        self._category_weight = 1 / (1 + np.log10(categories.values))
        self._key = mix64(np.array([seed], np.uint64))
        weights = mix64(self._key + np.arange(1, INTEGERS + 1, dtype=np.uint64))
        sign = np.where(weights >> np.uint64(63), 1.0, -1.0)
        self._integer_weight = (
            sign * _INTEGER_WEIGHT * (0.5 + (weights & np.uint64(0xFFFF)) / 65536)
        )
        self._calibrate()

    def draw(self, block: int) -> Drawn:
        """Return the rows of a block, counted from 0."""
        integers, ids, missing, uniform = self._features(_ROWS_STREAM, block)
        log_odds = self._intercept + self._scale * self._signal(_logarithms(integers), ids, missing)
        return Drawn(
            (uniform < _sigmoid(log_odds)).astype(np.uint8), integers, ids, missing, log_odds
        )

    def _calibrate(self) -> None:
        """Standardise the integers and set scale and intercept, from rows outside of all files."""
        features = [
            self._features(_CALIBRATION_STREAM, block) for block in range(_CALIBRATION_BLOCKS)
        ]
        integers, ids, missing, _ = (np.concatenate(part) for part in zip(*features, strict=True))
        logarithms = _logarithms(integers)
        self._center, self._spread = logarithms.mean(axis=0), logarithms.std(axis=0)
        signal = self._signal(logarithms, ids, missing)
        self._scale = LOG_ODDS_SPREAD / signal.std()
        self._intercept = _intercept(self._scale * signal, shape.CLICK_RATE)

    def _features(
        self, stream: int, block: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return (integers, ids, missing, a uniform number per row) of a block.

        A missing value has the integer or id 0.
        """
        random = np.random.Generator(
            np.random.PCG64(np.random.SeedSequence((self._seed, stream, block)))
        )
        ids = self._categories.draw(random.random((BLOCK_ROWS, CATEGORIES)))
        integers = _draw_integers(random.random((BLOCK_ROWS, INTEGERS)))
        missing = _draw_missing(random, self._categories.missing_percent)
        integers[missing[:, :INTEGERS]] = 0
        ids[missing[:, INTEGERS:]] = 0
        return integers, ids, missing, random.random(BLOCK_ROWS)

    def _signal(self, logarithms: np.ndarray, ids: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Return the log-odds before scale and intercept, float64 [R].

        `logarithms`, [R, 13], are the result of `_logarithms` for the integers.
        """
        numbers = self._categories.first
        values = ids + numbers[:-1]
        row, column = np.nonzero(missing[:, INTEGERS:])
        values[row, column] = numbers[-1] + column
        # Effect and hidden number: sums of two 16-bit uniforms, centred and divided by the
        # deviation of the sum.
        quarters = (
            mix64(values.astype(np.uint64) ^ self._key).view(np.uint16).reshape(*ids.shape, 2, 2)
        )
        halves = (quarters[..., 0].astype(np.float64) + quarters[..., 1] - 65535) * (
            math.sqrt(6) / 65536
        )
        signal: np.ndarray = (
            logarithms - self._center
        ) / self._spread @ self._integer_weight + halves[..., 0] @ self._category_weight
        for first, second in _PAIRS:
            signal += _PAIR_WEIGHT * halves[:, first, 1] * halves[:, second, 1]
        return signal


def _sigmoid(log_odds: np.ndarray) -> np.ndarray:
    probability: np.ndarray = 1 / (1 + np.exp(-log_odds))
    return probability


def _intercept(log_odds: np.ndarray, rate: float) -> float:
    """Return the summand for log-odds with a mean probability of `rate`, by bisection."""
    low, high = -100.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(log_odds + middle).mean() < rate else (low, middle)
    return middle


def _logarithms(integers: np.ndarray) -> np.ndarray:
    """Return the integers as used in training: `ln(x + 3)`, float64 of the same shape.

    x must be at least -2.
    """
    logarithms: np.ndarray = np.log(integers + 3.0)
    return logarithms


def generate_criteo(
    rows: int,
    seed: int,
    output: str,
    progress: Progress | None = None,
    categories: Categories = KAGGLE,
) -> Generated:
    """Write `rows` rows of a seed in the layout of Kaggle's `train.txt`.

    The file is gzipped if the name ends in `.gz`. Category values are drawn by the law
    `categories`. The same seed and law give the same rows; a longer file starts with the rows of
    the shorter file. The file appears, and replaces any file of the same name, once complete and
    on disk. Raises `UsageError` for a number of rows or a seed out of range and for an unwritable
    output, `EcrmError` for a failed write.
    """
    if rows < 1:
        raise UsageError(f"rows is {rows}, at least 1 is needed")
    population = Population(seed, categories)
    target = Path(os.path.realpath(output))
    scores, logloss = Histogram(), 0.0
    with staged_file(target) as file:
        # Without a name and a time in the header the gzip file depends on the rows only.
        stream = gzip.GzipFile("", "wb", 1, file, mtime=0) if target.name.endswith(".gz") else file
        for block in range(-(-rows // BLOCK_ROWS)):
            drawn, kept = population.draw(block), slice(rows - block * BLOCK_ROWS)
            stream.write(
                format_rows(
                    drawn.labels[kept],
                    drawn.integers[kept],
                    categories.hex_values(drawn.ids[kept]),
                    drawn.missing[kept],
                )
            )
            scores.add(drawn.labels[kept], drawn.log_odds[kept])
            logloss += float(logit_losses(drawn.labels[kept], drawn.log_odds[kept]).sum())
            if progress:
                done = min((block + 1) * BLOCK_ROWS, rows)
                progress.update(done, f"{file.tell() / 1e6:,.1f} MB", done / rows)
        if stream is not file:
            stream.close()
        file_bytes = file.tell()
    area, _ = scores.auc()
    return Generated(
        rows, scores.positives, file_bytes, math.nan if area is None else area, logloss / rows
    )


def _draw_integers(uniform: np.ndarray) -> np.ndarray:
    """Return integers, int64 [R, 13], from uniform numbers, float64 [R, 13].

    The integers are log-logistic. As many rows as in the sample reach the sample's maximum about
    once.
    """
    maximum, minimum = np.array(shape.INTEGER_MAXIMUM), np.array(shape.INTEGER_MINIMUM)
    power = np.log(maximum / _INTEGER_MEDIAN) / math.log(shape.SAMPLE_ROWS)
    odds = uniform / (1 - uniform)
    integers: np.ndarray = (_INTEGER_MEDIAN * odds**power).astype(np.int64) + minimum
    np.minimum(integers, maximum, out=integers)
    return integers


def _draw_missing(random: np.random.Generator, category_percent: Sequence[float]) -> np.ndarray:
    """Draw the missing values: bool [BLOCK_ROWS, 39].

    Columns with about the same share of missing values miss values in the same rows, as in the
    real sets.
    """
    parts = []
    for percent in (np.array(shape.INTEGER_MISSING_PERCENT), np.array(category_percent)):
        _, group = np.unique(percent.round(), return_inverse=True)
        parts.append(random.random((BLOCK_ROWS, group.max() + 1))[:, group] < percent / 100)
    return np.concatenate(parts, axis=1)
