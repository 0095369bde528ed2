"""The undisturbed truth: every row with its optimizer state, and the dense state, by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.testing.simulate.workload import TINY, Job, Workload
from ecrm.transport.base import Transport
from ecrm.transport.message import Part, Received, copied


class Alone(Transport):
    """A cluster of one rank, which nothing can happen to."""

    rank, live = 0, (0,)

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> dict[int, list[Received]]:
        parts = [copied(part) for part in outgoing.get(0, ())]
        return {0: parts} if parts else {}

    def share(self, tensors: Sequence[Part]) -> dict[int, list[Received]]:
        return {0: [copied(part) for part in tensors]}

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        return flag, True

    def shrink(self) -> None:
        raise AssertionError("nobody can die here")

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Truth:
    """What a `job` computes when nothing happens to it.

    `records[s][space]` are all records of a row space after s steps, uint8 [rows, B]; `dense[s]` is
    the dense state. `notes[s]` is {slot: its note on step s}. `tables` are the final digests.
    """

    records: list[list[Tensor]]
    dense: list[Tensor]
    notes: list[dict[int, Tensor]]
    tables: dict[str, str]
    job: Job = TINY


def truth_of(
    workload: Workload,
    after_step: Callable[[Engine], None] = lambda engine: None,
    job: Job = TINY,
) -> Truth:
    """Run a job on one rank without protection, on the project's own storage.

    What it computes depends on neither. `after_step` may change what the engine goes on with.
    """
    alone = replace(
        workload,
        servers=1,
        trainers=1,
        spares=0,
        layout="colocated",
        protection="none",
        k=1,
        m=0,
        commit_interval=1,
        scrub_rows_per_step=0,
        skip_undo=False,
        rows_on="cpu",
        gpu_kernels=None,
    )
    truth = Truth([], [], [], {}, job)

    def note(engine: Engine) -> None:
        spaces = enumerate(engine.state.spaces)
        truth.records.append(
            [engine.state.hosted[0, s].store.read(torch.arange(space.rows)) for s, space in spaces]
        )
        truth.dense.append(job.dense_value(engine).clone())
        truth.notes.extend([dict(engine.state.log.of(engine.step - 1))] if engine.step else [])
        after_step(engine)

    job.run(alone, Alone(), Hooks(), note, note, truth.tables.update)
    return truth
