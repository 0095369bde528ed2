"""`ecrm plan`: its model beside committed measurements, and its advice."""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ecrm.cli.commands import main
from ecrm.config import load_config, make_config
from ecrm.config.script import Script
from ecrm.launch.memory_needs import (
    DENSE_COPIES,
    LIBRARIES_BYTES,
    PROCESS_BYTES,
    Needs,
    RowLoad,
    of_server,
)
from ecrm.launch.overhead import (
    MEASURED,
    ClusterModel,
    Overhead,
    fatal_choices,
    of_checkpoints,
    seconds_to_loss,
    seconds_to_stripe_loss,
)
from ecrm.launch.sizing import (
    SAFE_SECONDS,
    Candidate,
    Model,
    Planned,
    candidate,
    candidates,
    in_words,
    of_config,
    of_script,
    rebuild_seconds,
)
from ecrm.launch.sizing import recommended as recommend
from ecrm.placement.stripes import StripeShape
from ecrm.process.ready import WORKING_BYTES, WORKING_BYTES_TO_SHARE
from ecrm.run.surveyed import Survey
from support.benchmarking import BENCHMARKS, program, read
from support.commands import assert_one_line, ecrm

GIVEN = Planned(
    servers=5, memory_bytes=4e9, network_bytes=1.25e9, mtbf_seconds=3.6e6, step_seconds=0.1
)
RECORDS = {"dense-heavy": 4 * (64 + 2), "embedding-heavy": 4 * (128 + 2), "criteo": 4 * (16 + 2)}
"""Bytes of a row with row-wise Adagrad of the measured models."""
MODEL = program("loss_model")
UNITS = {"erasure-k2": 2, "erasure-k4": 4}


@pytest.fixture(scope="module")
def rows():
    return read(BENCHMARKS / "results" / "protections.csv")


@pytest.fixture(scope="module")
def sizes():
    found = read(BENCHMARKS / "results" / "protections_bytes.csv")
    return {(row["regime"], row["contender"]): row for row in found}


def median(rows, regime, contender, field):
    return median_of(
        [row for row in rows if (row["regime"], row["contender"]) == (regime, contender)], field
    )


def median_of(rows, field):
    return statistics.median(float(row[field]) for row in rows)


def test_the_measured_inputs_are_those_of_the_committed_measurements(rows):
    of = program("overhead_model").measured_of
    for regime, mine in MEASURED.items():
        measured = of(rows, regime)
        for name, value in vars(mine).items():
            assert value == pytest.approx(getattr(measured, name), rel=1e-4), (regime, name)


SERVERS, IDS = 5, 26
SAMPLES = {"dense-heavy": 1280, "embedding-heavy": 10240, "criteo": 320}
"""Samples in a step of the measured models, each with IDS ids."""


def measured_model(sizes, regime: str) -> Model:
    """A measured model; the padded shards of `none` have all of its rows."""
    rows = int(sizes[regime, "none"]["rows_bytes"]) // RECORDS[regime]
    load = RowLoad(rows, RECORDS[regime], IDS * SAMPLES[regime])
    return Model(lambda own: Script(Path("train.py")).load_config(own), lambda config: [load])


@pytest.mark.parametrize("regime", MEASURED)
@pytest.mark.parametrize("contender", UNITS)
def test_measured_parity_has_the_bytes_of_the_model(sizes, regime, contender):
    """A step of these models updates a third of the ids that it looks up."""
    row, none = sizes[regime, contender], sizes[regime, "none"]
    model, k = measured_model(sizes, regime), UNITS[contender]
    config = model.config(GIVEN.settings(k, 1))
    server = of_server(model.loads(config)[0], config)
    assert SERVERS * server.rows == pytest.approx(float(row["rows_bytes"]), rel=0.001)
    assert SERVERS * server.parity == pytest.approx(float(row["redundancy_bytes"]), rel=0.001)
    updated = float(row["undo_bytes"]) / (SERVERS * server.undo)
    sent = float(row["sent_bytes_per_step"]) - float(none["sent_bytes_per_step"])
    assert 0.28 < updated < 0.38
    assert sent / (SERVERS * candidate(model, GIVEN, k, 1).traffic) == pytest.approx(
        updated, rel=0.1
    )


@pytest.mark.parametrize("regime", MEASURED)
@pytest.mark.parametrize("contender", UNITS)
def test_measured_memory_is_that_of_the_model(sizes, regime, contender):
    """The page on sizing has all parts: also the ready spare, and the buffers of a step."""
    model, k = measured_model(sizes, regime), UNITS[contender]
    config = model.config(GIVEN.settings(k, 1))
    server = of_server(model.loads(config)[0], config)
    planned = 6 * PROCESS_BYTES + LIBRARIES_BYTES
    planned += (SERVERS + 1) * (server.rows + server.parity)
    planned += WORKING_BYTES + WORKING_BYTES_TO_SHARE
    planned += int(sizes[regime, contender]["undo_bytes"])
    planned += SERVERS * 4 * DENSE[regime] * DENSE_COPIES["adagrad"]
    planned += BUFFERS * IDS * SAMPLES[regime] * (RECORDS[regime] - 8)
    peak = float(sizes[regime, contender]["peak_bytes"])
    assert planned < peak < 1.25 * planned


DENSE = {"dense-heavy": 762_177, "embedding-heavy": 32_577, "criteo": 29_169}
"""Dense parameters of the measured models; each server trains, too."""
BUFFERS = 3
"""Buffers of a step on all ranks, as a multiple of the values looked up."""

CHECKPOINTS = {"checkpoint-30-sync": 0.12, "checkpoint-60-sync": 0.12}
"""Checkpoints during which training waits, with the tolerance for their steady cost."""


def of_the_measured(rows, regime: str, contender: str) -> tuple[Overhead, float]:
    """The model of measured checkpoints, and the overhead that was measured."""
    waits = median(rows, regime, contender, "checkpoint_wait_ms") / 1e3
    every = median(rows, regime, contender, "checkpoint_every_steps")
    size = median(rows, regime, "none", "rows_bytes")
    cluster = ClusterModel(size, SERVERS, 1e9, size / SERVERS / waits)
    interval = every * median(rows, regime, "none", "step_ms") / 1e3
    model = of_checkpoints(cluster, interval, MEASURED[regime])
    return model, median(rows, regime, contender, "overhead")


@pytest.mark.parametrize("regime", MEASURED)
@pytest.mark.parametrize(("contender", "tolerance"), CHECKPOINTS.items())
def test_the_cost_of_checkpoints_is_as_measured(rows, regime, contender, tolerance):
    model, overhead = of_the_measured(rows, regime, contender)
    assert model.normal == pytest.approx(overhead, rel=tolerance)


@pytest.mark.parametrize("regime", RECORDS)
@pytest.mark.parametrize("contender", CHECKPOINTS)
def test_a_failure_costs_a_run_with_checkpoints_as_long_as_measured(rows, regime, contender):
    """Checkpoints of 2 MB cost 0.07 s more than the model says, until the ranks have met again."""
    model, _ = of_the_measured(rows, regime, contender)
    lost = median(rows, regime, contender, "lost_ms") / 1e3
    assert model.lost == pytest.approx(lost, rel=0.15, abs=0.08)


def test_a_checkpoint_has_the_measured_bytes_and_seconds():
    """The model takes rows and state; a checkpoint has 8 bytes more for each row."""
    alone = [
        row for row in read(BENCHMARKS / "results" / "checkpoint.csv") if row["mode"] == "sync"
    ]
    for row in alone:
        assert int(row["bytes"]) == pytest.approx(int(row["rows"]) * (264 + 8), rel=1e-5)
    beside = read(BENCHMARKS / "results" / "checkpoint_runs.csv")
    for regime in ("dense-heavy", "embedding-heavy"):
        mine = [r for r in beside if (r["regime"], r["mode"]) == (regime, "sync")]
        model = ClusterModel(
            int(mine[0]["rows"]) * RECORDS[regime],
            1,
            1,
            1e6 * median_of(mine, "disk_mb_per_second"),
        )
        assert 0.95 < median_of(mine, "durable_seconds") / model.checkpoint_seconds < 1.2


@pytest.mark.parametrize("regime", ["dense-heavy", "embedding-heavy"])
@pytest.mark.parametrize("contender", UNITS)
def test_rebuilding_takes_as_long_as_measured(rows, regime, contender):
    k, record = UNITS[contender], RECORDS[regime]
    shard = median(rows, regime, contender, "rows_bytes") / 5 * (1 + 1 / k)
    step = median(rows, regime, contender, "step_ms") / 1e3
    given = Planned(5, 1, 1e12, 1, step)
    predicted = rebuild_seconds(shard / record, record, _rebuilding(1), given)
    assert predicted == pytest.approx(median(rows, regime, contender, "whole_after_s"), rel=0.25)


def _rebuilding(share, rows=4096):
    protection = {"rebuild_share": share, "rebuild_rows_per_step": rows}
    return make_config({"data": {"path": "absent"}, "protection": protection}, "test")


def test_a_slow_network_slows_rebuilding():
    fast, slow = (Planned(5, 1, network, 1, 0.1) for network in (1e12, 1e6))
    assert rebuild_seconds(4096, 264, _rebuilding(0.5), fast) == pytest.approx(0.15)
    bytes_ = 4096 * 264
    assert rebuild_seconds(4096, 264, _rebuilding(1), slow) == pytest.approx(bytes_ / 1e6)
    assert rebuild_seconds(4096, 264, _rebuilding(0.1), slow) == pytest.approx(bytes_ / 1e5)


def test_without_a_bound_of_rows_a_step_takes_64_mib():
    given = Planned(5, 1, 1e15, 1, 0.1)
    assert rebuild_seconds((1 << 30) / 256, 256, _rebuilding(1, 0), given) == pytest.approx(1.6)


@pytest.mark.parametrize(("survived", "rebuild"), [(0, 1.0), (1, 20.0), (2, 40.0)])
def test_the_time_to_data_loss_is_that_of_a_simulation(survived, rebuild):
    servers, mtbf, chance = 6, 100.0, random.Random(1)
    times = []
    for _ in range(3000):
        now, lost = 0.0, 0
        while lost <= survived:
            dies, heals = (servers - lost) / mtbf, lost / rebuild
            now += chance.expovariate(dies + heals)
            lost += 1 if chance.random() < dies / (dies + heals) else -1
        times.append(now)
    model = seconds_to_loss(servers, survived, mtbf, rebuild)
    assert model == pytest.approx(statistics.fmean(times), rel=0.06)


@pytest.mark.parametrize(("servers", "k", "m"), [(5, 4, 1), (12, 4, 1), (7, 3, 2), (9, 2, 3)])
def test_the_fatal_choices_of_servers_are_counted(servers, k, m):
    shape = StripeShape(servers, k, m)
    stripes = [set(shape.members(residue)) for residue in range(servers)]
    choices = list(itertools.combinations(range(servers), m + 1))
    fatal = sum(any(set(choice) <= stripe for stripe in stripes) for choice in choices)
    assert fatal_choices(servers, k, m) == fatal


def test_the_committed_loss_model_is_what_the_program_computes():
    rows = [{key: str(value) for key, value in row.items()} for row in MODEL.model_rows()]
    assert rows == read(BENCHMARKS / "results" / "loss_model.csv")
    assert round(MODEL.mtbf_hours(419)) == 6335


def test_the_time_to_data_loss_counts_stripes_as_a_simulation_does():
    """12 servers with stripes of 2 + 1: two lost at once are fatal if fewer than 3 apart."""
    servers, mtbf, rebuild, chance = 12, 100.0, 1.0, random.Random(1)
    times = []
    for _ in range(800):
        now, lost = 0.0, set()
        while True:
            dies, heals = (servers - len(lost)) / mtbf, len(lost) / rebuild
            now += chance.expovariate(dies + heals)
            if chance.random() < heals / (dies + heals):
                lost.remove(chance.choice(sorted(lost)))
                continue
            dead = chance.choice([each for each in range(servers) if each not in lost])
            if any(min((dead - other) % servers, (other - dead) % servers) < 3 for other in lost):
                break
            lost.add(dead)
        times.append(now)
    model = seconds_to_stripe_loss(servers, 2, 1, mtbf, rebuild)
    assert model == pytest.approx(statistics.fmean(times), rel=0.1)


def test_candidates_follow_from_the_config(criteo_rows):
    found = candidates(of_config("tiny", [f"data.path={criteo_rows}"]), GIVEN)
    of = {(each.k, each.m): each for each in found}
    assert set(of) == {(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 2), (1, 3), (2, 3)}
    assert of[1, 1].memory > of[4, 1].memory and of[2, 2].memory > of[2, 1].memory
    assert of[2, 2].traffic == pytest.approx(2 * of[2, 1].traffic, rel=0.01)
    assert of[2, 2].loss_seconds > 100 * of[2, 1].loss_seconds
    assert all(low <= high for low, high in (each.steady for each in found))


def made(k: int, m: int, memory: float, loss: float) -> Candidate:
    return Candidate(k, m, int(memory), 1.0, (0.01, 0.02), 0.0, 1.0, loss)


def test_the_safe_candidate_with_least_memory_is_recommended():
    safe, unsafe = SAFE_SECONDS * 2, SAFE_SECONDS / 2
    found = [made(2, 1, 3e9, safe), made(4, 1, 2e9, safe), made(6, 1, 1e9, unsafe)]
    assert recommend(found, GIVEN).k == 4
    assert recommend([*found[2:], made(6, 2, 3e9, safe)], GIVEN).m == 2
    assert recommend([made(6, 2, 9e9, safe), found[2]], GIVEN) is found[2], "safe, but too large"
    assert recommend([made(6, 2, 9e9, safe)], GIVEN) is None


OPTIONS = ("--servers", "5", "--memory", "4", "--network", "10", "--mtbf", "1000")


def test_the_command_prints_a_table_and_a_recommendation(criteo_rows):
    data = ("--set", f"data.path={criteo_rows}")
    done = ecrm("plan", "tiny", *data, *OPTIONS)
    assert (done.returncode, done.stderr) == (0, "")
    assert "checkpoints in place of parity, best every" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        "recommended: --servers 5 --protection erasure -k "
    )
    assert all(len(line) <= 118 for line in done.stdout.splitlines()[1:10])
    small = ecrm("plan", "tiny", *data, *OPTIONS[:2], "--memory", "0.1", *OPTIONS[4:])
    assert "no stripes fit into 100 MB" in small.stdout and "--memory 1" in small.stdout
    assert "replaces each dead server" in done.stdout and "parity alone" not in done.stdout
    risky = ecrm("plan", "tiny", *data, *OPTIONS[:6], "--mtbf", "0.01")
    assert "less than 10 years" in risky.stdout


def test_a_slow_network_is_told_with_the_recommendation(criteo_rows):
    model = of_config("tiny", [f"data.path={criteo_rows}"])
    traffic = {(each.k, each.m): each.traffic for each in candidates(model, GIVEN)}
    for share, told in ((0.2, None), (0.3, "30%"), (1.5, "150%")):
        network = traffic[4, 1] / GIVEN.step_seconds / share
        line = in_words(model, replace(GIVEN, network_bytes=network))[-1]
        assert " -k 4 -m 1:" in line
        end = f"; parity alone takes up to {told} of a step on this network"
        assert line.endswith(end) if told else "parity alone" not in line


def test_wrong_input_is_refused_in_a_line(criteo_rows, tmp_path):
    data = ("--set", f"data.path={criteo_rows}")
    assert_one_line(ecrm("plan", "absent.py", *OPTIONS), "no script 'absent.py'")
    assert_one_line(ecrm("plan", "tiny", *data, *OPTIONS, "--mtbf", "-3"), "not a number above 0")
    assert_one_line(ecrm("plan", "tiny", *data, *OPTIONS, "--servers", "2.5"), "not a whole")
    assert_one_line(ecrm("plan", "tiny", *data, *OPTIONS, "--servers", "1"), "--servers 4")
    assert_one_line(
        ecrm("plan", "tiny", "--set", "data.path=absent", *OPTIONS), "no such directory"
    )


SCRIPT = """
import sys, torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
import ecrm

print("made by the script")
SLOTS = int(sys.argv[1])

def batch(step, slot):
    if step:
        raise AssertionError("only the first step is drawn")
    ids = torch.arange(slot * 60, slot * 60 + 100)
    return KeyedJaggedTensor(["a", "b"], torch.cat([ids, ids]), lengths=torch.ones(200).long())

tables = [
    EmbeddingBagConfig(num_embeddings=20_000, embedding_dim=dim, name=name, feature_names=[name])
    for name, dim in (("a", 16), ("b", 8))
]
model = torch.nn.ModuleDict({
    "tables": EmbeddingBagCollection(tables, device=torch.device("meta")),
    "dense": torch.nn.Linear(1000, 250),
})
apply_optimizer_in_backward(torch.optim.Adagrad, model["tables"].parameters(), {"lr": 1.0})
session = ecrm.Session(model, slots=SLOTS, dense_optimizer=torch.optim.SGD)
for ids in session.steps(batch, steps=100):
    raise AssertionError("nothing is trained")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def planned(capsys, *words: str) -> tuple[int, list[str], str]:
    """`ecrm plan` in this process, as torch is loaded: exit code, lines, stderr."""
    code = main(["plan", *words])
    told = capsys.readouterr()
    return code, told.out.splitlines(), told.err


def test_a_script_is_planned_from_its_tables_and_its_first_step(script, capsys):
    modules, path = sys.modules["__main__"], [*sys.path]
    code, lines, said = planned(capsys, "train.py", *OPTIONS, "--set", "storage.prefault=true")
    assert code == 8 and "IndexError" in said, "the script's own word is missing"
    code, lines, said = planned(capsys, "train.py", *OPTIONS, "--", "2")
    assert (code, said) == (0, "made by the script\n")
    assert (sys.modules["__main__"], sys.path) == (modules, path)
    assert lines[0] == (
        "train.py: 2 tables of 40,000 rows, and 1.0 MB of other parameters; the first step, of 2 "
        "slots, looks up 320 rows, and stands for all steps"
    )
    rows = 20_000 * 4 * (16 + 16 + 1) + 20_000 * 4 * (8 + 8 + 1)
    assert lines[1].startswith(f"{rows / 1e6:,.0f} MB of rows and optimizer state on 5 servers")
    assert lines[-1].startswith("recommended: --servers 5 --protection erasure -k 4 -m 1: 331 MB")


def test_a_scripts_candidates_are_those_of_a_config_with_the_same_rows(criteo_rows):
    data = [f"data.path={criteo_rows}"]
    config = load_config("tiny", data)
    load, protection = Needs(config, 1).load, config.protection
    survey = Survey(26, 2, 0, [(load.rows, load.record, load.looked_up)])
    script, own = (
        Script(Path("train.py")),
        [
            f"protection.rebuild_rows_per_step={protection.rebuild_rows_per_step}",
            f"protection.rebuild_share={protection.rebuild_share}",
        ],
    )
    of = [of_config("tiny", data), of_script(script, own, survey)]
    assert candidates(of[0], GIVEN) == candidates(of[1], GIVEN)
    split = [(load.rows // 2, load.record, load.looked_up // 2)] * 2
    halves = candidates(of_script(script, own, replace(survey, rows=split)), GIVEN)
    for one, two in zip(candidates(of[0], GIVEN), halves, strict=True):
        assert two.memory == pytest.approx(one.memory, rel=1e-3)
        assert two.rebuild_seconds == pytest.approx(one.rebuild_seconds, rel=0.01)


def test_a_script_that_trains_nothing_is_refused(script, capsys):
    script.write_text("print('hello')")
    code, lines, said = planned(capsys, "train.py", *OPTIONS)
    assert (code, lines) == (2, [])
    assert "has ended without training: no session.steps() ran" in said
    code, _, said = planned(capsys, "train.py", *OPTIONS, "--set", "data.path=x")
    assert code == 2 and "hello" not in said, "a wrong setting is told before the script runs"
