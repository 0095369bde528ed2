"""`make mutants` counts a kill only while the tests pass without a mutant."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from support.paths import ROOT


@pytest.fixture
def mutants(monkeypatch):
    """tests/mutants.py with a room of twenty mutants, whose outcomes a test chooses."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants", module)  # its dataclass looks itself up
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOMS", {"room": ([], ["tests"])})
    monkeypatch.setattr(sys, "argv", ["mutants.py"])
    return module


def outcome(mutants, monkeypatch, of_mutants, alone=()):
    """The exit code; the tests alone pass, but for the given runs."""
    runs, left = [], list(of_mutants)

    def tried(mutant, tests, seconds):
        if mutant is not None:
            return left.pop(0)
        runs.append(seconds)
        return "killed" if len(runs) - 1 in alone else "survived"

    drawn = [SimpleNamespace(key="a", lines=lambda: ("a", "b")) for _ in of_mutants]
    monkeypatch.setattr(mutants, "tried", tried)
    monkeypatch.setattr(mutants, "drawn", lambda room, count, seed: drawn)
    return mutants.main(), len(runs)


@pytest.mark.parametrize(
    ("of_mutants", "alone", "code", "runs"),
    [
        (["killed"] * 20, (), 0, 2),
        (["killed"] * 19 + ["timed out"], (), 0, 3),
        (["killed"] * 20, (0,), 1, 1),
        (["killed"] * 20, (1,), 1, 2),
        (["timed out"] + ["killed"] * 19, (1,), 1, 2),
        (["survived"] + ["killed"] * 19, (), 1, 2),
        ([], (), 1, 2),
    ],
    ids=["killed", "one hangs", "fails at first", "fails at last", "busy", "survivor", "nothing"],
)
def test_kills_count_while_the_tests_pass_alone(
    mutants, monkeypatch, of_mutants, alone, code, runs
):
    assert outcome(mutants, monkeypatch, of_mutants, alone) == (code, runs)
