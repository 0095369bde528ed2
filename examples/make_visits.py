"""Two days of made visits to a shop, as Parquet files for `examples/train_columns.py`.

    python examples/make_visits.py visits

A visit has a user, an offered movie, genres, the movies seen before with a weight each, a price
that may be missing, a time, and whether the user has bought the movie.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--visits", type=int, default=20_000, help="visits of a day")
typed = parser.parse_args()
USERS, MOVIES, GENRES = 500, 300, ["comedy", "drama", "horror", "western"]

random = np.random.default_rng(0)
taste, appeal = random.normal(size=USERS), random.normal(size=MOVIES)
genres = [random.choice(GENRES, random.integers(1, 3), replace=False) for _ in range(MOVIES)]

typed.folder.mkdir(exist_ok=True)
for day in (1, 2):
    count = typed.visits
    user, movie = random.integers(USERS, size=count), random.integers(MOVIES, size=count)
    price = random.uniform(1, 20, count).round(2)
    logit = taste[user] + 1.5 * appeal[movie] - 0.1 * price
    seen = [random.integers(MOVIES, size=size) for size in random.integers(0, 4, count)]
    columns = {
        "bought": random.random(count) < 1 / (1 + np.exp(-logit)),
        "user_id": user,
        "movie": [f"m{number}" for number in movie],
        "genres": [genres[number] for number in movie],
        "seen": [[{"movie": f"m{n}", "weight": 1 / (1 + n % 5)} for n in some] for some in seen],
        "price": pyarrow.array(price, mask=random.random(count) < 0.1),
        "visited_at": np.datetime64(f"2026-11-0{day}", "s") + random.integers(86_400, size=count),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), typed.folder / f"day-{day}.parquet")
