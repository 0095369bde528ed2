"""Reports of a run for people: lines on the terminal and events in the run folder.

Every rank has the events; the view's reporter writes an event before taking part in the next
commit. If the reporter cannot write, all ranks learn so within a few commits. The other ranks keep
the events of the last commits, and a new reporter writes the events missing from the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ecrm.base.console import say
from ecrm.base.wording import counted, measured, named, survives_in_words
from ecrm.config.faults import Kill
from ecrm.engine.engine import Engine
from ecrm.placement.view import View
from ecrm.run.finite import REMEDY
from ecrm.run.metrics_endpoint import MetricsEndpoint
from ecrm.run.run_folder import RunFolder
from ecrm.run.slot_faults import Place

PROGRESS = "progress"

TOLD_AGAIN = frozenset((PROGRESS, "evaluation", "ended_early"))
"""Events told again whenever the step is done again."""

ONCE_A_STEP = TOLD_AGAIN | {"not_finite"}
"""Events told once a step, however often the step is done."""

Name = tuple[Any, ...]
"""The identity of an event in a run: the event, mostly a step, and more."""

KEPT_COMMITS = 3
"""Asking to stop for want of a disk takes one commit, a reshape may add one."""


def _restored_in_words(account: dict[str, Any]) -> str:
    """The losses of a restored shard, after a line for each checkpoint not used."""
    refused = "".join(f"! {line}\n" for line in account["refused"])
    return refused + (
        f"! shard {account['shard']} restored from step {account['checkpoint_step']}: the updates "
        f"of {counted(account['lost_steps'], 'step')} are lost; "
        f"gradients of {counted(account['steps_away'], 'step')} kept for it are applied "
        f"({counted(account['kept_rows'], 'row')}), those of "
        f"{counted(account['lost_slot_steps'], 'step')} of slots lost; meanwhile "
        f"{counted(account['last_seen_rows'], 'row')} as last seen and "
        f"{account['initial_rows']:,} initial ones stood in"
    )


def _back_in_words(fields: dict[str, Any]) -> str:
    """The state of all ranks after a recovery from a death or an interruption."""
    after = fields["recovery_seconds"] * 1000
    return f"back at commit {fields['committed']} after {after:.0f} ms"


def ended_in_words(fields: Mapping[str, Any]) -> str:
    """The reason to end training before the last step."""
    return f"training ends at step {fields['step']} of {fields['steps_wanted']}: {fields['why']}"


def _name_of(fields: dict[str, Any], rolled_back: int) -> Name:
    """The name of an event, equal in the accounts of all ranks.

    Ranks die once, views have numbers, and the stripes of a step's corruptions differ. After a
    rollback steps come again: `rolled_back` is the view number of the last rollback, -1 before any
    rollback.
    """
    event, step = fields["event"], fields.get("step")
    if event == "corruption":
        return event, step, rolled_back, fields["space"], fields["stripe"]
    if event == "not_finite":
        return event, step, rolled_back, fields["found_in"]
    if event == "evaluation":  # several functions may report in a step
        return event, step, rolled_back, *sorted(fields["values"])
    if event == "interrupted":
        return event, fields["number"]
    if event == "slot_failed":
        return event, fields["rank"]
    if fields.get("ranks"):
        return event, tuple(fields["ranks"])
    return (event, fields["epoch"]) if "epoch" in fields else (event, step, rolled_back)


def _names(events: list[dict[str, Any]]) -> set[Name]:
    """The names of all events of a file, given in the order of the file."""
    names, rolled_back = set(), -1
    for fields in events:
        names.add(_name_of(fields, rolled_back))
        if fields["event"] == "rolled_back":
            rolled_back = fields["epoch"]
    return names


class Reporter:
    """Passes an engine's events on; only the view's reporter writes and prints.

    `remedy` is the advice to a person about nonfinite losses.
    """

    def __init__(
        self,
        folder: RunFolder,
        processes: Mapping[int, Mapping[str, Any]],
        protected: int,
        durable: str = "",
        any_shards: bool = False,
        remedy: str = REMEDY,
        metrics: MetricsEndpoint | None = None,
    ) -> None:
        self._folder, self._processes, self._protected, self._durable = (
            folder,
            processes,
            protected,
            durable,
        )
        self._any_shards, self._remedy = any_shards, remedy
        self._metrics = MetricsEndpoint() if metrics is None else metrics
        self._engine: Engine | None = None
        self._kept: list[tuple[int, Name, Callable[[], tuple[dict[str, Any], str]]]] = []
        self._last_rollback = -1
        self._told: set[Name] | None = None  # ONCE_A_STEP; None if other ranks may have told more

    def watch(self, engine: Engine) -> None:
        """Report on this engine from now on."""
        self._engine = engine

    @property
    def _watched(self) -> Engine:
        assert self._engine is not None, "watch() comes before events"
        return self._engine

    @property
    def _speaks(self) -> bool:
        return self._engine is not None and self._engine.rank == self._engine.view.reporter

    @property
    def cannot_write(self) -> bool:
        """Whether this rank is the reporter and has failed to write the run folder."""
        return self._speaks and self._folder.trouble is not None

    def started(self, fields: dict[str, Any], in_words: str) -> None:
        """Write ranks.json, a line and the first event: the run begins."""
        if self._speaks:
            self._folder.ranks(self._watched.view, self._processes)
        self._tell({"event": "start", **fields}, in_words)

    def killing(self, kill: Kill, step: int) -> None:
        """Report this rank's own scheduled death, just before; no other rank can."""
        fields = {"rank": kill.rank, "step": step, "phase": kill.phase, "scheduled": str(kill)}
        self._folder.event({"event": "kill", **fields})

    def event(self, fields: dict[str, Any]) -> None:
        """Report one event of the engine."""
        if fields["event"] == "view":
            view: View = fields["view"]
            if self._speaks:
                self._folder.ranks(view, self._processes)
            self._tell(
                {
                    "event": "view",
                    "step": fields["step"],
                    "epoch": view.epoch,
                    "live": list(view.live),
                }
            )
            return
        self._tell(fields, getattr(self, f"_{fields['event']}")(fields))

    def progress(self, step: int, make: Callable[[], tuple[dict[str, Any], str]]) -> None:
        """Report the progress told every so many steps.

        `make` returns the fields and the line; only the reporting rank calls `make`.
        """
        self._write_or_keep((PROGRESS, step, self._last_rollback), make)

    def _tell(self, fields: dict[str, Any], in_words: str = "") -> None:
        name = _name_of(fields, self._last_rollback)
        if fields["event"] == "rolled_back":
            self._last_rollback = fields["epoch"]
        self._write_or_keep(name, lambda: (fields, in_words))

    def _write_or_keep(self, name: Name, make: Callable[[], tuple[dict[str, Any], str]]) -> None:
        """Write an event, after events the reporter before may have left out; or keep the event.

        Events told again with a step are not kept once the step is undone.
        """
        commits = self._watched.state.commits
        self._kept = [
            (at, kept, made)
            for at, kept, made in self._kept
            if at >= commits - KEPT_COMMITS and not self._comes_again(kept)
        ]
        self._kept.append((commits, name, make))
        if not self._speaks:
            self._told = None
            self._metrics.end()
            return
        before = self._told
        if before is None:
            events = self._folder.events()
            self._metrics.begin(events)
            before = _names(events)
        self._told = {one for one in before if one[0] in ONCE_A_STEP and self._may_come(one)}
        for _, kept, made in self._kept:
            if kept in before or kept in self._told:
                continue
            if kept[0] in ONCE_A_STEP:
                self._told.add(kept)
            fields, text = made()
            self._folder.event({"event": kept[0], **fields})
            self._metrics.tell({"time": time.time(), "event": kept[0], **fields})
            if text:
                say(text)
        self._kept = []

    def _comes_again(self, name: Name) -> bool:
        return name[0] in TOLD_AGAIN and bool(name[1] > self._watched.step)

    def _may_come(self, name: Name) -> bool:
        """Whether the step of an event may yet be undone."""
        return bool(name[1] >= self._watched.committed)

    def _failure(self, fields: dict[str, Any]) -> str:
        moved = [f"shard {shard} to rank {rank}" for shard, rank in fields["shards"].items()]
        moved += [f"slot {slot} to rank {rank}" for slot, rank in fields["slots"].items()]
        moved += [
            f"shard {shard}, being rebuilt, to rank {rank}"
            for shard, rank in fields["moved"].items()
        ]
        left, then = fields["failures_left"], fields["failures_left_when_rebuilt"]
        survives = survives_in_words(left) + (f", {then} once rebuilt" if then != left else "")
        if self._any_shards:
            survives += ", and any ranks that hold no dense replica"
        elif then < self._protected:
            survives += (
                f" (not {self._protected}: too few ranks are left to keep stripe members apart)"
            )
        if self._durable:
            survives += f"; beyond that all roll back to {self._durable}"
        return (
            f"! {named('rank', fields['ranks'])} died in step {fields['step']} "
            f"({fields['phase']}); {_back_in_words(fields)}; "
            f"{', '.join(moved) or 'no role moved'}; {survives}"
        )

    def _slot_failed(self, fields: dict[str, Any]) -> str:
        if fields["error"]:
            return ""  # the rank has said so itself
        place = Place(fields["step"], fields["slot"], fields["part"])
        return (
            f"! rank {fields['rank']} died while the script's own code ran, in {place}; if another "
            "rank dies there, the run ends"
        )

    def _interrupted(self, fields: dict[str, Any]) -> str:
        why = f": {fields['why']}" if fields["why"] else ""
        return (
            f"! step {fields['step']} interrupted ({fields['phase']}), all ranks live; "
            f"{_back_in_words(fields)}{why}"
        )

    def _resumed(self, fields: dict[str, Any]) -> str:
        stall = fields["stall_seconds"] * 1000
        return f"! training goes on, {stall:.0f} ms between the steps before and after"

    def _rebuilt(self, fields: dict[str, Any]) -> str:
        return (
            f"! {named('shard', fields['shards'])} rebuilt in {fields['rebuild_seconds']:.2f} s "
            f"({fields['rebuilt_bytes']:,} bytes, {counted(fields['on_demand_rows'], 'row')} on "
            "demand); "
            f"{survives_in_words(fields['failures_left'])}"
        )

    def _restored(self, fields: dict[str, Any]) -> str:
        return "\n".join(map(_restored_in_words, fields["shards"]))

    def _rolled_back(self, fields: dict[str, Any]) -> str:
        return (
            f"! rolled back to step {fields['step']} from {fields['from_step']} in "
            f"{fields['seconds']:.2f} s, "
            f"which redoes {counted(max(fields['from_step'] - fields['step'], 0), 'step')}: "
            f"{fields['why']}"
        )

    def _checkpoint(self, fields: dict[str, Any]) -> str:
        return (
            f"checkpoint of step {fields['step']} ({fields['kind']}): "
            f"{counted(fields['rows'], 'row')}, {fields['bytes']:,} bytes "
            f"in {fields['seconds']:.2f} s, training waited {fields['stall_seconds']:.2f} s"
        )

    def _checkpoint_failed(self, fields: dict[str, Any]) -> str:
        return f"! no checkpoint of step {fields['step']}: {fields['why']}"

    def _evaluation(self, fields: dict[str, Any]) -> str:
        away = fields["shards_away"]
        without = f" without {named('shard', away)}" if away else ""
        values = "  ".join(f"{name} {measured(value)}" for name, value in fields["values"].items())
        return f"evaluation at step {fields['step']}{without}: {values}"

    def _ended_early(self, fields: dict[str, Any]) -> str:
        return ended_in_words(fields)

    def _not_finite(self, fields: dict[str, Any]) -> str:
        return f"! {fields['why']}; {self._remedy}; training goes on"

    def _corruption(self, fields: dict[str, Any]) -> str:
        first, last = fields["rows"]
        where = f"in the stripe of rows {first} to {last} of row space {fields['space']}"
        if fields["kind"] == "parity":
            where = f"in parity of shard {fields['shard']} {where}"
        elif fields["kind"] != "unknown":
            what = "optimizer state of row" if fields["kind"] == "state" else "row"
            place = (
                "that fills its stripe up"
                if fields["table"] is None
                else f"{fields['row']} of table {fields['table']}"
            )
            where = f"in {what} {place} (shard {fields['shard']})"
        outcome = "repaired, nothing had used it"
        if not fields["repaired"]:
            outcome = "not repaired: which unit is wrong cannot be told"
        elif not fields["exact"]:
            outcome = (
                "repaired, but a step may have used it: "
                "the model may not be that of an undisturbed run"
            )
        return f"! corruption {where}, found in step {fields['step']}; {outcome}"

    def _reshaped(self, fields: dict[str, Any]) -> str:
        return (
            f"! laid out anew over {counted(fields['servers'], 'server')} (k={fields['k']} "
            f"m={fields['m']}) in {fields['seconds']:.2f} s "
            f"({fields['moved_bytes']:,} bytes moved); {survives_in_words(fields['failures_left'])}"
        )
