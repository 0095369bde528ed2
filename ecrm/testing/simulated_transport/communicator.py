"""The contributions of a generation of live ranks to their calls: values and rules alone.

A communicator is used from a shrink to the next shrink. The ranks make the same calls in the same
order, and a call is known by its number. The data of a call is with a rank when all members have
contributed and no member died before the member's part had reached the rank.
"""

from __future__ import annotations

from collections.abc import Collection

SHRINK = "shrink"


class CallMismatch(Exception):
    """Two ranks made different calls at the same place."""


class Call:
    """A collective call: contributions by rank, and the ranks reached by dying ranks."""

    __slots__ = ("contributions", "method", "number", "reached")

    def __init__(self, method: str, number: int) -> None:
        self.method = method
        self.number = number
        self.contributions: dict[int, object] = {}
        self.reached: dict[int, Collection[int]] = {}


class Communicator:
    """The ranks live after a shrink, or at the start, and their calls since."""

    def __init__(self, members: tuple[int, ...], dead: Collection[int] = ()) -> None:
        self.members = members
        self.dead = set(dead)
        self.left: set[int] = set()
        self.shrinking: set[int] = set()
        self.admitting: dict[int, int] = {}
        self._calls: dict[int, Call] = {}
        self._numbers = dict.fromkeys(members, 0)

    @property
    def revoked(self) -> bool:
        return bool(self.shrinking)

    @property
    def troubled(self) -> bool:
        """Whether a call may fail: a member died, or has begun to shrink."""
        return bool(self.dead) or bool(self.shrinking)

    def enter(self, rank: int, method: str, contribution: object) -> Call:
        """Count `contribution` for the rank's next call.

        Raises CallMismatch if other ranks make a different call.
        """
        number = self._numbers[rank]
        call = self._calls.get(number)
        if call is None:
            call = self._calls[number] = Call(method, number)
            # The rank has completed the previous call, hence all members have entered that call and
            # left the call before.
            self._calls.pop(number - 2, None)
        elif call.method != method:
            other = next(iter(call.contributions))
            raise CallMismatch(
                f"call {number} of {self.members}: rank {other} {call.method}, rank {rank} {method}"
            )
        self._numbers[rank] = number + 1
        call.contributions[rank] = contribution
        return call

    def is_full(self, call: Call) -> bool:
        return len(call.contributions) == len(self.members)

    def has_all(self, rank: int, call: Call) -> bool:
        """Whether all data needed by `rank` to complete `call` is with `rank`."""
        if len(call.contributions) != len(self.members):
            return False
        return not call.reached or all(rank in reached for reached in call.reached.values())

    def all_shrinking(self) -> bool:
        """Whether a shrink has no member left to wait for."""
        return all(
            rank in self.shrinking or rank in self.dead or rank in self.left
            for rank in self.members
        )

    def after_shrink(
        self, unnoticed: Collection[int], newcomers: Collection[int] = ()
    ) -> Communicator:
        """The communicator of survivors and newcomers.

        This shrink fails to drop the dead in `unnoticed`.
        """
        survivors = self.shrinking - self.dead
        return Communicator(tuple(sorted(survivors.union(unnoticed, newcomers))), unnoticed)
