"""Numbers with their nouns come from one helper; the texts say what protections have done."""

from __future__ import annotations

import re
import subprocess

import pytest

from ecrm.base.wording import counted, duration, named
from ecrm.config import load_config
from ecrm.engine import events
from ecrm.protection.base import VerifyReport
from ecrm.protection.registry import make_protection
from support.paths import ROOT
from support.telling import an


def test_one_and_many():
    assert [counted(n, "row") for n in (0, 1, 2, 1024)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "1,024 rows",
    ]
    assert [counted(n, "recovery", "recoveries") for n in (1, 2)] == ["1 recovery", "2 recoveries"]
    assert named("rank", [3]) == "rank 3" and named("rank", (3, 5)) == "ranks 3, 5"


def test_nobody_makes_plurals_by_hand():
    files = [path for path in (ROOT / "ecrm").rglob("*.py") if path.name != "wording.py"]
    found = [
        (path.name, line)
        for path in files
        for line in path.read_text().splitlines()
        if re.search(r"""['"]s['"] if """, line)
    ]
    assert not found


def test_lines_of_a_run_count_right():
    rebuilt = an(events.Rebuilt, shards=[1], rebuilt_bytes=5, on_demand_rows=1)
    assert "(5 bytes, 1 row on demand)" in rebuilt.line(events.Terms())
    rolled_back = an(events.RolledBack, step=4, from_step=5)
    assert "which redoes 1 step: " in rolled_back.line(events.Terms())
    checkpoint = an(events.Checkpoint, kind="full", rows=1)
    assert "(full): 1 row, " in checkpoint.line(events.Terms())


@pytest.mark.parametrize(
    "name, line",
    [
        ("erasure", "parity: 1 stripe encoded again, 0 wrong"),
        ("chain", "copies: 1 row compared, 0 wrong"),
        ("replicate", "copies: 1 row compared, 0 wrong"),
    ],
)
def test_what_was_compared_goes_by_the_protection(name, line):
    config = load_config("tiny", ["data.path=data", f"protection.name={name}"])
    protection = make_protection(config.protection, config.cluster.servers, durable=False)
    assert protection.redundancy and protection.verified_in_words(VerifyReport(1, 0)) == line


@pytest.mark.parametrize("name", ["none", "checkpoint", "mapped", "stateless"])
def test_nothing_was_compared_where_there_is_nothing(name, tmp_path):
    config = load_config(
        "tiny", ["data.path=data", f"protection.name={name}", "checkpoint.every_steps=5"]
    )
    protection = make_protection(config.protection, config.cluster.servers, tmp_path, durable=False)
    assert not protection.redundancy


def test_make_takes_a_path_with_spaces_and_several_files(tmp_path):
    odd, one, two = tmp_path / "my day 0.txt", tmp_path / "one.txt", tmp_path / "two.txt"
    for file in (odd, one, two):
        file.write_text("")
    for given, said in (
        (f"{odd}", f'"{odd}"'),
        (f"{one} {two}", f"{one} {two}"),
        (f"{one}", f'"{one}"'),
    ):
        done = subprocess.run(
            ["make", "-n", "-C", str(ROOT), "dataset", f"DATA={given}"],
            capture_output=True,
            text=True,
        )
        assert (
            done.returncode == 0
            and f"prepare criteo {said} --output datasets/prepared-" in done.stdout
        ), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (3720, "1h02m"),
        (90_000, "25h00m"),
    ],
)
def test_durations_are_said_in_one_way(seconds, said):
    assert duration(seconds) == said
