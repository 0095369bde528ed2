"""Waits at the start of a run are told when they are long, and only then."""

from __future__ import annotations

import time

from ecrm.base.console import Waiting
from ecrm.process.startup import Startup, died


def test_a_wait_is_told_when_it_takes_long_and_ends_with_the_next():
    said = []
    waiting = Waiting(said.append, after=0.2)
    waiting("the data are read")
    waiting("tables are built")
    time.sleep(0.5)
    waiting.over()
    time.sleep(0.6)
    assert said == ["waiting until tables are built: 0 s so far"]
    waiting("the last")
    time.sleep(1.3)
    waiting.over()
    assert said[1:] == [f"waiting until the last: {seconds} s so far" for seconds in (0, 1)]


def guard(
    folder, clock: list[float], rank: int, ranks: int = 3, size: int = 3, host: str = ""
) -> Startup:
    environ = {"PMIX_SERVER_TMPDIR": str(folder), "PMIX_NAMESPACE": "job@1", "PMIX_RANK": str(rank)}
    environ |= {"OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks)}
    environ |= {"ECRM_HOST": host} if host else {}
    return Startup(120.0, 2.0, environ, lambda: clock[0])


def test_one_guard_says_how_many_ranks_have_loaded_torch_and_then_that_mpi_comes(tmp_path):
    clock = [0.0]
    guards = [guard(tmp_path, clock, rank) for rank in range(3)]
    news = []

    def look(seconds: float) -> None:
        clock[0] = seconds
        news.append([one.news() for one in guards])

    look(1.0)
    guards[1].loaded()
    look(3.0)
    look(9.0)
    guards[0].loaded()
    look(11.0)
    guards[2].loaded()
    look(12.0)
    look(13.5)
    look(14.5)
    assert all(others == [None, None] for _, *others in news)
    assert [one for one, *_ in news] == [
        None,
        "waiting until torch is loaded, 1 of 3 ranks have it: 2 s so far",
        None,
        "waiting until torch is loaded, 2 of 3 ranks have it: 10 s so far",
        None,
        None,
        "waiting until MPI comes up: 2 s so far",
    ]


def test_of_several_hosts_the_guard_counts_its_own(tmp_path):
    clock = [0.0]
    first = guard(tmp_path, clock, rank=0, ranks=3, size=6)
    first.news()
    clock[0] = 2.0
    assert (
        first.news()
        == "waiting until torch is loaded, 0 of 3 ranks of this host have it: 2 s so far"
    )


def test_where_no_notes_can_be_left_the_guard_speaks_of_its_own_rank(tmp_path):
    clock = [0.0]
    first = guard(tmp_path / "nowhere", clock, rank=0)
    first.news()
    clock[0] = 2.5
    assert first.news() == "waiting until torch is loaded: 2 s so far"
    first.loaded()
    first.news()
    clock[0] = 5.0
    assert first.news() == "waiting until MPI comes up: 2 s so far"


def test_a_rank_of_hosts_beside_mpirun_misses_no_rank_of_another_host(tmp_path):
    clock = [0.0]
    alone, beside = guard(tmp_path, clock, 0), guard(tmp_path, clock, 0, host="h1")
    assert alone.trouble() is beside.trouble() is None
    clock[0] = 60.0
    assert alone.trouble() == died(1)
    assert beside.trouble() is None and beside.news() is None
