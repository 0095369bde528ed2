"""Messages between ranks at the start, before an engine exists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ecrm.base.errors import EcrmError, UsageError
from ecrm.engine.failures import FailureLog
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.message import Received, json_part, of_json_part, tensors


def share_at_start(
    transport: Transport, mine: Sequence[torch.Tensor]
) -> dict[int, list[torch.Tensor]]:
    """Call `Transport.share` before the first step, without the ranks dead by then.

    An existing engine notices the deaths in its first call, and recovers. Raises LostTouch if the
    call keeps failing though no rank dies.

    The agreement behind the call may end well on some ranks and fail on others. So each rank sends
    the number of its round along. A rank that meets a later round, or a recovery of engines, knows
    that the agreement has ended well, and has all parts already. The ranks ahead share again.
    """
    log, mine_now = FailureLog(), transport.rounds_at_start
    shared: dict[int, list[torch.Tensor]] = {}
    while True:
        try:
            received = transport.share([(mine_now,), *mine])
            rounds = [_round_of(parts) for parts in received.values()]
            if max(rounds) > mine_now:
                break
            if min(rounds) == mine_now:  # else a rank has missed the end of the round before
                shared = {rank: tensors(parts[1:]) for rank, parts in received.items()}
                if transport.agree(True):
                    break
        except PeerFailure as failure:
            live = transport.live
            transport.shrink()
            log.shrunk(changed=transport.live != live)
            log.check(log.futile, str(failure))
    transport.rounds_at_start += 1
    return shared


def _round_of(parts: Sequence[Received]) -> float:
    """The round of a rank's parts; infinity for parts of an engine."""
    return parts[0][0] if parts and isinstance(parts[0], tuple) else math.inf


def gather_results(transport: Transport, action: Callable[[], Any]) -> dict[int, Any]:
    """Collective: the return value of `action`, a JSON value, of every rank.

    If `action` fails on some rank, raises the lowest failed rank's error on every rank.
    """
    if transport.joined and transport.said_at_start:
        before = next_said(transport)
        return {**before, transport.rank: action()}
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
    values = {rank: answer["value"] for rank, answer in said.items()}
    if not transport.joined:
        transport.said_at_start = (*transport.said_at_start, values)
    return values


def next_said(transport: Transport) -> dict[int, Any]:
    """On a rank that joins: the values that all ranks have given in this call at the start."""
    said, *rest = transport.said_at_start
    transport.said_at_start = tuple(rest)
    return dict(said)


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
        # a rank that is a round further on may still count a dead rank among the live
        decides = transport.rank == transport.live[0]
        if transport.joined:
            said = next_said(transport)
        else:
            said = gather_results(transport, (lambda: [action()]) if decides else list)
        decided = [value for values in said.values() for value in values]
        if decided:
            return decided[0]
