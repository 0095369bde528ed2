"""What `ecrm drill` accepts, and what it refuses in one line before anything starts."""

import pytest

from ecrm.base.errors import UsageError
from ecrm.cli.commands import main
from ecrm.config import make_config
from ecrm.config.faults import Kill
from ecrm.drill.options import (
    Disturbance,
    HostKill,
    RandomKills,
    check_survivable,
    parse_disturbance,
)
from support.paths import PROGRAMS


def config(**sections):
    return make_config({"data": {"path": "absent"}, **sections}, "test")


def test_scheduled_and_random_kills():
    assert parse_disturbance(["1@3", "0@4:dense"], None, None, None).scheduled == (
        Kill(1, 3),
        Kill(0, 4, "dense"),
    )
    assert parse_disturbance([], "2.5", None, None).random == RandomKills(2.5, None, 0)
    assert parse_disturbance([], "60", "3", "7").random == RandomKills(60.0, 3, 7)
    assert str(parse_disturbance([], "60", "3", "7")) == "--mtbf 60 --kills 3 --seed 7"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (([], None, None, None), "needs something to survive"),
        ((["1@3"], "5", None, None), "--kill 1@3 and --mtbf 5: type one or the other"),
        ((["1@3"], None, "2", None), "--kills 2: goes with --mtbf"),
        ((["1@3"], None, None, "2"), "--seed 2: goes with --mtbf"),
        ((["1@3", "1@9:dense"], None, None, None), "rank 1 is to die 2 times"),
        ((["1"], None, None, None), "--kill 1: type RANK@STEP"),
        (([], "soon", None, None), "--mtbf soon"),
        (([], "0", None, None), "--mtbf 0"),
        (([], "nan", None, None), "--mtbf nan"),
        (([], "inf", None, None), "--mtbf inf"),
        (([], "5", "0", None), "--kills 0: type a whole number, at least 1"),
        (([], "5", "some", None), "--kills some"),
        (([], "5", None, "-1"), "--seed -1"),
        (
            (["1@3"], None, None, None, ["a@3"]),
            "--kill-host a@3 and --kill 1@3: type one or the other",
        ),
        (([], "5", None, None, ["a@3"]), "--kill-host a@3 and --mtbf 5: type one or the other"),
        (([], None, None, None, ["a"]), "--kill-host a: type HOST@STEP"),
        (([], None, None, None, ["a@b"]), "--kill-host a@b: type HOST@STEP"),
        (
            ([], None, None, None, ["a@2", "a@3"]),
            "--kill-host: host a is to die 2 times, a host dies once",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options, said):
    with pytest.raises(UsageError) as refused:
        parse_disturbance(*options)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_hosts_go_by_name_or_number():
    (kill,) = parse_disturbance([], None, None, None, ["node3@40"]).hosts
    assert kill.name_among(["node1", "node3"]) == "node3"
    assert HostKill("1", 5).name_among(["a", "b"]) == "b"
    assert HostKill("1", 5).name_among(["a", "b", "1"]) == "1"
    with pytest.raises(
        UsageError, match="--kill-host 2@5: there is no host 2; hosts are a, b, or 0 to 1"
    ):
        HostKill("2", 5).name_among(["a", "b"])
    with pytest.raises(UsageError, match="set cluster.failure_domain=host"):
        check_survivable(config(), Disturbance(hosts=(kill,)), 41)
    with pytest.raises(
        UsageError, match="--kill-host node3@40: there is no step 40 to follow, the last is 39"
    ):
        check_survivable(config(), Disturbance(hosts=(kill,)), 40)


def test_random_kills_that_nobody_could_survive_are_refused():
    with pytest.raises(UsageError, match="protection.name is none"):
        check_survivable(
            config(protection={"name": "none"}), Disturbance(random=RandomKills(1.0)), 9
        )
    with pytest.raises(UsageError, match="the config has 7 ranks, and one must be left"):
        check_survivable(config(), Disturbance(random=RandomKills(1.0, 7)), 9)
    check_survivable(config(), Disturbance(random=RandomKills(1.0, 6)), 9)
    check_survivable(config(protection={"name": "none"}), Disturbance(scheduled=(Kill(1, 3),)), 9)


def test_a_refused_drill_writes_nothing(tmp_path, criteo_rows, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["--set", f"data.path={criteo_rows}"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    script = [str(PROGRAMS / "hand_loop.py"), "--trainers", "2"]
    for words, said in (
        (["tiny", *data], "needs something to survive"),
        (["tiny", *data, "--kill", "6@3"], "there is no rank 6"),
        (["tiny", *data, "--kill", "1@20"], "there is no step 20"),
        (
            ["tiny", *data, "--kill-host", "0@999999", "--set", "cluster.failure_domain=host"],
            "there is no step 999999 to follow",
        ),
        (
            [
                "tiny",
                *data,
                "--kill-host",
                "9@5",
                "--set",
                "cluster.failure_domain=host",
                "--set",
                "testing.imitated_hosts=3",
            ],
            "there is no host 9; hosts are 0 to 2",
        ),
        (["tiny", *data, "--kill", "1@3", "--run-dir", "full"], "--run-dir full: not empty"),
        (
            ["tiny", "--set", "data.path=absent", "--mtbf", "5"],
            "absent: there is no such directory",
        ),
        (["absent.toml", "--mtbf", "5"], "no config file"),
        (["absent.py", "--mtbf", "5"], "no script 'absent.py'"),
        ([*script, "--kill", "9@3", "--", "9"], "there is no rank 9"),
        ([*script, "--mtbf", "5", "--protection", "none"], "no rank may die"),
        ([*script, "--set", "train.steps=9", "--mtbf", "5"], "decided by session.steps"),
    ):
        assert main(["drill", *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["full", "notes.txt"]
