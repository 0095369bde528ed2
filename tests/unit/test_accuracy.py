"""Published numbers beside own trainings: the table, the printed metrics, and unequal models."""

import csv
import importlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.benchmarking import BENCHMARKS, program
from support.examples import EXAMPLES


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
    _, _, line, *others = lib.accuracy(rows)
    assert line.startswith(
        "| SVD with biases, MovieLens-100k | RMSE | [0.9440](https://github.com/"
    )
    assert "| 0.9400 (0.9300 to 0.9500) | 0.9410 (0.9410 to 0.9410) |" in line
    assert line.endswith("| - | equal to the bit, 2 of 3 |")
    rows += [row(lib.ROUNDED, seed, "0.942", "model") for seed in range(3)]
    found = lib.accuracy(rows)[2]
    assert found.endswith("| 0.9420 (0.9420 to 0.9420) | equal to the bit, 2 of 3 |")
    assert len(others) == sum(len(recipe.metrics) for recipe in lib.RECIPES.values()) - 1
    assert others[0] == (
        "| HSTU, small, MovieLens-100k | HR@10 | - | not measured yet | - | - | - | - |"
    )
    assert all("), on all data | not measured yet |" in other for other in others[2:6])
    unpublished = [other for other in others[6:] if " | - | not measured yet |" in other]
    assert len(unpublished) == 3 and "| [0.80275](https://github.com/mlcommons/" in others[8]


def test_a_changed_model_or_metric_ends_the_benchmark(lib):
    bench, recipe = program("bench_accuracy"), lib.RECIPES["svd"]
    calm = ({"RMSE": 0.94}, "aa")
    bench.check_equal(recipe, 0, {lib.CALM: calm, lib.KILLED: ({"RMSE": 0.94}, "aa")})
    for killed in (({"RMSE": 0.94}, "ab"), ({"RMSE": 0.95}, "aa")):
        with pytest.raises(SystemExit, match="seed 0: .*the models must be equal to the bit"):
            bench.check_equal(recipe, 0, {lib.CALM: calm, lib.KILLED: killed})
        with pytest.raises(SystemExit, match="ECRM, bfloat16 gave .*equal to the bit"):
            bench.check_equal(recipe, 0, {lib.ROUNDED: calm, lib.ROUNDED_KILLED: killed})
    alone = ({"RMSE": 0.94}, "")  # without ranks no digest is printed
    bench.check_equal(recipe, 0, {lib.ROUNDED: alone, lib.ROUNDED_KILLED: calm})
    bench.check_equal(recipe, 0, {lib.ROUNDED: alone})


def test_a_metric_that_a_script_does_not_print_ends_the_benchmark(lib):
    bench, recipe = program("bench_accuracy"), lib.RECIPES["svd"]
    assert bench.values_of(recipe, "step 1/2  loss 0.5\nRMSE: 0.9403\n") == {"RMSE": 0.9403}
    with pytest.raises(SystemExit, match="no RMSE was printed"):
        bench.values_of(recipe, "step 1/2  loss 0.5\n")


def test_a_recipe_without_data_is_left_out_with_a_line(lib, tmp_path, capsys):
    bench = program("bench_accuracy")
    recipe = replace(lib.RECIPES["svd"], data=tmp_path / "ratings")
    assert bench.data_of(recipe, tmp_path) is None
    said = capsys.readouterr().out
    assert said.startswith(f"{recipe.title}: left out, there is no {tmp_path / 'ratings'}; docs/")
    recipe.data.touch()
    assert bench.data_of(recipe, tmp_path) == recipe.data


def test_every_recipe_has_its_two_scripts(lib):
    for recipe in lib.RECIPES.values():
        assert (EXAMPLES / recipe.script).is_file()
        plain = (EXAMPLES / recipe.plain).read_text()
        assert "import ecrm" not in plain, "plain torch trains without ECRM"


def test_committed_numbers_have_three_seeds_and_equal_models(lib):
    with (BENCHMARKS / "results" / "accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {}
    for each in rows:
        key = each["recipe"], each["metric"], each["contender"]
        found.setdefault(key, {})[each["seed"]] = each
    recipes = {recipe for recipe, _, _ in found}
    assert recipes == set(lib.RECIPES)
    for (recipe, metric, contender), seeds in found.items():
        assert set(seeds) == {"0", "1", "2"}
        killed = found[recipe, metric, lib.KILLED]
        if contender == lib.CALM:
            assert all(seeds[seed]["model_sha256"] for seed in seeds)
            for field in ("value", "model_sha256"):
                assert [seeds[seed][field] for seed in seeds] == [
                    killed[seed][field] for seed in seeds
                ]


@pytest.fixture
def example(monkeypatch):
    """Imports a module of `examples/` that only has definitions."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
def movielens(lib):
    if not lib.MOVIELENS.exists():
        pytest.skip(f"{lib.MOVIELENS} is missing: make venv puts the file there")
    return str(lib.MOVIELENS)


def test_the_folds_of_movielens_are_thirds_and_disjoint(movielens, example):
    module = example("movielens")
    parts = [module.fold(movielens, number) for number in range(3)]
    assert sorted(len(held) for _, held in parts) == [33_333, 33_333, 33_334]
    assert all(len(train) + len(held) == 100_000 for train, held in parts)
    held = np.concatenate([held for _, held in parts])
    assert len(np.unique(held[:, :2], axis=0)) == 100_000
    assert held.max(0)[:3].tolist() == [module.USERS - 1, module.MOVIES - 1, 5]
    assert held.min(0)[:3].tolist() == [0, 0, 1]


def test_the_last_movie_of_every_user_is_held_out(movielens, example):
    hstu, found = example("hstu"), example("movielens").ratings(movielens)
    train, held_out = (hstu.histories(movielens, held) for held in (False, True))
    assert len(train) == len(held_out) == 943
    for user in (0, 500, 942):
        mine = found[found[:, 0] == user]
        last = mine[mine[:, 3] == mine[:, 3].max(), 1]
        assert held_out[user][-1] in last
        assert len(held_out[user]) == min(len(mine), hstu.LENGTH + 1)
        assert train[user][-1] == held_out[user][-2]


@pytest.mark.parametrize(
    "name, dense, total", [("dlrm", 801_211, 21_664_241), ("dcnv2", 1_154_991, 22_018_021)]
)
def test_the_models_of_bars_have_the_published_number_of_parameters(example, name, dense, total):
    """The totals are of the logs of BARS, which have equal rows for both models."""
    bars, rows = example("bars"), 2_086_303
    data = SimpleNamespace(tables=[(f"t_{n}", rows // 26 + (n < rows % 26)) for n in range(26)])
    model = bars.MODELS[name](bars.bags_of(data, "meta"))
    in_tables = sum(each.numel() for each in model.bags.parameters())
    assert in_tables == rows * bars.DIM
    assert (
        sum(each.numel() for each in model.parameters()) - in_tables == dense == total - in_tables
    )


MLPERF_ROWS = [40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000]
MLPERF_ROWS += [3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976, 14]
MLPERF_ROWS += [*(40_000_000,) * 3, 590_152, 12_973, 108, 36]


@pytest.mark.parametrize(("name", "dense", "width"), [("kaggle", 475_985, 16), ("mlperf", 0, 128)])
def test_the_references_have_the_published_layers(example, name, dense, width):
    """Worked out by hand: 13-512-256-64-16 and 367-512-256-1, or 3 crosses of rank 512."""
    references = example("references")
    data = SimpleNamespace(tables=[(f"t_{n}", rows) for n, rows in enumerate(MLPERF_ROWS)])
    model = references.model_of(name, data, 1, "meta")
    tables = list(model.sparse_arch.parameters())
    assert sum(each.numel() for each in tables) == sum(MLPERF_ROWS) * width
    inputs = 27 * 128
    layers = ((13, 512), (512, 256), (256, 128), (inputs, 1024), (1024, 1024), (1024, 512))
    by_hand = sum((m + 1) * n for m, n in (*layers, (512, 256), (256, 1)))
    by_hand += 3 * (2 * inputs * 512 + inputs)
    total = sum(each.numel() for each in model.parameters())
    assert total - sum(MLPERF_ROWS) * width == (dense or by_hand)


def test_a_bag_of_many_ids_is_a_function_of_its_id(example):
    references = example("references")
    random = torch.Generator().manual_seed(3)
    rows = [min(count, 1_000_000) for count in MLPERF_ROWS]
    ids = (torch.rand(500, 26, generator=random) * torch.tensor(rows)).long()
    values, lengths = references.bags_of_ids(ids, rows, references.MULTI_HOT)
    assert lengths.view(26, 500).tolist() == [[size] * 500 for size in references.MULTI_HOT]
    assert sum(references.MULTI_HOT) == 214 and len(values) == 214 * 500
    again, _ = references.bags_of_ids(ids.flip(0), rows, references.MULTI_HOT)
    first = 0
    for feature, size in enumerate(references.MULTI_HOT):
        bags, same = (
            found[first : first + 500 * size].view(500, size) for found in (values, again)
        )
        assert torch.equal(bags[:, 0], ids[:, feature]) and torch.equal(same.flip(0), bags)
        assert bags.min() >= 0 and bags.max() < rows[feature]
        first += 500 * size
    large = values[: 3 * 500].view(500, 3)
    assert len(large[:, 1:].unique()) > 990, "further ids are spread over the table"
    assert abs(large[:, 1:].double().mean() / rows[0] - 0.5) < 0.05
    one, _ = references.bags_of_ids(ids, rows, references.ONE_HOT)
    assert torch.equal(one.view(26, 500), ids.T)


def test_a_place_of_a_history_sees_no_later_movie(example):
    hstu = example("hstu")
    torch.manual_seed(0)
    model = hstu.Hstu("cpu")
    first, second = np.array([3, 1, 4, 1, 5]), np.array([3, 1, 4, 9, 2])
    scores = [model(hstu.collate([movies, first])[0])[0] for movies in (first, second)]
    assert torch.equal(scores[0][:3], scores[1][:3])
    assert not torch.equal(scores[0][3], scores[1][3])


def test_the_rank_is_the_number_of_movies_with_a_higher_score(example):
    hstu = example("hstu")
    _, targets = hstu.collate([np.array([0, 2, 4]), np.array([7, 5])])
    assert targets.tolist() == [[2, 4], [5, hstu.NO_TARGET]]
    logits = torch.zeros(2, 2, 10)
    logits[0, 1, [1, 3, 4]] = torch.tensor([3.0, 2.0, 1.0])
    logits[1, 0, 5] = 1.0
    assert hstu.ranks(logits, targets).tolist() == [2.0, 0.0]
