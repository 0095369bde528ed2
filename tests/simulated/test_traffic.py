"""Bytes sent are counted in the phase that sends them; what stays on a rank is not counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.config.script import Script
from ecrm.engine.hooks import Hooks
from ecrm.kernels.dispatch import taken
from ecrm.launch.sizing import Planned, candidate, of_script
from ecrm.placement.tables import row_spaces
from ecrm.protection.base import Protection
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.none import NoProtection
from ecrm.run.memory_check import record_bytes
from ecrm.run.started import Started, Wanted
from ecrm.run.surveyed import Survey
from ecrm.run.traffic import Traffic, gather_traffic
from ecrm.session.session import Session
from ecrm.testing.simulated_transport import SimulatedCluster
from ecrm.transport.base import Transport
from support.sessions import Layout, starter

ONE_ROW = 3 * 8 + 16
"""An 8-byte head, dtype and length, and ten bytes padded to 16."""


def test_bytes_go_to_the_phase_that_sent_them():
    def program(transport):
        row, others = (
            torch.zeros(10, dtype=torch.uint8),
            [rank for rank in transport.live if rank != transport.rank],
        )
        traffic = Traffic(transport)
        transport.exchange({others[0]: [row], transport.rank: [row]})
        for _ in range(2):
            traffic.phase("lookup")
            transport.exchange({rank: [row] for rank in others})
            traffic.phase("forward")
            traffic.phase("commit")
            transport.agree(True)
        assert traffic.sent == {"start": ONE_ROW, "lookup": 4 * ONE_ROW}
        transport.exchange({others[1]: [row]})
        assert traffic.sent == {"start": ONE_ROW, "lookup": 4 * ONE_ROW, "commit": ONE_ROW}
        assert Traffic(transport).sent == {}, "a run after it counts anew"
        return gather_traffic(transport, traffic, 100 + transport.rank)

    outcome = SimulatedCluster(3, 1).run(program)
    sent = {"start": ONE_ROW, "lookup": 4 * ONE_ROW, "commit": ONE_ROW}
    assert all(
        told
        == [
            {"rank": rank, "sent": sent, "shared": 0, "written": 100 + rank, "kernels": taken()}
            for rank in range(3)
        ]
        for told in outcome.results.values()
    )


def test_what_evaluation_and_the_end_look_up_is_no_part_of_a_step():
    def program(transport):
        row, others = (
            torch.zeros(10, dtype=torch.uint8),
            [rank for rank in transport.live if rank != transport.rank],
        )
        traffic = Traffic(transport)
        for phases in (
            ("input", "lookup"),
            ("evaluate", "lookup"),
            ("input", "lookup"),
            ("finish", "rebuild", "lookup"),
        ):
            for name in phases:
                traffic.phase(name)
            transport.exchange({others[0]: [row]})
        return traffic.sent

    outcome = SimulatedCluster(2, 1).run(program)
    assert list(outcome.results.values()) == 2 * [
        {"lookup": 2 * ONE_ROW, "evaluate": ONE_ROW, "finish": ONE_ROW}
    ]


WIDE = {"wide": 64, "narrow": 32}
STEPS = 4


def wide_batch(step: int, slot: int) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(2 * step + slot)
    ids = torch.randint(2_000, (600,), generator=random)
    return KeyedJaggedTensor([*WIDE], ids, lengths=torch.ones(600).long())


def sent_in_all(protection: Callable[[int], Protection], wanted: list[Wanted]) -> int:
    """Bytes sent by all ranks of a session with rows of two widths, from its start on."""
    layout = Layout(servers=4, trainers=2, spares=0, protection=protection)
    cluster = SimulatedCluster(layout.world, 1)

    def program(transport: Transport) -> int:
        started = starter(transport, Hooks(), layout)
        tables = [
            EmbeddingBagConfig(
                num_embeddings=2_000, embedding_dim=dim, name=name, feature_names=[name]
            )
            for name, dim in WIDE.items()
        ]
        model = EmbeddingBagCollection(tables, device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
        traffic: list[Traffic] = []

        def start(asked: Wanted) -> Started:
            wanted.append(asked)
            began = started(asked)
            traffic.append(Traffic(transport))
            return began

        session = Session(model, slots=2, check_determinism=0, start=start)
        for ids in session.steps(wide_batch, STEPS):
            session.model(ids).values().sum().backward()
        return sum(traffic[0].sent.values())

    return sum(cluster.run(program).results.values())


@pytest.mark.parametrize(("k", "m"), [(3, 1), (2, 2)])
def test_parity_sends_what_ecrm_plan_says_of_a_script(k, m):
    """The plan counts records alone; row numbers and heads of messages come on top."""
    wanted: list[Wanted] = []
    with_parity = sent_in_all(lambda servers: ErasureProtection(servers, k, m), wanted)
    sent = (with_parity - sent_in_all(NoProtection, [])) / STEPS
    spaces, looked_up = row_spaces(wanted[0].tables), wanted[0].first_rows()
    survey = Survey(
        2, 2, 0, [(s.rows, record_bytes(s), n) for s, n in zip(spaces, looked_up, strict=True)]
    )
    model = of_script(Script(Path("train.py")), [], survey)
    planned = candidate(model, Planned(4, 1.0, 1.0, 1.0, 1.0), k, m)
    assert sent == pytest.approx(4 * planned.traffic, rel=0.1)
