"""Published numbers beside trainings of this machine: plain torch, ECRM, ECRM with three kills.

    make bench-accuracy                                  # all recipes
    python benchmarks/bench_accuracy.py --recipe svd     # one recipe; the CSV keeps all others
    python benchmarks/bench_accuracy.py --contender ECRM # one training; the CSV keeps all others
    python benchmarks/bench_accuracy.py --smoke          # tiny, to a temporary file

A recipe is a script of `examples/` with a twin in plain torch; `lib/accuracy.py` lists all recipes.
Every seed trains three times. Plain torch trains in one process. ECRM trains under `ecrm launch` on
3 servers and 2 trainers, with 2 spares. The third training is the second with three SIGKILLs: a
server, the main trainer and a second server die. Some recipes train two times more, with bfloat16
on the wire: a session alone in one process, which has the bits of any ranks, and ranks with whole
tables and three kills. A benchmark whose models with and without kills differ in a bit ends with an
error, and so does a benchmark without three deaths. A recipe without data is left out. Writes
benchmarks/results/accuracy.csv.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from lib import measure, tables
from lib.accuracy import (
    CALM,
    CONTENDERS,
    KILLED,
    PLAIN,
    RECIPES,
    ROUNDED,
    ROUNDED_KILLED,
    Recipe,
    accuracy,
)
from lib.ratios import Row

EXAMPLES = Path(__file__).parents[1] / "examples"
LAYOUT = ("--servers", "3", "--trainers", "2", "--spares", "2", "-k", "2", "-m", "1")
KILLS = ((1, "parity"), (3, "update"), (2, "update"))
"""Rank and phase of the kills. Ranks 0 to 2 are servers, 3 and 4 trainers."""
SEEDS = (0, 1, 2)


def data_of(recipe: Recipe, scratch: Path) -> Path | None:
    """The data for a recipe's scripts; None if the data are not on this machine, with a line.

    Criteo rows are prepared in the folder `scratch`, once.
    """
    if not recipe.data.exists():
        print(
            f"{recipe.title}: left out, there is no {recipe.data}; "
            "docs/benchmarks/accuracy.md says where the data come from"
        )
        return None
    if not recipe.criteo:
        return recipe.data
    prepared = scratch / "criteo"
    if not prepared.exists():
        measure.ecrm("prepare", "criteo", str(recipe.data), "--output", str(prepared))
    return prepared


def values_of(recipe: Recipe, text: str) -> dict[str, float]:
    """The metrics printed by a script. Ends the program if one is missing."""
    found = dict(re.findall(r"^([\w@ ]+): ([\d.]+)$", text, re.MULTILINE))
    if missing := [metric for metric in recipe.metrics if metric not in found]:
        sys.exit(f"{recipe.title}: no {missing[0]} was printed:\n{text}")
    return {metric: float(found[metric]) for metric in recipe.metrics}


def trained(
    recipe: Recipe, contender: str, seed: int, data: Path, folder: Path
) -> tuple[dict[str, float], str]:
    """Train once: the metrics, and the SHA-256 of the model, empty without ranks."""
    own = [str(data), *recipe.words, recipe.seed_option, str(seed)]
    if contender == PLAIN:
        words = [sys.executable, str(EXAMPLES / recipe.plain), *own]
        return values_of(recipe, measure.printed(recipe.plain, words, OMP_NUM_THREADS="1")), ""
    kills = KILLS if contender in (KILLED, ROUNDED_KILLED) else ()
    if contender in (ROUNDED, ROUNDED_KILLED):
        own += ["--wire-dtype", "bfloat16"]
    if contender == ROUNDED:
        words = [sys.executable, str(EXAMPLES / recipe.script), *own]
        return values_of(recipe, measure.printed(recipe.script, words, OMP_NUM_THREADS="1")), ""
    words = ["launch", str(EXAMPLES / recipe.script), *LAYOUT, "--run-dir", str(folder)]
    for number, (rank, phase) in enumerate(kills, 1):
        words += ["--kill", f"{rank}@{number * recipe.steps // 5}:{phase}"]
    if contender == ROUNDED_KILLED:
        words += ["--set", "cluster.placement=tables"]
    said = measure.ecrm(*words, "--", *own)
    summary = json.loads((folder / "summary.json").read_text())
    dead = sorted(rank for failure in summary["failures"] for rank in failure["ranks"])
    if dead != sorted(rank for rank, _ in kills):
        sys.exit(f"{recipe.title}: ranks {dead} died, and not the ranks of {kills}")
    return values_of(recipe, said), summary["model_sha256"]


def check_equal(
    recipe: Recipe, seed: int, results: Mapping[str, tuple[Mapping[str, float], str]]
) -> None:
    """End the program if a kill has changed the model or a metric.

    Of a training without ranks the metrics alone are compared, with all digits printed.
    """
    for one, other in ((CALM, KILLED), (ROUNDED, ROUNDED_KILLED)):
        if one not in results or other not in results:
            continue
        calm, killed = results[one], results[other]
        if calm[0] != killed[0] or (calm[1] and calm[1] != killed[1]):
            sys.exit(
                f"{recipe.title}, seed {seed}: {one} gave {calm}, and {other} {killed}: "
                "the models must be equal to the bit"
            )


def place(row: Row) -> tuple[int, str, int]:
    """The place of a row in the CSV: by recipe, seed and contender."""
    recipe, contender = list(RECIPES).index(row["recipe"]), CONTENDERS.index(row["contender"])
    return recipe, row["seed"], contender


def main(words: Sequence[str] | None = None) -> None:
    """Train all recipes, write the CSV, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="default: all")
    parser.add_argument("--seed", type=int, choices=SEEDS, action="append", help="default: all")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="default: all")
    parser.add_argument("--criteo", type=Path, help="the file of 10,000 Criteo rows")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--output", type=Path, help="the CSV; default: results/accuracy.csv")
    arguments = parser.parse_args(words)
    target = measure.target("accuracy.csv", arguments.output, arguments.smoke)
    names = arguments.recipe or list(RECIPES)
    seeds = arguments.seed or (SEEDS[:1] if arguments.smoke else SEEDS)
    rows = list(tables.read_rows(target) or ())
    about = {**measure.device(), "torchrec": version("torchrec")}
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            recipe = RECIPES[name]
            if recipe.criteo and arguments.criteo:
                recipe = replace(recipe, data=arguments.criteo)
            if arguments.smoke:
                recipe = replace(recipe, words=recipe.smoke, steps=recipe.smoke_steps)
            data = data_of(recipe, Path(scratch))
            for seed in seeds if data else ():
                results = {}
                for number, contender in enumerate(CONTENDERS if recipe.rounds else CONTENDERS[:3]):
                    if contender not in (arguments.contender or CONTENDERS):
                        continue
                    folder = Path(scratch) / f"{name}-{seed}-{number}"
                    results[contender] = trained(recipe, contender, seed, data, folder)
                    print(f"{recipe.title}, seed {seed}, {contender}: {results[contender][0]}")
                check_equal(recipe, seed, results)
                rows = [
                    row
                    for row in rows
                    if (row["recipe"], row["seed"]) != (name, str(seed))
                    or row["contender"] not in results
                ]
                rows += [
                    {
                        "recipe": name,
                        "contender": contender,
                        "seed": str(seed),
                        "metric": metric,
                        "value": f"{value:.6f}",
                        "model_sha256": model,
                        "killed_ranks": len(KILLS) if contender in (KILLED, ROUNDED_KILLED) else 0,
                        **about,
                    }
                    for contender, (values, model) in results.items()
                    for metric, value in values.items()
                ]
                rows.sort(key=place)
                measure.write_csv(target, rows)
    if rows:
        print("\n".join(accuracy(rows)))
        print(f"written to {target}")


if __name__ == "__main__":
    main()
