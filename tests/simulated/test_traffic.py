"""Bytes sent are counted in the phase that sends them; what stays on a rank is not counted."""

from __future__ import annotations

import torch

from ecrm.kernels.dispatch import taken
from ecrm.run.traffic import Traffic, gather_traffic
from ecrm.testing.simulated_transport import SimulatedCluster

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
