"""Messages between ranks at the start, before an engine exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ecrm.base.errors import EcrmError, UsageError
from ecrm.engine.failures import FailureLog
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.message import json_part, of_json_part, tensors


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


def gather_results(transport: Transport, action: Callable[[], Any]) -> dict[int, Any]:
    """Collective: the return value of `action`, a JSON value, of every rank.

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
    mine = {"value": result} if error is None else {"error": [error.exit_code, str(error)]}
    shared = share_at_start(transport, [json_part(mine)])
    said = {rank: of_json_part(part) for rank, (part,) in shared.items()}
    for rank in sorted(said):
        if "error" in said[rank]:
            raise EcrmError.of_rank(rank, *said[rank]["error"])
    return {rank: answer["value"] for rank, answer in said.items()}


def on_all(transport: Transport, action: Callable[[], Any]) -> Any:
    """Return the value of `action`, which sees the same facts on all ranks; no message is sent.

    An error of `action` is the error of every rank.
    """
    try:
        return action()
    except EcrmError as error:
        error.on_all_ranks(transport.live[0])
        raise


def decide(transport: Transport, action: Callable[[], Any]) -> Any:
    """Collective: the return value of `action` on the lowest rank, a JSON value.

    If the lowest rank dies meanwhile, the next rank runs `action` again. Raises an error of
    `action` on every rank.
    """
    while True:
        first = transport.live[0]
        said = gather_results(transport, action if transport.rank == first else lambda: None)
        if first in said:
            return said[first]
