"""Every event of a run, typed once: meaning, fields, units, identity and printed line.

An event is a frozen dataclass. The class name gives the event's name in events.jsonl: `RolledBack`
is `rolled_back`. The first sentences of the docstring, and the annotations of the fields, make
docs/reference/events.md. The order of the fields is the order in events.jsonl.

Most events come from the engine. All rooms with events of their own may import this module. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from ecrm.base.fields import Field, problems
from ecrm.base.wording import counted, measured, named, survives_in_words

MB = 1e6

Identity = tuple[Any, ...]
"""The identity of an event in a run: the event's name, mostly a step, and more."""

_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false"} | {
    Sequence: "list",
    Mapping: "object",
}
"""The words of `ecrm.base.fields.TYPES` for the types of fields."""


@dataclass(frozen=True)
class Told:
    """Meaning and unit of a field, beside the type in the annotation; see `Field`.

    An `optional` field is left out of events.jsonl if the value is None.
    """

    meaning: str
    unit: str = ""
    optional: bool = False
    parts: Mapping[str, Field] = field(default_factory=dict)


@dataclass(frozen=True)
class Terms:
    """Facts of a run in the lines of its events.

    - `protected`: the failures to survive at once at the start.
    - `durable`: the checkpoint or the mapped files to roll back to, in words; "" for neither.
    - `any_shards`: whether shards of any number may be lost.
    - `remedy`: the advice to a person about nonfinite losses.
    """

    protected: int = 0
    durable: str = ""
    any_shards: bool = False
    remedy: str = ""


class Event:
    """An event of a run, with all fields of the line in events.jsonl but `time` and `event`.

    `identified_by` names the fields that tell the event from events of the same name.
    """

    name: ClassVar[str]
    identified_by: ClassVar[tuple[str, ...]] = ("step",)

    def __init_subclass__(cls) -> None:
        cls.name = re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        EVENTS[cls.name] = cls

    @classmethod
    def identity(cls, given: Mapping[str, Any], rolled_back: int, joined: int = -1) -> Identity:
        """The identity of an event with the `given` fields, equal in the accounts of all ranks.

        After a rollback steps come again, and ranks that have joined may die again. `rolled_back`
        is the view number of the last rollback, `joined` of the last join; -1 before any. The
        fields may come from a line of events.jsonl.
        """
        found: list[Any] = [cls.name]
        for each in cls.identified_by:
            found.append(_hashable(given.get(each)))
            if each == "step":
                found.append(rolled_back)
            if each in ("rank", "ranks"):
                found.append(joined)
        return tuple(found)

    def fields(self) -> dict[str, Any]:
        """The fields by name, without optional fields that are None."""
        assert dataclasses.is_dataclass(self)
        values = {each: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {
            each.name: value
            for each, value in values.items()
            if value is not None or each.default is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """The line of events.jsonl as an object, but for `time`."""
        return {"event": self.name, **self.fields()}

    def line(self, terms: Terms) -> str:
        """The printed words, mostly one line; "" for an event without words."""
        return ""


PROGRESS_LINE = re.compile(r"step +\d+(/| of at most )\d+ ")
"""The begin of the line of `Progress`."""
EVENT_LINE = re.compile(r"! |(checkpoint of|evaluation at|training ends at) step ")
"""The begin of the lines of all further events."""

EVENTS: dict[str, type[Event]] = {}
"""Every event by name, in the order of docs/reference/events.md."""


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted(value))
    return tuple(value) if isinstance(value, list) else value


def meaning_of(kind: type[Event]) -> str:
    """The meaning of an event in one or two sentences."""
    return " ".join((kind.__doc__ or "").split())


def fields_of(kind: type[Event]) -> dict[str, Field]:
    """The fields of an event by name, in the order of events.jsonl."""
    assert dataclasses.is_dataclass(kind)
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: _field(hints[each.name]) for each in dataclasses.fields(kind)}


def _field(hint: Any) -> Field:
    given, told = get_args(hint)
    types = get_args(given) if get_origin(given) is UnionType else (given,)
    (kind,) = (each for each in types if each is not NoneType)
    return Field(
        _WORDS[get_origin(kind) or kind],
        told.meaning,
        told.unit,
        null=NoneType in types and not told.optional,
        optional=told.optional,
        parts=told.parts,
    )


def of_line(line: Mapping[str, Any]) -> Event:
    """The event of a line of events.jsonl, written by this version of ECRM.

    Keys of objects stay text, as in JSON. Raises KeyError and TypeError for an unknown event and
    for missing fields.
    """
    kind = EVENTS[line["event"]]
    given = {key: value for key, value in line.items() if key not in ("time", "event")}
    return kind(**given)


def check_event(event: Mapping[str, Any]) -> None:
    """Raise ValueError unless a line of events.jsonl matches EVENTS: name, fields, types."""
    name = event.get("event")
    if name not in EVENTS:
        raise ValueError(f"no event of ecrm/engine/events.py: {event}")
    given = {key: value for key, value in event.items() if key not in ("time", "event")}
    wrong = problems(fields_of(EVENTS[name]), given)
    if wrong:
        raise ValueError(f"event {name}: {'; '.join(wrong)}: {event}")


Step = Annotated[int, Told("step in which it happened")]
Phase = Annotated[str, Told("phase of the step, such as `parity`")]
Committed = Annotated[int, Told("last commit, to which all ranks have gone back")]
Redone = Annotated[int, Told("steps begun after that commit, which are done again", "steps")]
RecoverySeconds = Annotated[float, Told("from noticing to the end of the recovery", "seconds")]
FailuresLeft = Annotated[int, Told("failures that can be survived at once from now on", "failures")]
Dead = Annotated[Sequence[int], Told("ranks that died")]
Epoch = Annotated[int, Told("number of the view")]

GPU = {
    "name": Field("text", "its model, or `imitated`"),
    "bytes": Field("integer", "its memory", "bytes", optional=True),
    "taken": Field("integer", "of that, taken by all who use it", "bytes", optional=True),
}
RESUMED = {
    "from": Field("text", "run folder, checkpoint or folder of mapped files"),
    "step": Field("integer", "steps that are done already", "steps"),
    "changed": Field("list", "settings that are not as before, as sentences"),
    "data_began": Field("integer", "step at which this data begins"),
}
RESTORED = {
    "shard": Field("integer", "the shard"),
    "lost_at_step": Field("integer", "step in which it was lost"),
    "checkpoint_step": Field("integer", "step of the checkpoint that it is from; 0: none"),
    "refused": Field("list", "why newer checkpoints were not used, as sentences"),
    "lost_steps": Field("integer", "steps whose updates are lost", "steps"),
    "steps_away": Field("integer", "steps trained without the shard", "steps"),
    "kept_rows": Field("integer", "rows that got gradients of these steps later", "rows"),
    "lost_slot_steps": Field("integer", "gradients lost of these steps: slots times steps"),
    "last_seen_rows": Field("integer", "rows asked for that stood in as last seen", "rows"),
    "initial_rows": Field("integer", "rows asked for that stood in as initialised", "rows"),
}


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """Training begins, or goes on in a new start of the same run."""

    identified_by = ()

    version: Annotated[str, Told("version of ECRM")]
    kernels: Annotated[str, Told("instruction set of the C++ kernels")]
    versions: Annotated[
        Mapping[str, Any], Told("packages and kind of CPU that decide the bits, by name")
    ]
    version_set: Annotated[str, Told("name of `versions`: equal names, equal bits")]
    dense_arch: Annotated[
        str | None,
        Told("implementation of the interaction that is used; not of a script", optional=True),
    ] = None
    script: Annotated[str | None, Told("the script that is run", optional=True)] = None
    script_sha256: Annotated[
        str | None, Told("SHA-256 of the script's text and arguments", optional=True)
    ] = None
    open_end: Annotated[
        bool | None,
        Told(
            "true where a script's data may end before its steps do; else left out", optional=True
        ),
    ] = None
    world_size: Annotated[int, Told("number of ranks", "ranks")]
    oversubscribed: Annotated[
        str | None, Told("`bind`, `sleep` or `poll`; null where each rank has a core")
    ]
    shares_memory_with: Annotated[
        Sequence[int], Told("ranks that read shared memory of the rank that writes this event")
    ]
    config: Annotated[Mapping[str, Any], Told("effective config, by section and key")]
    kills: Annotated[Sequence[str], Told("scheduled kills, RANK@STEP:PHASE each")]
    gpu: Annotated[
        Mapping[str, Any] | None,
        Told(
            "GPU of the rank that writes this event, once tables are there; without one left out",
            optional=True,
            parts=GPU,
        ),
    ] = None
    run: Annotated[
        Mapping[str, Any] | None,
        Told(
            "what the model depends on; a later start of this run must have the same",
            optional=True,
        ),
    ] = None
    before: Annotated[
        str | None,
        Told("how the start before this one ended: `stopped`, `failed` or `killed`", optional=True),
    ] = None
    resumed: Annotated[
        Mapping[str, Any] | None,
        Told("with `--resume`: what the run goes on from", optional=True, parts=RESUMED),
    ] = None
    init_from: Annotated[
        str | None,
        Told("with `--init-from`: checkpoint that the weights are from", optional=True),
    ] = None
    set_up_seconds: Annotated[float, Told("time to build or load the model", "seconds")]
    failures_left: FailuresLeft

    def about(self) -> dict[str, Any]:
        """The fields that summary.json has too."""
        return {name: value for name, value in self.fields().items() if name != "failures_left"}

    def in_words(self, trained: str) -> str:
        """The first line of a run; `trained` has the ranks, the protection and the steps."""
        resumed = f"from step {self.resumed['step']}, " if self.resumed is not None else ""
        begins = f"with the weights of {self.init_from}, " if self.init_from is not None else ""
        arch = f"dense arch {self.dense_arch}, " if self.dense_arch is not None else ""
        return (
            f"{resumed}{begins}{trained}; {arch}kernels {self.kernels}, "
            f"versions {self.version_set}{self._gpu_in_words}"
        )

    @property
    def _gpu_in_words(self) -> str:
        gpu = self.gpu
        if gpu is None:
            return ""
        if "bytes" not in gpu:
            return f", GPU {gpu['name']}"
        taken, whole = gpu["taken"] / MB, gpu["bytes"] / MB
        return f", GPU {gpu['name']}: {taken:,.0f} of {whole:,.0f} MB taken"


@dataclass(frozen=True, kw_only=True)
class Progress(Event):
    """Progress, every `train.log_every_steps` steps, after 1000 at the latest, and at the end."""

    step: Annotated[int, Told("steps finished", "steps")]
    committed: Annotated[int, Told("last commit")]
    steps_per_second: Annotated[
        float, Told("since the last progress step, evaluations not counted", "steps/s")
    ]
    samples: Annotated[int | None, Told("samples of these steps", "samples", optional=True)] = None
    samples_per_second: Annotated[
        float | None, Told("the same pace in samples", "samples/s", optional=True)
    ] = None
    failures_left: FailuresLeft
    rebuilt: Annotated[float, Told("share of lost rows that is back; 1 where none is missing")]
    finished: Annotated[
        Sequence[tuple[int, float]],
        Told("[step, time it finished] of steps since the last progress step", "seconds"),
    ]
    skipped: Annotated[
        int | None,
        Told("steps of a script that its `grad_scaler` had skipped", "steps", optional=True),
    ] = None
    logged: Annotated[
        Mapping[str, float] | None,
        Told("means of the values logged in the steps in `window`, by name", optional=True),
    ] = None
    window: Annotated[int, Told("steps since the last progress step with known logs", "steps")]

    def in_words(self, steps: int, open_end: bool, window: int) -> str:
        """The line of a progress step, `window` steps after the last line, in a run of `steps`."""
        values = self.logged or {}
        logged = "".join(f"{name} {value:.4f}  " for name, value in values.items())
        known = f"(of {self.window} of {window} steps)  " if logged and self.window < window else ""
        rate = self.samples_per_second
        pace = "" if rate is None else f"{rate:>9,.0f} samples/s  "
        skipped = f"skipped {self.skipped}  " if self.skipped else ""
        return (
            f"step {self.step:>{len(str(steps))}}{' of at most ' if open_end else '/'}{steps}  "
            f"{self.steps_per_second:>7,.1f} steps/s  {pace}{logged}{known}"
            f"{skipped}committed {self.committed}  "
            f"survives {counted(self.failures_left, 'more failure')}  rebuilt {self.rebuilt:.0%}"
        )


@dataclass(frozen=True, kw_only=True)
class Kill(Event):
    """A rank sends itself SIGKILL, as `--kill` says."""

    rank: Annotated[int, Told("the rank")]
    step: Step
    phase: Phase
    scheduled: Annotated[str, Told("the kill as typed, RANK@STEP:PHASE")]


@dataclass(frozen=True, kw_only=True)
class KillDue(Event):
    """In a drill, a rank waits to be killed from outside."""

    rank: Annotated[int, Told("the rank")]
    step: Step
    phase: Phase
    scheduled: Annotated[str, Told("the kill as typed, RANK@STEP:PHASE")]


@dataclass(frozen=True, kw_only=True)
class Failure(Event):
    """Ranks died; the others have gone back to the last commit and taken over their roles."""

    identified_by = ("ranks",)

    ranks: Dead
    step: Step
    phase: Phase
    committed: Committed
    redone_steps: Redone
    recovery_seconds: RecoverySeconds
    shards: Annotated[Mapping[int, int], Told("lost shards, and the rank that has each now")]
    slots: Annotated[Mapping[int, int], Told("lost slots, and the rank that runs each now")]
    moved: Annotated[
        Mapping[int, int],
        Told("shards whose rebuilding starts again, and the rank that has each now"),
    ]
    failures_left: FailuresLeft
    failures_left_when_rebuilt: Annotated[
        int, Told("the same once all lost rows are rebuilt", "failures")
    ]

    def line(self, terms: Terms) -> str:
        moved = [f"shard {shard} to rank {rank}" for shard, rank in self.shards.items()]
        moved += [f"slot {slot} to rank {rank}" for slot, rank in self.slots.items()]
        moved += [
            f"shard {shard}, being rebuilt, to rank {rank}" for shard, rank in self.moved.items()
        ]
        left, then = self.failures_left, self.failures_left_when_rebuilt
        survives = survives_in_words(left) + (f", {then} once rebuilt" if then != left else "")
        if terms.any_shards:
            survives += ", and any ranks that hold no dense replica"
        elif then < terms.protected:
            survives += (
                f" (not {terms.protected}: too few ranks are left to keep stripe members apart)"
            )
        if terms.durable:
            survives += f"; beyond that all roll back to {terms.durable}"
        return (
            f"! {named('rank', self.ranks)} died in step {self.step} ({self.phase}); "
            f"{_back_in_words(self)}; {', '.join(moved) or 'no role moved'}; {survives}"
        )


USER_CODE = {
    "body": "step {step}, slot {slot}",
    "batch": "the batch of step {step}, slot {slot}",
    "evaluation": "batch {slot} of an evaluation at step {step}",
    "before_step": "before_step of step {step}",
    "every": "a function for session.every at step {step}",
    "on_commit": "a function for session.on_commit, told of step {step}",
    "after": "the script's code after the loop over session.steps",
}
"""The parts of user code in words."""


@dataclass(frozen=True, kw_only=True)
class SlotFailed(Event):
    """A script's own code raised in a slot, and its rank left; or a rank died while it ran."""

    identified_by = ("rank",)

    rank: Annotated[int, Told("the rank")]
    step: Annotated[int, Told("step that the code was at work on, or that was evaluated")]
    slot: Annotated[
        int,
        Told(
            "slot of that step; of an evaluation, the number of the batch; else the epoch of the "
            "view"
        ),
    ]
    part: Annotated[
        str,
        Told(
            "`body` of the loop, `batch` for what fetches and collates it, `evaluation` for a "
            "batch of an evaluation, `before_step`, or `every` for a function of `session.every`"
        ),
    ]
    error: Annotated[str | None, Told("what it raised; null where the rank died")]

    def line(self, terms: Terms) -> str:
        if self.error:
            return ""  # the rank has said so itself
        place = USER_CODE[self.part].format(step=self.step, slot=self.slot)
        return (
            f"! rank {self.rank} died while the script's own code ran, in {place}; if another rank "
            "dies there, the run ends"
        )


@dataclass(frozen=True, kw_only=True)
class Interrupted(Event):
    """Calls between ranks failed though no rank died; all went back to the last commit."""

    identified_by = ("number",)

    number: Annotated[int, Told("how many such interruptions there were, with this one")]
    step: Step
    phase: Phase
    committed: Committed
    redone_steps: Redone
    recovery_seconds: RecoverySeconds
    why: Annotated[str, Told("what failed, and where; empty where no rank could say")]

    def line(self, terms: Terms) -> str:
        why = f": {self.why}" if self.why else ""
        return (
            f"! step {self.step} interrupted ({self.phase}), all ranks live; "
            f"{_back_in_words(self)}{why}"
        )


def _back_in_words(told: Failure | Interrupted) -> str:
    """The state of all ranks after a recovery from a death or an interruption."""
    return f"back at commit {told.committed} after {told.recovery_seconds * 1000:.0f} ms"


@dataclass(frozen=True, kw_only=True)
class Joined(Event):
    """Ranks that were lost have come back, as spares or with slots; shards move to them later."""

    identified_by = ("epoch",)

    ranks: Annotated[Sequence[int], Told("ranks that have joined")]
    step: Step
    epoch: Epoch
    slots: Annotated[Mapping[int, int], Told("slot to the rank that has joined and runs the slot")]
    failures_left: FailuresLeft

    def line(self, terms: Terms) -> str:
        slots = f" with {named('slot', self.slots)}" if self.slots else ""
        back = "is back" if len(self.ranks) == 1 else "are back"
        return (
            f"! {named('rank', self.ranks)} {back}{slots}, from step {self.step} on; "
            f"can survive {self.failures_left} more at once"
        )


@dataclass(frozen=True, kw_only=True)
class View(Event):
    """Roles have moved between ranks; ranks.json says where they are."""

    identified_by = ("epoch",)

    step: Step
    epoch: Epoch
    live: Annotated[Sequence[int], Told("ranks that live")]


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """The first step after a failure is finished."""

    identified_by = ("ranks",)

    ranks: Dead
    stall_seconds: Annotated[
        float, Told("from the last step before the failure to the first after it", "seconds")
    ]

    def line(self, terms: Terms) -> str:
        stall = self.stall_seconds * 1000
        return f"! training goes on, {stall:.0f} ms between the steps before and after"


@dataclass(frozen=True, kw_only=True)
class Rebuilt(Event):
    """All rows that a failure lost are rebuilt."""

    identified_by = ("ranks",)

    ranks: Dead
    shards: Annotated[Sequence[int], Told("shards that were lost")]
    rebuild_seconds: Annotated[float, Told("from noticing the failure to now", "seconds")]
    rebuilt_bytes: Annotated[int, Told("size of these shards", "bytes")]
    on_demand_rows: Annotated[
        int, Told("rows that a step asked for before the background came to them", "rows")
    ]
    failures_left: FailuresLeft

    def line(self, terms: Terms) -> str:
        return (
            f"! {named('shard', self.shards)} rebuilt in {self.rebuild_seconds:.2f} s "
            f"({self.rebuilt_bytes:,} bytes, {counted(self.on_demand_rows, 'row')} on demand); "
            f"{survives_in_words(self.failures_left)}"
        )


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """With `protection.name = "stateless"`: lost shards are back, as far as possible."""

    identified_by = ("epoch",)

    step: Step
    epoch: Epoch
    shards: Annotated[
        Sequence[Mapping[str, Any]],
        Told("what came back of each, and what did not", parts=RESTORED),
    ]

    def line(self, terms: Terms) -> str:
        return "\n".join(map(_restored_in_words, self.shards))


def _restored_in_words(account: Mapping[str, Any]) -> str:
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


@dataclass(frozen=True, kw_only=True)
class Reshaped(Event):
    """Too few ranks were left, so all data was spread over fewer servers."""

    step: Step
    servers: Annotated[int, Told("servers from now on", "servers")]
    k: Annotated[int, Told("data rows per stripe from now on", "rows")]
    m: Annotated[int, Told("parity rows per stripe from now on", "rows")]
    seconds: Annotated[float, Told("length of the pause", "seconds")]
    moved_bytes: Annotated[int, Told("bytes of all rows ever updated, each counted once", "bytes")]
    failures_left: FailuresLeft

    def line(self, terms: Terms) -> str:
        return (
            f"! laid out anew over {counted(self.servers, 'server')} (k={self.k} m={self.m}) in "
            f"{self.seconds:.2f} s ({self.moved_bytes:,} bytes moved); "
            f"{survives_in_words(self.failures_left)}"
        )


@dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """All ranks went back to a checkpoint, or to the last commit in mapped files."""

    identified_by = ("epoch",)

    step: Annotated[int, Told("step that they went back to")]
    epoch: Epoch
    from_step: Annotated[int, Told("steps begun by then")]
    why: Annotated[str, Told("what was lost")]
    seconds: Annotated[float, Told("time that it took", "seconds")]

    def line(self, terms: Terms) -> str:
        redone = max(self.from_step - self.step, 0)
        return (
            f"! rolled back to step {self.step} from {self.from_step} in {self.seconds:.2f} s, "
            f"which redoes {counted(redone, 'step')}: {self.why}"
        )


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint is complete and on disk."""

    step: Annotated[int, Told("step of the checkpoint")]
    kind: Annotated[str, Told("`full` or `incremental`")]
    rows: Annotated[int, Told("rows written", "rows")]
    bytes: Annotated[int, Told("bytes written", "bytes")]
    seconds: Annotated[float, Told("from its begin until it is on disk", "seconds")]
    stall_seconds: Annotated[float, Told("of these, time that training waited", "seconds")]

    def line(self, terms: Terms) -> str:
        return (
            f"checkpoint of step {self.step} ({self.kind}): "
            f"{counted(self.rows, 'row')}, {self.bytes:,} bytes "
            f"in {self.seconds:.2f} s, training waited {self.stall_seconds:.2f} s"
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; training goes on."""

    step: Annotated[int, Told("step of the checkpoint")]
    why: Annotated[str, Told("what went wrong")]

    def line(self, terms: Terms) -> str:
        return f"! no checkpoint of step {self.step}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Corruption(Event):
    """Scrubbing found a stripe whose parity does not fit its data."""

    identified_by = ("step", "space", "stripe")

    step: Step
    kind: Annotated[
        str, Told("what is wrong: `data`, `state` (of the optimizer), `parity` or `unknown`")
    ]
    table: Annotated[str | None, Told("table of the wrong row")]
    row: Annotated[int | None, Told("number of the wrong row in its table")]
    shard: Annotated[int | None, Told("shard that holds what is wrong")]
    unit: Annotated[int | None, Told("unit of the stripe that is wrong")]
    space: Annotated[int, Told("row space: the tables of one embedding width")]
    stripe: Annotated[int, Told("number of the stripe in the row space")]
    rows: Annotated[
        Sequence[int], Told("first and last row of the stripe, as numbered in the row space")
    ]
    repaired: Annotated[bool, Told("whether it was put right")]
    exact: Annotated[bool, Told("whether no step had used the wrong bits")]

    def line(self, terms: Terms) -> str:
        first, last = self.rows
        where = f"in the stripe of rows {first} to {last} of row space {self.space}"
        if self.kind == "parity":
            where = f"in parity of shard {self.shard} {where}"
        elif self.kind != "unknown":
            what = "optimizer state of row" if self.kind == "state" else "row"
            place = (
                "that fills its stripe up"
                if self.table is None
                else f"{self.row} of table {self.table}"
            )
            where = f"in {what} {place} (shard {self.shard})"
        outcome = "repaired, nothing had used it"
        if not self.repaired:
            outcome = "not repaired: which unit is wrong cannot be told"
        elif not self.exact:
            outcome = (
                "repaired, but a step may have used it: "
                "the model may not be that of an undisturbed run"
            )
        return f"! corruption {where}, found in step {self.step}; {outcome}"


@dataclass(frozen=True, kw_only=True)
class NotFinite(Event):
    """A loss is NaN or infinite and `train.on_nonfinite` is `warn`; once for a step. With a
    `grad_scaler`, 50 steps in a row were skipped, or the scale is 0 or infinite.
    """

    identified_by = ("step", "found_in")

    step: Step
    found_in: Annotated[str, Told("`step`")]
    slot: Annotated[int, Told("lowest slot with such a loss")]
    where: Annotated[str, Told("rows, parameter or layer where it began")]
    why: Annotated[str, Told("the same as a sentence")]

    def line(self, terms: Terms) -> str:
        return f"! {self.why}; {terms.remedy}; training goes on"


@dataclass(frozen=True, kw_only=True)
class Evaluation(Event):
    """A function for `session.every` has reported named values, such as an evaluation."""

    identified_by = ("step", "values")  # several functions may report in a step

    step: Annotated[int, Told("steps trained")]
    values: Annotated[
        Mapping[str, float | None],
        Told(
            "the values by name; null for an undefined value. A config's run has `auc` and "
            "`logloss` of the held-out samples, and `samples`, their number"
        ),
    ]
    shards_away: Annotated[
        Sequence[int],
        Told("shards that are not back yet, with `stateless` alone: stand-ins answered"),
    ]

    def line(self, terms: Terms) -> str:
        without = f" without {named('shard', self.shards_away)}" if self.shards_away else ""
        values = "  ".join(f"{name} {measured(value)}" for name, value in self.values.items())
        return f"evaluation at step {self.step}{without}: {values}"


@dataclass(frozen=True, kw_only=True)
class EndedEarly(Event):
    """Training ends before its last step: evaluations bring no gain, or the script has asked."""

    step: Annotated[int, Told("last step")]
    steps_wanted: Annotated[int, Told("steps that the config asks for", "steps")]
    best_step: Annotated[
        int | None, Told("step of the best evaluation; null where the script has ended it")
    ]
    why: Annotated[str, Told("the reason as a sentence")]

    def line(self, terms: Terms) -> str:
        return f"training ends at step {self.step} of {self.steps_wanted}: {self.why}"
