"""A rank that dies while it takes the run folder, or looks into it: the next rank does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ecrm.base.errors import EcrmError, UsageError
from ecrm.checkpoint.folder import Checkpoint
from ecrm.config import load_config
from ecrm.config.script import Script
from ecrm.run import claim, gather
from ecrm.run.claim import claim_run
from ecrm.run.gather import decide, gather_results
from ecrm.run.plan import Start
from ecrm.run.spec import RunSpec
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster
from ecrm.testing.simulated_transport.outcome import SimulationError
from ecrm.transport.base import PeerFailure


class Lock:
    """A run's hold on a folder, as all ranks of a simulated cluster see it."""

    def __init__(self, owners: list[int]) -> None:
        self.owners = owners

    def take(self) -> None:
        """The check that follows takes it."""

    def join(self) -> None:
        """Nothing is there to wait for."""

    @property
    def is_mine(self) -> bool:
        return bool(self.owners)


def engines_meet(transport) -> None:
    """What follows every start: the engines share, and recover from a failure."""
    while True:
        try:
            parts = transport.share([torch.zeros(1)])
            if all(isinstance(part, torch.Tensor) for part, *_ in parts.values()):
                return
        except PeerFailure:
            transport.shrink()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dead", [(), (0,), (0, 1)])
def test_the_next_rank_takes_the_folder_and_decides(dead, seed, monkeypatch, tmp_path):
    owners: list[int] = []
    cluster = SimulatedCluster(4, seed, [PhaseFault(rank, 0, "take") for rank in dead])
    monkeypatch.setattr(claim, "RunLock", lambda folder, host: Lock(owners))
    monkeypatch.setattr(claim, "check_run_dir", lambda folder, mine: None)
    config = load_config("tiny", ["data.path=x"])

    def find(*arguments: object) -> Start:
        rank = arguments[-1]
        cluster.enter_phase(rank, 0, "take")
        owners.append(rank)
        return Start(7, {"rows_seed": rank})

    def program(transport):
        spec, trained = RunSpec(Script(Path("train.py")), config, tmp_path), transport.rank
        run, ready = claim_run(transport, spec, trained, lambda run: trained, lambda line: None)
        engines_meet(transport)
        return run.start.steps, run.start.identity["rows_seed"], list(ready.values())

    monkeypatch.setattr(claim, "find_starting_point", find)
    outcome = cluster.run(program)
    live = list(range(len(dead), 4))
    assert owners == [len(dead)]
    assert outcome.results == {rank: (7, len(dead), live) for rank in live}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dead", [(), (0,), (0, 1)])
def test_the_next_rank_looks(dead, seed):
    cluster = SimulatedCluster(4, seed, [PhaseFault(rank, 0, "look") for rank in dead])

    def program(transport):
        def look():
            cluster.enter_phase(transport.rank, 0, "look")
            return transport.rank

        rank = decide(transport, look)
        engines_meet(transport)
        return rank

    outcome = cluster.run(program)
    assert outcome.results == {rank: len(dead) for rank in range(len(dead), 4)}


def test_an_error_of_the_rank_that_looks_is_every_ranks():
    def program(transport):
        def look():
            raise UsageError(f"rank {transport.rank} finds another run")

        with pytest.raises(EcrmError) as told:
            decide(transport, look)
        return str(told.value), told.value.speaker

    outcome = SimulatedCluster(3, 1).run(program)
    assert set(outcome.results.values()) == {("rank 0 finds another run", 0)}


@pytest.mark.parametrize("there", [7, 8, None], ids=["the same", "other bytes", "missing"])
def test_a_rank_with_another_checkpoint_than_the_first_ends_the_start(there, monkeypatch, tmp_path):
    """Rank 0 decides by its own disk; the other ranks open the path on theirs."""

    def of(checksum: int) -> Checkpoint:
        return Checkpoint(tmp_path / "step-5", SimpleNamespace(step=5, checksum=checksum))

    def program(transport):
        spec = RunSpec(Script(Path("train.py")), load_config("tiny", ["data.path=x"]))
        try:
            run, _ = claim_run(transport, spec, None, lambda run: None, lambda line: None)
        except EcrmError as error:
            return str(error), error.speaker
        return run.start.checkpoints[0].manifest.checksum, None

    monkeypatch.setattr(
        claim, "find_starting_point", lambda *_: Start(9, {"rows_seed": 0}, [of(7)])
    )
    if there is not None:
        monkeypatch.setattr(claim.Checkpoint, "open", staticmethod(lambda path: of(there)))
    ((said, speaker),) = set(SimulatedCluster(3, 1).run(program).results.values())
    if there == 7:
        assert (said, speaker) == (7, None)
    else:
        assert f"finds another checkpoint at {tmp_path / 'step-5'} than the first rank" in said
        assert speaker == 1 and "\n" not in said


@pytest.mark.parametrize("numbered", [True, False])
def test_a_death_in_an_agreement_parts_no_ranks(numbered, monkeypatch):
    """Some survivors see the agreement end well, and are a round further on than the others."""
    if not numbered:  # the twin: values of a round are taken for those of the next
        monkeypatch.setattr(gather, "_round_of", lambda parts: 0)
    parted = 0
    for seed in range(60):
        kill = [PhaseFault(3, number, "between") for number in (seed % 6,)]
        cluster = SimulatedCluster(4, seed, kill)

        def program(transport, cluster=cluster):
            heard = []
            for number in range(6):
                cluster.enter_phase(transport.rank, number, "between")
                if not numbered:
                    transport.rounds_at_start = 0
                values = gather_results(transport, lambda number=number: number)
                heard.append(set(values.values()))
            engines_meet(transport)
            return heard

        try:
            results = cluster.run(program).results
        except SimulationError:
            parted += 1
            continue
        assert results.keys() >= {0, 1, 2}
        parted += any(
            heard != {number} for said in results.values() for number, heard in enumerate(said)
        )
    assert parted == 0 if numbered else parted > 0
