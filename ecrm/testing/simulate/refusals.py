"""Checks of refusals to go on: the named ranks are dead, and too much is lost."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ecrm.base.errors import Unrecoverable
from ecrm.engine.engine import Engine
from ecrm.placement.view import View
from ecrm.testing.simulate.promise import Circle, Violation, lost_shards


@dataclass(frozen=True)
class Refusal:
    """A refusal of `rank` to go on: the text, and the rank's knowledge at the refusal.

    `committed` is the number of committed steps. `view` is the last view, `live` are the live ranks
    and `dense` the live holders of the dense replica. `unrenewed` counts the failure domains lost
    since the last commit of a step. Without copies at slots `unrenewed` is 0.
    """

    rank: int
    text: str
    committed: int
    view: View
    circle: Circle
    live: tuple[int, ...]
    dense: tuple[int, ...]
    unrenewed: int = 0

    @staticmethod
    def of(rank: int, error: Unrecoverable, engines: Mapping[int, Engine]) -> Refusal:
        engine = engines[rank]
        live = engine.state.transport.live
        dense = tuple(
            mate for mate in live if mate in engines and engines[mate].state.dense is not None
        )
        counts = engine.state.protection.kind.copies_at_slots  # at ranks without shards too
        unrenewed = (
            len(
                {
                    engine.view.domains[mate]
                    for mate in engine.state.live_at_commit
                    if mate not in live
                }
            )
            if counts
            else 0
        )
        return Refusal(
            rank,
            str(error),
            engine.committed,
            engine.view,
            Circle.of(engine.state.protection.shape),
            live,
            dense,
            unrenewed,
        )


def check_refusals(refusals: Sequence[Refusal]) -> None:
    """Raise Violation if a refusal names wrong ranks or shards, or if the loss was survivable."""
    for refusal in refusals:
        _check(refusal)


def _check(refusal: Refusal) -> None:
    text, view, circle = refusal.text, refusal.view, refusal.circle
    dead = set(view.live).difference(refusal.live)
    ranks, shards = (
        _numbers(r"ranks? ([\d, ]+) died", text),
        _numbers(r"shards? ([\d, ]+) lost", text),
    )
    if "replica of the dense model is lost" in text:
        held = _numbers(r"ranks \[([\d, ]+)\]", text)
        if held != set(view.dense) or ranks not in (None, dead):
            raise Violation(
                f"a refusal names ranks {ranks} and holders {held}, dead are {sorted(dead)}, "
                f"holders {view.dense}: {text}"
            )
        if refusal.dense if ranks is None else set(view.dense).difference(dead):
            raise Violation(
                f"a refusal although ranks {refusal.dense} hold the dense replica: {text}"
            )
        return
    if ranks != dead:
        raise Violation(f"a refusal names ranks {ranks}, dead are {sorted(dead)}: {text}")
    lost = lost_shards(view, dead)
    if shards is None or not shards.issubset(lost):
        raise Violation(f"a refusal names shards {shards}, lost are {sorted(lost)}: {text}")
    if circle.most_units_on(shards) <= circle.m and refusal.unrenewed <= circle.m:
        raise Violation(
            f"a refusal although no stripe has lost more than m units, {circle}, "
            f"shards {sorted(lost)} lost: {text}"
        )


def _numbers(pattern: str, text: str) -> set[int] | None:
    match = re.search(pattern, text)
    return None if match is None else {int(number) for number in re.findall(r"\d+", match[1])}
