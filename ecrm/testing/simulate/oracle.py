"""The oracle: rows, optimizer state and dense state of an undisturbed run, by step."""

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
    """The transport of a cluster with a single rank. No failure is possible."""

    rank, live = 0, (0,)

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> Mapping[int, list[Received]]:
        parts = [copied(part) for part in outgoing.get(0, ())]
        return {0: parts} if parts else {}

    def share(self, tensors: Sequence[Part]) -> Mapping[int, list[Received]]:
        return {0: [copied(part) for part in tensors]}

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        return flag, True

    def shrink(self) -> None:
        raise AssertionError("nobody can die here")

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Truth:
    """The results of an undisturbed `job`, step by step.

    `records[s][space]` are all records of a row space after s steps, uint8 [rows, B]. `dense[s]` is
    the dense state after s steps. `notes[s]` maps slots to notes on step s. `tables` maps tables to
    their final digests.
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
    """Run a job on one rank without protection, and return the results of every step.

    The results of a job depend neither on the cluster nor on the protection. `after_step` gets the
    engine after every step, and may change the engine's state.
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
