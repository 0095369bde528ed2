"""Scrubbing: each commit encodes the next window of stripes again and compares the parity.

Every unit of a stripe travels once, to the holder of the stripe's first parity. Between bringing
parity up to date and the commit, rows and parity are of one step. XOR deltas leave the syndrome of
a stripe unchanged, so an error stays visible through all updates.

Findings count from the commit on, like everything learned from an exchange. The agreement tells
whether any rank has findings. Only then do all ranks share the findings and agree once more, and
each rank corrects its own units. Nothing is changed before, so taking back a step takes back only
the window. The window is then checked again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import lazy_zeros
from ecrm.kernels.decode import decode
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.coding.code import ReedSolomon, find_wrong_unit
from ecrm.protection.context import ProtectionContext
from ecrm.protection.parity import ParityRows
from ecrm.storage.hosted import ShardSpace
from ecrm.transport.message import Part, in_groups


@dataclass(frozen=True)
class Finding:
    """A stripe with parity and data in conflict; `unit` is the wrong unit, `None` if unknown.

    `error`, uint8 [record bytes] or empty, is the XOR of the unit's wrong and right bytes. `exact`:
    nothing has used the wrong bits, so with the error corrected the model is the undisturbed one.
    """

    space: int
    stripe: int
    unit: int | None
    error: Tensor
    exact: bool

    @property
    def repaired(self) -> bool:
        return self.unit is not None


@dataclass
class ScrubReport:
    """Totals over all ranks, up to the commit.

    Records compared, data and parity; passes over all records; findings.
    """

    rows_checked: int = 0
    passes: int = 0
    corruptions: int = 0
    repaired: int = 0
    exact: int = 0


@dataclass
class _Window:
    """Stripes of one row space checked since the commit.

    `periods` are int64; `found` are the rank's own findings, `told` the findings of all ranks.
    """

    space: int
    periods: Tensor
    found: list[Finding] = field(default_factory=list)
    told: list[Finding] = field(default_factory=list)


class Scrub:
    """One rank's part in passing over all stripes; every live rank makes the same calls.

    `rows_per_step` counts data and parity rows per shard and check, at least one stripe of each
    residue; `rows_per_pass` counts the rows of all shards. `report` and the place in the pass are
    the same on all ranks at a commit.
    """

    def __init__(
        self,
        shape: StripeShape,
        code: ReedSolomon,
        context: ProtectionContext,
        parity: dict[ShardSpace, ParityRows],
        rows_per_step: int,
        report: ScrubReport | None = None,
    ) -> None:
        self._shape, self._context, self._parity = shape, context, parity
        self._coefficients = code.coefficients
        self._syndrome_matrix = torch.from_numpy(
            np.hstack([code.coefficients, np.eye(shape.m, dtype=np.uint8)])
        )
        self._rows_per_step = rows_per_step
        self._rows_per_period = shape.shards * shape.width
        self.rows_per_pass = (
            sum(layout.periods for layout in context.layouts) * self._rows_per_period
        )
        self._space = self._first = 0  # begin of the next window
        self._window: _Window | None = None
        # data rows used by steps since the last check of the rows
        self._used: dict[ShardSpace, Tensor] = {}
        # with fewer rows checked, a rebuild may have read the wrong bits of a finding
        self._exact_from = 0
        # (space, stripe) of findings told before and not repaired; the same on all ranks
        self._known: set[tuple[int, int]] = set()
        self.report = report or ScrubReport()

    @property
    def clean(self) -> bool:
        """Whether the rank has no findings since the commit."""
        return self._window is None or not self._window.found

    def used(self, shard: int, space: int, rows: Tensor) -> None:
        """Note local rows of a hosted shard as read and changed by a step."""
        self._mask(shard, space)[rows] = True

    def rebuilding(self, shards: Collection[int]) -> None:
        """Note that rows of `shards` will be decoded.

        Present errors may get into decoded rows; rows and parity agree afterwards.
        """
        self._exact_from = self.report.rows_checked + self.rows_per_pass
        members = [set(self._shape.members(residue)) for residue in range(self._shape.shards)]
        self._known = {
            known
            for known in self._known
            if members[known[1] % self._shape.shards].isdisjoint(shards)
        }

    def check(self, view: View, at_least: int = 0) -> None:
        """Collective, parity up to date, nothing rebuilding: compare the next window.

        The window has about `rows_per_step` rows per shard, or `at_least` rows if more.
        """
        count = max(1, max(self._rows_per_step, at_least) // self._shape.width)
        periods = torch.arange(
            self._first, min(self._first + count, self._context.layouts[self._space].periods)
        )
        window = _Window(self._space, periods)
        units: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for tensors in self._context.transport.exchange(self._units(window, view)).values():
            for head, records, used in in_groups(tensors, 3):
                units[head] = records.view(periods.numel(), -1), used
        for shard in view.shards_of(self._context.transport.rank):
            residue = self._shape.residue_of_unit(shard, self._shape.k)
            window.found += self._judge(
                window, residue, [units[residue, unit] for unit in range(self._shape.width)]
            )
        self._window = window

    def tell(self) -> None:
        """Collective, after some rank was not `clean`: share the findings."""
        window, message = self._window, list[Part]()
        assert window is not None
        for finding in window.found:
            unit = -1 if finding.unit is None else finding.unit
            message += ((finding.space, finding.stripe, unit, int(finding.exact)), finding.error)
        for tensors in self._context.transport.share(message).values():
            for (space, stripe, unit, exact), error in in_groups(tensors, 2):
                window.told.append(
                    Finding(space, stripe, None if unit < 0 else unit, error, bool(exact))
                )

    def committed(self) -> list[Finding]:
        """Accept the checked window and the told findings: correct the rank's wrong units.

        Returns the findings of all ranks, the same on every rank.
        """
        window, self._window = self._window, None
        if window is None:
            return []
        for finding in window.told:
            if finding.repaired:
                self._put_right(finding)
            else:
                self._known.add((finding.space, finding.stripe))
        first, stop = int(window.periods[0]), int(window.periods[-1]) + 1
        for (_, space), mask in self._used.items():
            if space == window.space:
                mask[first * self._shape.k : stop * self._shape.k] = False
        self.report.rows_checked += window.periods.numel() * self._rows_per_period
        self.report.corruptions += len(window.told)
        self.report.repaired += sum(finding.repaired for finding in window.told)
        self.report.exact += sum(finding.repaired and finding.exact for finding in window.told)
        self._go_on_from(stop)
        return window.told

    def told(self) -> dict[str, Any]:
        """The report and the place in the pass at the last commit, in JSON, for a new rank."""
        return {
            "report": asdict(self.report),
            "place": [self._space, self._first, self._exact_from],
            "known": sorted(self._known),
        }

    def take(self, told: Mapping[str, Any]) -> None:
        """Go on from the place told by another rank."""
        self.report = ScrubReport(**told["report"])
        self._space, self._first, self._exact_from = told["place"]
        self._known = {(space, stripe) for space, stripe in told["known"]}

    def undo(self) -> None:
        """Forget the window checked since the commit; a second call changes nothing."""
        self._window = None

    def _go_on_from(self, period: int) -> None:
        self._first = period
        if period >= self._context.layouts[self._space].periods:
            self._first, self._space = 0, self._space + 1
        if self._space == len(self._context.layouts):
            self._space = 0
            self.report.passes += 1

    def _mask(self, shard: int, space: int) -> Tensor:
        key = (shard, space)
        if key not in self._used:
            self._used[key] = lazy_zeros(
                self._context.layouts[space].data_rows_per_shard, dtype=np.bool_
            )
        return self._used[key]

    def _units(self, window: _Window, view: View) -> dict[int, list[Part]]:
        """Message per judging rank: (residue, unit), records of the window, used flags."""
        k, m = self._shape.k, self._shape.m
        outgoing: dict[int, list[Part]] = {}
        for shard, space in sorted(self._parity):
            for unit in range(self._shape.width) if space == window.space else ():
                residue = self._shape.residue_of_unit(shard, unit)
                judge = view.shards[self._shape.shard_of_unit(residue, k)]
                if unit < k:
                    local = window.periods * k + unit
                    records, used = (
                        self._context.hosted[shard, space].store.read(local),
                        self._mask(shard, space)[local],
                    )
                else:
                    records, used = (
                        self._parity[shard, space].read(window.periods * m + unit - k),
                        torch.empty(0),
                    )
                outgoing.setdefault(judge, []).extend(((residue, unit), records, used))
        return outgoing

    def _judge(
        self, window: _Window, residue: int, units: list[tuple[Tensor, Tensor]]
    ) -> list[Finding]:
        """Findings among the stripes of one residue, from each unit's records and used flags."""
        k = self._shape.k
        syndromes = decode([records for records, _ in units], self._syndrome_matrix)
        wrong = syndromes.any(dim=2).any(dim=0)
        found = []
        for place in wrong.nonzero().squeeze(1).tolist():
            stripe = int(window.periods[place]) * self._shape.shards + residue
            if (window.space, stripe) not in self._known:
                unit, error = find_wrong_unit(self._coefficients, syndromes[:, place].numpy()) or (
                    None,
                    np.empty(0, np.uint8),
                )
                used = unit is None or (unit < k and bool(units[unit][1][place]))
                exact = not used and self.report.rows_checked >= self._exact_from
                found.append(
                    Finding(window.space, stripe, unit, torch.from_numpy(error).clone(), exact)
                )
        return found

    def _put_right(self, finding: Finding) -> None:
        """At a commit, with all logs empty: XOR the error away, if the rank holds the unit."""
        assert finding.unit is not None
        shard = self._shape.shard_of_unit(finding.stripe % self._shape.shards, finding.unit)
        key = (shard, finding.space)
        if key not in self._parity:
            return
        local = self._context.layouts[finding.space].local_of_unit(
            torch.tensor([finding.stripe]), finding.unit
        )
        if finding.unit < self._shape.k:
            self._context.hosted[key].correct(local, finding.error.unsqueeze(0))
        else:
            self._parity[key].correct(local, finding.error)
