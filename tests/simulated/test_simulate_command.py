"""`ecrm simulate` replays one seed, and runs a range of them."""

from ecrm.testing.simulate.schedule import parse_seed
from support.commands import assert_one_line, forked_ecrm


def test_simulate_replays_a_seed_or_a_commit_hash_and_runs_a_range():
    done = forked_ecrm("simulate", "--seed", "17", "--suite", "survivable")
    assert (
        done.returncode == 0
        and done.stdout.startswith("survivable seed 17: ")
        and "finished with the oracle's bits" in done.stdout
    )
    every = forked_ecrm("simulate", "--seed", "7c2d1f0", timeout=200)
    number = parse_seed("7c2d1f0")
    assert (
        every.returncode == 0
        and f"survivable seed {number}: " in every.stdout
        and f"fatal seed {number}: " in every.stdout
        and f"sessions seed {number}: " in every.stdout
        and ", session with " in every.stdout
    )
    some = forked_ecrm("simulate", "--seeds", "3:9", "--suite", "fatal", "--jobs", "1", timeout=200)
    assert some.returncode == 0 and some.stdout.startswith("fatal: 6 schedules, ")
    for seeds in ("9:3", "5", "a:b"):
        assert_one_line(
            forked_ecrm("simulate", "--seeds", seeds), f"--seeds {seeds}: type A:B with A below B"
        )
    assert_one_line(
        forked_ecrm("simulate", "--seeds", "0:3", "--jobs", "0"), "--jobs 0: at least 1"
    )
