"""A user's model in a session: kills change no bit of it, of its optimizers, or of its log."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ecrm.base.errors import EcrmError, UsageError
from ecrm.checkpoint.model_file import read_safetensors
from ecrm.engine.dense import spread_dense
from ecrm.engine.table_digest import table_digests
from ecrm.model.determinism import prepared_torch
from ecrm.run.lone_run import run_alone
from ecrm.run.started import Wanted
from ecrm.session import step_loop
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import PhaseFault, RankKilled
from support.sessions import (
    Layout,
    Left,
    Train,
    TwoTower,
    batch_of,
    dense_digest,
    run,
    told,
    train_two_tower,
    two_tower,
)

KILLS = {
    "a server in update": ([PhaseFault(1, 4, "update")], Layout()),
    "a server in parity": ([PhaseFault(2, 6, "parity")], Layout()),
    "a trainer in update": ([PhaseFault(4, 4, "update")], Layout()),
    "a trainer without a spare": ([PhaseFault(4, 5, "parity")], Layout(spares=0)),
    "a trainer in forward": ([PhaseFault(5, 3, "forward")], Layout(commit_interval=3)),
    "a server, then a trainer": (
        [PhaseFault(5, 2, "lookup"), PhaseFault(0, 7, "dense")],
        Layout(spares=2),
    ),
}


@functools.cache
def calm() -> Left:
    return run()


def test_a_session_trains_and_tells_every_step_once():
    left = calm()
    assert left.mismatches == left.deaths == 0 and len(left.dense) == 1
    assert [finished for finished, _ in left.logged] == list(range(1, 11))
    losses = [dict(values)["loss"] for _, slots in left.logged for _, values in slots]
    assert len(losses) == 20 and len(set(losses)) == 20


@pytest.mark.parametrize("name", KILLS)
def test_killed_ranks_change_no_bit_of_a_session(name):
    faults, layout = KILLS[name]
    left = run(faults, layout)
    assert left.deaths == len(faults) and left.mismatches == 0
    assert left.tables == calm().tables and left.dense == calm().dense
    assert left.logged == calm().logged[-len(left.logged) :] and len(left.logged) >= 3


@pytest.mark.parametrize("dying", [None, 4, 0, 6])
def test_after_the_loop_every_rank_has_the_trained_module_and_optimizer(dying, monkeypatch):
    """Servers and spares too, whoever dies meanwhile: later code may copy the module."""
    left_by: dict[int, str] = {}

    def spread(transport: Any, *given: Any) -> Any:
        if transport.rank == dying:
            raise RankKilled
        return spread_dense(transport, *given)

    monkeypatch.setattr(step_loop, "spread_dense", spread)

    def train(start: Callable[[Wanted], Any]) -> Session:
        session = train_two_tower(start)
        left_by[session.rank] = dense_digest(session._replica)
        return session

    left = run(train=train)
    assert set(left_by) == set(range(Layout().world)) - {dying}
    assert left.dense == frozenset(left_by.values()) == calm().dense


def test_alone_in_a_process_a_session_comes_to_the_same_bits():
    """With plain `python`, or in a notebook."""
    with prepared_torch(threads=1):  # and afterwards as it was
        session = train_two_tower(run_alone)
    assert table_digests(session._engine, 0) == calm().tables
    dense = session._engine.state.dense
    assert dense is not None and frozenset({dense_digest(dense)}) == calm().dense
    assert told(session.delivered) == calm().logged


def evaluating(folder: Path) -> Train:
    """The script, with an evaluation every 3 steps, a last one, and the model saved."""

    def train(start: Callable[[Wanted], Any]) -> Session:
        def prepare(session: Session) -> None:
            @session.every(3)
            def evaluate() -> None:
                session.evaluated[session.step] = evaluation(session)
                session.save(folder / "on-the-way.pt")  # after a death in the evaluation, too

            session.evaluated = {}

        session = train_two_tower(start, prepare=prepare)
        session.evaluated["end"] = evaluation(session)
        session.save(folder / "model.pt")
        session.save(folder / "model.safetensors")
        return session

    return train


def evaluation(session: Session) -> tuple[float, ...]:
    """Scores of 5 batches; whatever the module is in, it is in training again afterwards."""
    session.model.eval()
    for batch in session.eval_batches([batch_of(100 + number, 0, 6) for number in range(5)]):
        session.gather(scores=session.model(batch.dense, batch.kjt), labels=batch.label)
    session.model.train()
    assert len(session.gathered["labels"]) == 30
    return tuple(session.gathered["scores"].tolist())


@functools.cache
def calm_with_evaluations(folder: Path) -> tuple[Left, dict[str, Any]]:
    left = run(train=evaluating(folder))
    return left, torch.load(folder / "model.pt", weights_only=True)


@pytest.mark.parametrize(
    "faults",
    [
        [PhaseFault(1, 6, "evaluate")],
        [PhaseFault(4, 10, "evaluate")],
        [PhaseFault(5, 3, "evaluate"), PhaseFault(0, 7, "parity")],
        [PhaseFault(2, 10, "save")],
    ],
    ids=["server", "trainer at the end", "both", "in save"],
)
def test_evaluations_and_the_saved_model_are_those_of_the_calm_run(tmp_path_factory, faults):
    base = tmp_path_factory.getbasetemp() / "calm-session"
    base.mkdir(exist_ok=True)
    calm_run, saved = calm_with_evaluations(base)
    folder = tmp_path_factory.mktemp("killed")
    left = run(faults, Layout(spares=2), evaluating(folder))
    assert left.deaths == len(faults)
    assert (
        (left.tables, left.dense)
        == (calm_run.tables, calm_run.dense)
        == (
            calm().tables,
            calm().dense,
        )
    )
    assert left.evaluated == calm_run.evaluated and len(calm_run.evaluated) == 4
    again = torch.load(folder / "model.pt", weights_only=True)
    assert again.keys() == saved.keys() == two_tower().state_dict().keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    plain = read_safetensors(folder / "model.safetensors")
    assert all((plain[name] == saved[name].numpy()).all() for name in saved)
    plain_model = TwoTower(torch.device("cpu"))
    plain_model.load_state_dict(saved)


def test_a_death_just_before_an_evaluation_undoes_steps_and_both_are_done_again(tmp_path):
    """Nothing is committed when the first evaluation is due: a rank dies in the commit for it."""
    calm_run, _ = calm_with_evaluations(tmp_path)
    layout = Layout(spares=2, commit_interval=4)
    left = run([PhaseFault(1, 3, "parity")], layout, evaluating(tmp_path))
    assert left.deaths == 1
    assert (left.tables, left.dense) == (calm_run.tables, calm_run.dense)
    assert left.evaluated == calm_run.evaluated and len(calm_run.evaluated) == 4


def test_a_file_that_cannot_be_written_ends_all_ranks_alike(tmp_path):
    (tmp_path / "file").touch()

    def train(start: Callable[[Wanted], Any]) -> Session:
        session = train_two_tower(start, steps=2)
        with pytest.raises(EcrmError, match="not a directory"):
            session.save(tmp_path / "file" / "model.pt")
        with pytest.raises(UsageError, match=r"\.safetensors, \.pt"):
            session.save(tmp_path / "model")
        return session

    assert run(train=train).mismatches == 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
