"""Scheduled kills that did not happen are told at the end of a run, with the reason."""

from types import SimpleNamespace

from ecrm.config.faults import Kill, unfired
from ecrm.run.announce import tell_end

FIRED, LATER, NEVER = Kill(1, 5), Kill(1, 20, "parity"), Kill(0, 3, "scrub")


def test_a_kill_of_a_rank_that_lives_or_died_long_before_has_not_happened():
    noticed = {1: 4}  # a rank dies as a step begins: others are at the end of the step before
    assert unfired([FIRED, LATER, NEVER], noticed) == {
        LATER: "rank 1 had died in step 4",
        NEVER: "that phase did not begin on rank 0 from that step on",
    }
    assert unfired([FIRED], noticed) == {}


def test_it_is_told_at_the_end_of_a_run_that_was_stopped_too(capsys):
    def end(rank: int) -> str:
        failure = SimpleNamespace(ranks=(1,), step=5)
        state = SimpleNamespace(failures=SimpleNamespace(failures=[failure]))
        view = SimpleNamespace(reporter=2)
        engine = SimpleNamespace(rank=rank, view=view, state=state)
        run = SimpleNamespace(
            spec=SimpleNamespace(kills=[FIRED, LATER, NEVER]),
            folder=SimpleNamespace(path=None),
            durable=SimpleNamespace(own=None),
        )
        tell_end(run, SimpleNamespace(engine=engine), None, "", "")
        return capsys.readouterr().out

    told = end(2)
    assert told.count("ecrm: warning: --kill") == 2
    assert "--kill 1@20:parity never happened: rank 1 had died in step 5" in told
    assert "--kill 0@3:scrub never happened: that phase did not begin on rank 0" in told
    assert not end(3)
