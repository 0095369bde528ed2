"""Published numbers beside own trainings: the table, the printed metrics, and unequal models."""

import subprocess
import sys

import pytest

from support.benchmarking import program
from support.paths import ROOT


@pytest.fixture(scope="module")
def lib():
    return program("lib.accuracy")


def row(contender, seed, value, model=""):
    return {
        "recipe": "svd",
        "contender": contender,
        "seed": seed,
        "metric": "RMSE",
        "value": value,
        "model_sha256": model,
    }


def test_the_table_has_the_mean_the_spread_and_the_equal_models(lib):
    rows = []
    for seed, value in enumerate(("0.94", "0.95", "0.93")):
        rows.append(row(lib.PLAIN, seed, value))
        rows.append(row(lib.CALM, seed, "0.941", f"model {seed}"))
        rows.append(row(lib.KILLED, seed, "0.941", f"model {min(seed, 1)}"))
    line = lib.accuracy(rows)[-1]
    assert line.startswith(
        "| SVD with biases, MovieLens-100k | RMSE | [0.9440](https://github.com/"
    )
    assert "| 0.9400 (0.9300 to 0.9500) | 0.9410 (0.9410 to 0.9410) |" in line
    assert line.endswith("| equal to the bit, 2 of 3 |")


def test_a_changed_model_or_metric_ends_the_benchmark(lib):
    bench, recipe = program("bench_accuracy"), lib.RECIPES["svd"]
    calm = ({"RMSE": 0.94}, "aa")
    bench.check_equal(recipe, 0, calm, ({"RMSE": 0.94}, "aa"))
    for killed in (({"RMSE": 0.94}, "ab"), ({"RMSE": 0.95}, "aa")):
        with pytest.raises(SystemExit, match="seed 0: .*the models must be equal to the bit"):
            bench.check_equal(recipe, 0, calm, killed)


def test_a_metric_that_a_script_does_not_print_ends_the_benchmark(lib):
    bench, recipe = program("bench_accuracy"), lib.RECIPES["svd"]
    assert bench.values_of(recipe, "step 1/2  loss 0.5\nRMSE: 0.9403\n") == {"RMSE": 0.9403}
    with pytest.raises(SystemExit, match="no RMSE was printed"):
        bench.values_of(recipe, "step 1/2  loss 0.5\n")


def test_every_recipe_has_its_two_scripts(lib):
    for recipe in lib.RECIPES.values():
        assert (ROOT / "examples" / recipe.script).is_file()
        plain = (ROOT / "examples" / recipe.plain).read_text()
        assert "import ecrm" not in plain, "plain torch trains without ECRM"


def test_the_folds_of_movielens_are_thirds_and_disjoint(lib):
    if not lib.MOVIELENS.exists():
        pytest.skip(f"{lib.MOVIELENS} is missing: make venv puts the file there")
    code = (
        "import movielens, numpy as np\n"
        f"parts = [movielens.fold({str(lib.MOVIELENS)!r}, number) for number in range(3)]\n"
        "assert sorted(len(held) for _, held in parts) == [33_333, 33_333, 33_334]\n"
        "assert all(len(train) + len(held) == 100_000 for train, held in parts)\n"
        "held = np.concatenate([held for _, held in parts])\n"
        "assert len(np.unique(held[:, :2], axis=0)) == 100_000\n"
        "assert held[:, 0].max() == movielens.USERS - 1 and held[:, 1].max() == 1681\n"
        "assert held.min(0)[:3].tolist() == [0, 0, 1]\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "examples", check=True, timeout=60)
