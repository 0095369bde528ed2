"""What tests on the simulated cluster share."""

from __future__ import annotations

from collections.abc import Callable


def dies_once(
    doomed: set[int], allowed: Callable[[int], bool]
) -> Callable[[int, tuple[int, ...]], bool]:
    """A `may_kill` of RandomFaults: any rank that is `allowed` to die does so once.

    Those that do are added to `doomed`.
    """

    def may_kill(rank: int, killed: tuple[int, ...]) -> bool:
        if rank in doomed or not allowed(rank):
            return False
        doomed.add(rank)
        return True

    return may_kill
