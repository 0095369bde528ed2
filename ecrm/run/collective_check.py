"""Messages between ranks at the start, before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ecrm.engine.failures import FailureLog
from ecrm.errors import EcrmError, Unrecoverable, UsageError
from ecrm.run.run_lock import RunLock
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.message import tensors


def share_at_start(
    transport: Transport, mine: Sequence[torch.Tensor]
) -> dict[int, list[torch.Tensor]]:
    """Call `Transport.share` before the first step, without the ranks dead by then.

    An existing engine notices the deaths in its first call, and recovers. All survivors must see an
    agreement end alike, as MPI promises: otherwise some ranks would still share, and some would be
    further on. Raises LostTouch if the call keeps failing though no rank dies.
    """
    log = FailureLog()
    while True:
        try:
            shared = transport.share(mine)
            if transport.agree(True):
                return {rank: tensors(parts) for rank, parts in shared.items()}
        except PeerFailure as failure:
            live = transport.live
            transport.shrink()
            log.shrunk(died=transport.live != live)
            log.check(log.futile, str(failure))


def share_json(transport: Transport, mine: Any) -> dict[int, Any]:
    """Every rank's own `mine`, a JSON value, shared before the first step."""
    shared = share_at_start(
        transport, [torch.tensor(list(json.dumps(mine).encode()), dtype=torch.uint8)]
    )
    return {rank: json.loads(bytes(text.tolist())) for rank, (text,) in shared.items()}


def collective_check(transport: Transport, action: Callable[[], Any]) -> Any:
    """Run `action` on every rank.

    If `action` fails on some rank, raises the lowest failed rank's error on every rank.
    """
    result: Any = None
    error: EcrmError | None = None
    try:
        result = action()
    except EcrmError as problem:
        error = problem
    except OSError as problem:
        where = f"{problem.filename}: {problem.strerror}"
        error = UsageError(str(problem) if problem.filename is None else where)
    text = f"{error.exit_code} {error}" if error else ""
    shared = share_at_start(transport, [torch.tensor(list(text.encode()), dtype=torch.uint8)])
    for rank, (said,) in sorted(shared.items()):
        if said.numel():
            code, _, message = bytes(said.tolist()).decode().partition(" ")
            raise EcrmError.of_rank(rank, int(code), message)
    return result


def on_one_rank(transport: Transport, action: Callable[[], Any]) -> Any:
    """Collective: the return value of `action` on the lowest rank, a JSON value.

    If the lowest rank dies meanwhile, the next rank runs `action` again. Raises an error of
    `action` on every rank, as `collective_check` does.
    """
    while True:
        first = transport.live[0]

        def act(taker: int = first) -> Any:
            return action() if transport.rank == taker else None

        mine = collective_check(transport, act)
        said = share_json(transport, mine)
        if first in said:
            return said[first]


def own_folder(
    transport: Transport, folder: Path, host: str, check: Callable[[], None]
) -> tuple[RunLock, list[int]]:
    """Collective: take the folder of this run on every rank.

    Returns this rank's lock on the folder, and the ranks with a different folder under the same
    name.

    `check` is called by the rank taking the folder, before other ranks join. If the taking rank
    dies before it has the folder, the next rank takes the folder. Raises UsageError on every rank
    if another run holds the folder.
    """
    lock = collective_check(transport, lambda: RunLock(folder, host))
    while True:
        first = transport.live[0]

        def take(taker: int = first) -> None:
            if transport.rank == taker:
                lock.take()
                check()

        collective_check(transport, take)
        collective_check(transport, lock.join)
        sees = share_json(transport, lock.is_mine)
        if any(sees.values()):
            return lock, [rank for rank, seen in sees.items() if not seen]
        if first in sees:
            raise Unrecoverable(
                f"rank {first} has taken {folder}, and finds it taken by no run"
            ).on_all_ranks(min(sees))


def introduce(transport: Transport, host: str) -> list[int]:
    """Collective: let ranks on the same host read each other's shared memory.

    Returns the ranks able to read the memory shared by this rank.
    """
    shared_memory = transport.shared_memory
    if shared_memory is None:
        return []
    offers = share_json(transport, shared_memory.offer(host))
    others = {rank: offer for rank, offer in offers.items() if rank != transport.rank}
    accepted = share_json(transport, shared_memory.accept(host, others))
    readers = sorted(rank for rank, read in accepted.items() if transport.rank in read)
    shared_memory.share_with(readers)
    return readers
