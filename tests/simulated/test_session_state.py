"""A session that begins with a saved model, and its state by TorchRec's names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ecrm.base.errors import UsageError
from ecrm.protection.base import Protection
from ecrm.protection.chain import ChainProtection
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.replicate import ReplicateProtection
from ecrm.run.started import Wanted
from ecrm.session import session as session_module
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault
from support.sessions import Layout, Left, Train, TwoTower, run, train_two_tower

STEPS = 6


def weights() -> dict[str, torch.Tensor]:
    """A model that somebody has trained."""
    torch.manual_seed(11)
    model = TwoTower(torch.device("cpu"))
    model.norm.running_mean += 0.25
    return model.state_dict()


@functools.cache
def saved(folder: Path) -> Path:
    torch.save(weights(), folder / "trained.pt")
    return folder / "trained.pt"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.getbasetemp())


def beginning(prepare: Callable[[Session], None], seen: list[Any] | None = None) -> Train:
    def train(start: Callable[[Wanted], Any]) -> Session:
        session = train_two_tower(start, STEPS, prepare)
        state = session.state_dict()
        if seen is not None:
            seen.append(state)
        return session

    return train


@functools.cache
def calm(file: Path) -> tuple[Left, dict[str, torch.Tensor]]:
    seen: list[Any] = []
    left = run(train=beginning(lambda session: session.load(file), seen))
    assert len(seen) == Layout().world  # every rank has all of it
    first = seen[0]
    assert all(torch.equal(other[name], first[name]) for other in seen for name in first)
    return left, first


KILLS: dict[str, tuple[list[PhaseFault], Callable[[int], Protection]]] = {
    "a server at once": (
        [PhaseFault(1, 0, "update")],
        lambda servers: ErasureProtection(servers, 3, 1),
    ),
    "a server, then a trainer": (
        [PhaseFault(0, 3, "parity"), PhaseFault(5, 4, "forward")],
        lambda servers: ErasureProtection(servers, 2, 2),
    ),
    "chain": ([PhaseFault(2, 2, "update")], lambda servers: ChainProtection(servers, 2)),
    "replicate": ([PhaseFault(3, 2, "update")], lambda servers: ReplicateProtection(servers, 2)),
    "while the state is gathered": (
        [PhaseFault(1, STEPS, "save")],
        lambda servers: ErasureProtection(servers, 3, 1),
    ),
}


@pytest.mark.parametrize("name", KILLS)
def test_killed_ranks_change_no_bit_of_a_model_that_began_with_another(name, file):
    faults, protection = KILLS[name]
    expected, state = calm(file)
    seen: list[Any] = []
    left = run(
        faults,
        Layout(protection=protection, spares=2),
        beginning(lambda session: session.load(file), seen),
    )
    assert left.deaths == len(faults) and left.mismatches == 0
    assert (left.tables, left.dense) == (expected.tables, expected.dense)
    assert all(torch.equal(seen[0][key], state[key]) for key in state)


def test_it_begins_with_the_file_and_rows_without_a_step_stay_as_they_were(file):
    _, state = calm(file)
    before = weights()
    assert state.keys() == before.keys()
    used = [(state[name] != before[name]).any(1) for name in state if "embedding" in name]
    assert all(rows.any() for rows in used) and not all(rows.all() for rows in used)
    plain = run(train=beginning(lambda session: None))
    assert plain.tables != calm(file)[0].tables and plain.dense != calm(file)[0].dense
    in_memory = run(train=beginning(lambda session: session.load_state_dict(weights())))
    assert (in_memory.tables, in_memory.dense) == (calm(file)[0].tables, calm(file)[0].dense)


def test_a_state_that_every_rank_would_hold_has_a_limit(file, monkeypatch):
    monkeypatch.setattr(session_module, "LARGEST_VALUES", 100)

    def train(start: Callable[[Wanted], Any]) -> Session:
        def prepare(session: Session) -> None:
            with pytest.raises(UsageError, match="to a file, and call session.load"):
                session.load_state_dict(weights())

        session = train_two_tower(start, 2, prepare)
        with pytest.raises(UsageError, match=r"session.state_dict: .*: call session.save\(path\)"):
            session.state_dict()
        return session

    assert run(train=train).deaths == 0
