"""Drills under real mpirun with real SIGKILL: the finished model is the undisturbed one, bit for bit.

The model depends on data, seed and slots alone, so one undisturbed run is the yardstick of them all.
Those marked `drill` run in `make drill`; the others, which put several kills into one run, also in `make test`.
"""

from __future__ import annotations

import json
import re

import pytest
from drilling import drill, is_running, launch

PHASES = ("input", "lookup", "forward", "backward", "update", "parity", "dense", "commit")
BASE = {"train.steps": 40, "train.slots": 2, "model.dense_arch": "native"}


@pytest.fixture(scope="session")
def undisturbed_run(tmp_path_factory, criteo_rows):
    """The run in which nothing failed, with TorchRec's dense parts where it is installed."""
    sets = {**BASE, "model.dense_arch": "auto"}
    return drill(tmp_path_factory.mktemp("undisturbed") / "run", criteo_rows, sets)


@pytest.fixture(scope="session")
def undisturbed(undisturbed_run):
    """Hash of the run in which nothing failed."""
    return undisturbed_run.model


def _scores(run):
    return [run.summary[name] for name in ("eval_auc", "eval_auc_error", "eval_logloss", "eval_samples")]


def _kill_one_by_one(ranks, phases, first, apart):
    return tuple(f"{rank}@{first + apart * i}:{phase}" for i, (rank, phase) in enumerate(zip(ranks, phases, strict=True)))


@pytest.mark.parametrize("interval", [pytest.param(1, marks=pytest.mark.drill), 8])
def test_servers_killed_in_every_phase_with_spares(tmp_path, criteo_rows, undisturbed, interval):
    """Eight servers die, one in each phase, each after the one before was rebuilt; the heir dies like the first owner."""
    sets = {**BASE, "cluster.servers": 3, "cluster.spares": 8, "protection.commit_interval": interval}
    sets["protection.rebuild_rows_per_step"] = 100_000
    kills = _kill_one_by_one((0, 1, 2, 5, 6, 7, 8, 9), PHASES, first=3, apart=4)
    run = drill(tmp_path / "run", criteo_rows, sets, kills)
    assert run.model == undisturbed
    assert all(failure["redone_steps"] <= interval for failure in run.summary["failures"])
    assert run.summary["failures_left"] == 1


@pytest.mark.parametrize("interval", [1, pytest.param(8, marks=pytest.mark.drill)])
def test_trainers_killed_in_every_phase_with_spares(tmp_path, criteo_rows, undisturbed, interval):
    sets = {**BASE, "cluster.servers": 3, "cluster.spares": 8, "protection.commit_interval": interval}
    kills = _kill_one_by_one((3, 4, 5, 6, 7, 8, 9, 10), PHASES, first=3, apart=4)
    run = drill(tmp_path / "run", criteo_rows, sets, kills)
    assert run.model == undisturbed
    assert [failure["shards"] for failure in run.summary["failures"]] == [[]] * 8


def test_without_spares_survivors_adopt(tmp_path, criteo_rows, undisturbed):
    """A server, then a trainer, then another server: six servers (2,1) on eight ranks keep stripes apart throughout."""
    sets = {**BASE, "cluster.servers": 6, "cluster.spares": 0, "protection.commit_interval": 8}
    sets["protection.rebuild_rows_per_step"] = 100_000
    run = drill(tmp_path / "run", criteo_rows, sets, ("1@5:parity", "7@13:dense", "2@21:update"))
    assert run.model == undisturbed


def test_two_at_once_then_two_more_after_rebuilding(tmp_path, criteo_rows, undisturbed):
    sets = {**BASE, "cluster.servers": 4, "cluster.spares": 4, "protection.k": 2, "protection.m": 2}
    sets["protection.rebuild_rows_per_step"] = 100_000
    run = drill(tmp_path / "run", criteo_rows, sets, ("0@5:parity", "2@5:parity", "1@20:update", "6@20:lookup"))
    assert run.model == undisturbed
    assert len(run.summary["failures"]) >= 2
    assert run.summary["failures_left"] == 2


def test_second_kill_while_the_first_is_rebuilt(tmp_path, criteo_rows, undisturbed):
    """With 16 rows a step the first shard is far from whole when the second goes; both heirs die in recovery's aftermath."""
    sets = {**BASE, "cluster.servers": 5, "cluster.spares": 2, "protection.k": 3, "protection.m": 2}
    sets["protection.rebuild_rows_per_step"] = 16
    run = drill(tmp_path / "run", criteo_rows, sets, ("1@6:dense", "3@8:repair"))
    assert run.model == undisturbed
    assert all(failure["on_demand_rows"] > 0 for failure in run.summary["failures"])


def test_kill_inside_recovery_and_at_the_end(tmp_path, criteo_rows, undisturbed_run):
    """With a trainer dead in the evaluation, another rank runs its slot, and the evaluation comes out the same."""
    sets = {**BASE, "cluster.servers": 4, "cluster.spares": 3, "protection.k": 2, "protection.m": 2}
    sets["protection.rebuild_rows_per_step"] = 100_000
    run = drill(tmp_path / "run", criteo_rows, sets, ("0@9:parity", "2@9:recover", "4@40:evaluate", "3@40:finish"))
    assert run.model == undisturbed_run.model
    assert _scores(run) == _scores(undisturbed_run) and run.summary["eval_samples"] == 1200


def test_without_undo_the_model_is_wrong(tmp_path, criteo_rows, undisturbed):
    """The drills can fail: the same kill with the undo step switched off gives another model."""
    sets = {**BASE, "cluster.servers": 3, "testing.skip_undo": True}
    run = launch(tmp_path / "run", criteo_rows, sets, ("1@9:dense",))
    assert run.code == 0, run.output
    assert run.model != undisturbed


@pytest.mark.parametrize("layout", ["dedicated", pytest.param("colocated", marks=pytest.mark.drill)])
def test_more_than_m_at_once_ends_cleanly(tmp_path, criteo_rows, layout):
    sets = {**BASE, "cluster.servers": 3, "cluster.spares": 1, "cluster.layout": layout, "train.steps": 2000}
    run = launch(tmp_path / "run", criteo_rows, sets, ("0@9:parity", "2@9:parity"))
    assert run.code == 3, run.output
    assert re.search(r"ecrm: error: ranks? .*2 died: more was lost than erasure k=2 m=1 can bring back", run.output)
    assert "Traceback" not in run.output
    assert not (run.folder / "summary.json").exists()
    ranks = json.loads((run.folder / "ranks.json").read_text())["ranks"]
    assert [rank["pid"] for rank in ranks if is_running(rank["pid"])] == []


def test_no_rank_holds_more_than_its_shard_and_parity(tmp_path, criteo_rows):
    """data x (1 + m/k) by rank, and a start that does not grow with tables that are mostly never touched."""
    sets = {**BASE, "cluster.servers": 4, "protection.k": 2, "protection.m": 2, "train.steps": 5}
    small = drill(tmp_path / "small", criteo_rows, sets)
    large = drill(tmp_path / "large", criteo_rows, {**sets, "model.max_rows_per_table": 100_000})
    for run in (small, large):
        held = run.summary["memory_bytes_per_rank"]
        assert [rank["shards"] for rank in held] == [1, 1, 1, 1, 0, 0, 0]
        shard = run.summary["memory_bytes"]["data"] / 4
        for rank in held:
            assert rank["data"] == rank["shards"] * shard
            assert rank["parity"] == rank["data"] * 2 / 2
            assert rank["dense"] == 0 or not rank["shards"] or rank["rank"] == 0
    grown = large.summary["memory_bytes"]["data"] / small.summary["memory_bytes"]["data"]
    assert grown > 20
    assert large.summary["memory_bytes"]["undo"] < 1.5 * small.summary["memory_bytes"]["undo"]
    assert large.summary["set_up_seconds"] < 5 * small.summary["set_up_seconds"] + 0.5


def test_protection_none_ends_at_a_failure(tmp_path, criteo_rows):
    run = launch(tmp_path / "run", criteo_rows, {**BASE, "protection.name": "none"}, ("1@9:update",))
    assert run.code == 3, run.output
    assert "rank 1 died: protection none cannot bring anything back" in run.output


SHAPES = [
    ("dedicated", 3, 2, 1, "erasure"),
    ("dedicated", 4, 3, 1, "erasure"),
    ("dedicated", 6, 4, 1, "erasure"),
    ("dedicated", 4, 2, 2, "erasure"),
    ("dedicated", 6, 4, 2, "erasure"),
    ("colocated", 3, 2, 1, "erasure"),
    ("colocated", 6, 4, 2, "erasure"),
    ("dedicated", 4, 3, 1, "none"),
    ("colocated", 6, 3, 1, "none"),
]


@pytest.mark.drill
@pytest.mark.parametrize(("layout", "servers", "k", "m", "protection"), SHAPES)
def test_the_model_does_not_depend_on_the_cluster(
    tmp_path, criteo_rows, undisturbed, layout, servers, k, m, protection
):
    sets = {
        **BASE,
        "cluster.layout": layout,
        "cluster.servers": servers,
        "protection.name": protection,
        "protection.k": k,
        "protection.m": m,
    }
    assert drill(tmp_path / "run", criteo_rows, sets).model == undisturbed
    if protection != "none":
        kills = ("1@11:parity", "2@11:dense")[:m]
        assert drill(tmp_path / "killed", criteo_rows, sets, kills).model == undisturbed


@pytest.mark.drill
@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("interval", [1, 8])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", ["server", "trainer"])
def test_one_killed_in_each_phase(tmp_path, criteo_rows, undisturbed, role, phase, interval, spares):
    sets = {**BASE, "cluster.servers": 3, "cluster.spares": spares, "protection.commit_interval": interval}
    kill = f"{1 if role == 'server' else 3}@13:{phase}"
    assert drill(tmp_path / "run", criteo_rows, sets, (kill,)).model == undisturbed


@pytest.mark.drill
@pytest.mark.parametrize("spares", [0, 4])
@pytest.mark.parametrize("interval", [1, 8])
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(("0@13:parity", "3@13:parity"), id="two at once"),
        pytest.param(("0@13:update", "7@13:dense"), id="server and trainer"),
        pytest.param(("0@13:dense", "3@15:repair"), id="while rebuilding"),
        pytest.param(("0@13:dense", "3@13:recover"), id="while recovering"),
        pytest.param(("0@5:parity", "1@5:parity", "3@25:dense", "4@25:dense"), id="m more after rebuilding"),
    ],
)
def test_two_of_six_servers(tmp_path, criteo_rows, undisturbed, kills, interval, spares):
    """(2,2) on six servers: without spares, trainers and servers further on adopt, and stripes stay apart."""
    sets = {
        **BASE,
        "cluster.servers": 6,
        "cluster.spares": spares,
        "protection.k": 2,
        "protection.m": 2,
        "protection.commit_interval": interval,
        "protection.rebuild_rows_per_step": 16 if "repair" in kills[-1] else 100_000,
    }
    assert drill(tmp_path / "run", criteo_rows, sets, kills).model == undisturbed
