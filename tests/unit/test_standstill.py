"""A run that stands still says so, once, with the ranks that are waited for."""

import time
from types import SimpleNamespace

import pytest

from ecrm.engine.hooks import Hooks
from ecrm.run import standstill
from ecrm.run.slot_faults import Place
from ecrm.run.standstill import Standstill


@pytest.fixture
def watched(monkeypatch):
    """A watch over a rank, its hooks, and what it has said."""
    said, hooks = [], Hooks()
    monkeypatch.setattr(standstill, "say", said.append)
    view = SimpleNamespace(reporter=0)
    engine = SimpleNamespace(rank=0, view=view, state=SimpleNamespace(commits=0))
    watch = Standstill(hooks, seconds=0.4)
    watch.watch(engine)
    yield watch, hooks, engine, said
    watch.end()


def test_it_is_said_once_for_each_standstill(watched):
    watch, hooks, _, said = watched
    time.sleep(1.0)
    assert not said, "nothing had begun"
    for _ in range(8):
        hooks.phase(3, "forward")
        time.sleep(0.1)
    assert not said, "phases began"
    time.sleep(1.2)
    assert said == ["! nothing has gone on for 0.4 s, in step 3 (forward)"]
    hooks.phase(4, "update")
    watch.places = lambda: {5: Place(4, 1), 2: Place(4, 0)}
    time.sleep(1.2)
    assert said[1:] == [
        "! nothing has gone on for 0.4 s, in step 4 (update): the script's own code is waited "
        "for: rank 2 is at step 4, slot 0; rank 5 is at step 4, slot 1"
    ]


def test_one_rank_alone_says_it(watched):
    _, hooks, engine, said = watched
    engine.rank = 1
    hooks.phase(3, "forward")
    time.sleep(1.2)
    assert not said
