"""Every event of events.jsonl: meaning, fields, types and units.

The writer of an event makes a dict of `event` (a name of EVENTS) and exactly the fields listed in
this module. The run folder adds `time`. docs/reference/events.md is made from this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "text": (str,),
    "true or false": (bool,),
    "list": (list, tuple),
    "object": (dict,),
}
"""The types of fields, in the words of JSON, with the Python types."""


@dataclass(frozen=True)
class Field:
    """One field of an event: a type of TYPES, a meaning, and a unit, "" without a unit.

    `null` fields may be None. `optional` fields may be left out. `parts` are the fields of an
    object, or of each object of a list; without parts the content is not described.
    """

    type: str
    meaning: str
    unit: str = ""
    null: bool = False
    optional: bool = False
    parts: Mapping[str, Field] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """The meaning of an event, in one sentence, and all fields but `time` and `event`."""

    meaning: str
    fields: Mapping[str, Field]


STEP = Field("integer", "step in which it happened")
COMMITTED = Field("integer", "last commit, to which all ranks have gone back")
REDONE = Field("integer", "steps begun after that commit, which are done again", "steps")
RECOVERY = Field("number", "from noticing to the end of the recovery", "seconds")
FAILURES_LEFT = Field("integer", "failures that can be survived at once from now on", "failures")
PHASE = Field("text", "phase of the step, such as `parity`")
DEAD = Field("list", "ranks that died")
KILL = {
    "rank": Field("integer", "the rank"),
    "step": STEP,
    "phase": PHASE,
    "scheduled": Field("text", "the kill as typed, RANK@STEP:PHASE"),
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
SLOT_FAILED = {
    "rank": Field("integer", "the rank"),
    "step": Field("integer", "step that the code was at work on, or that was evaluated"),
    "slot": Field(
        "integer",
        "slot of that step; of an evaluation, the number of the batch; else the epoch of the view",
    ),
    "part": Field(
        "text",
        "`body` of the loop, `batch` for what fetches and collates it, `evaluation` for a batch "
        "of an evaluation, `before_step`, or `every` for a function of `session.every`",
    ),
    "error": Field("text", "what it raised; null where the rank died", null=True),
}

EVENTS: dict[str, Event] = {
    "start": Event(
        "Training begins, or goes on in a new start of the same run.",
        {
            "version": Field("text", "version of ECRM"),
            "kernels": Field("text", "instruction set of the C++ kernels"),
            "versions": Field("object", "packages and kind of CPU that decide the bits, by name"),
            "version_set": Field("text", "name of `versions`: equal names, equal bits"),
            "dense_arch": Field(
                "text",
                "implementation of the interaction that is used; not of a script",
                optional=True,
            ),
            "script": Field("text", "the script that is run", optional=True),
            "open_end": Field(
                "true or false",
                "true where a script's data may end before its steps do; else left out",
                optional=True,
            ),
            "gpu": Field(
                "object",
                "GPU of the rank that writes this event, once tables are there; without one left "
                "out",
                optional=True,
                parts={
                    "name": Field("text", "its model, or `imitated`"),
                    "bytes": Field("integer", "its memory", "bytes", optional=True),
                    "taken": Field(
                        "integer", "of that, taken by all who use it", "bytes", optional=True
                    ),
                },
            ),
            "world_size": Field("integer", "number of ranks", "ranks"),
            "oversubscribed": Field(
                "text", "`bind`, `sleep` or `poll`; null where each rank has a core", null=True
            ),
            "shares_memory_with": Field(
                "list", "ranks that read shared memory of the rank that writes this event"
            ),
            "config": Field("object", "effective config, by section and key"),
            "kills": Field("list", "scheduled kills, RANK@STEP:PHASE each"),
            "run": Field(
                "object",
                "what the model depends on; a later start of this run must have the same",
                optional=True,
            ),
            "before": Field(
                "text",
                "how the start before this one ended: `stopped`, `failed` or `killed`",
                optional=True,
            ),
            "resumed": Field(
                "object",
                "with `--resume`: what the run goes on from",
                optional=True,
                parts={
                    "from": Field("text", "run folder, checkpoint or folder of mapped files"),
                    "step": Field("integer", "steps that are done already", "steps"),
                    "changed": Field("list", "settings that are not as before, as sentences"),
                    "data_began": Field("integer", "step at which this data begins"),
                },
            ),
            "init_from": Field(
                "text", "with `--init-from`: checkpoint that the weights are from", optional=True
            ),
            "set_up_seconds": Field("number", "time to build or load the model", "seconds"),
            "failures_left": FAILURES_LEFT,
        },
    ),
    "progress": Event(
        "Progress, every `train.log_every_steps` steps, after 1000 at the latest, and at the end.",
        {
            "step": Field("integer", "steps finished", "steps"),
            "samples": Field("integer", "samples of these steps", "samples", optional=True),
            "committed": Field("integer", "last commit"),
            "samples_per_second": Field(
                "number",
                "since the last progress step, evaluations not counted",
                "samples/s",
                optional=True,
            ),
            "steps_per_second": Field("number", "the same pace in steps", "steps/s"),
            "skipped": Field(
                "integer",
                "steps of a script that its `grad_scaler` had skipped",
                "steps",
                optional=True,
            ),
            "failures_left": FAILURES_LEFT,
            "rebuilt": Field("number", "share of lost rows that is back; 1 where none is missing"),
            "finished": Field(
                "list", "[step, time it finished] of steps since the last progress step", "seconds"
            ),
            "logged": Field(
                "object",
                "means of the values logged in the steps in `window`, by name",
                optional=True,
            ),
            "window": Field(
                "integer",
                "steps since the last progress step with known logs",
                "steps",
            ),
        },
    ),
    "kill": Event("A rank sends itself SIGKILL, as `--kill` says.", KILL),
    "kill_due": Event("In a drill, a rank waits to be killed from outside.", KILL),
    "failure": Event(
        "Ranks died; the others have gone back to the last commit and taken over their roles.",
        {
            "ranks": DEAD,
            "step": STEP,
            "phase": PHASE,
            "committed": COMMITTED,
            "redone_steps": REDONE,
            "recovery_seconds": RECOVERY,
            "shards": Field("object", "lost shards, and the rank that has each now"),
            "slots": Field("object", "lost slots, and the rank that runs each now"),
            "moved": Field(
                "object", "shards whose rebuilding starts again, and the rank that has each now"
            ),
            "failures_left": FAILURES_LEFT,
            "failures_left_when_rebuilt": Field(
                "integer", "the same once all lost rows are rebuilt", "failures"
            ),
        },
    ),
    "slot_failed": Event(
        "A script's own code raised in a slot, and its rank left; or a rank died while it ran.",
        SLOT_FAILED,
    ),
    "interrupted": Event(
        "Calls between ranks failed though no rank died; all went back to the last commit.",
        {
            "number": Field("integer", "how many such interruptions there were, with this one"),
            "step": STEP,
            "phase": PHASE,
            "committed": COMMITTED,
            "redone_steps": REDONE,
            "recovery_seconds": RECOVERY,
            "why": Field("text", "what failed, and where; empty where no rank could say"),
        },
    ),
    "view": Event(
        "Roles have moved between ranks; ranks.json says where they are.",
        {
            "step": STEP,
            "epoch": Field("integer", "number of the view"),
            "live": Field("list", "ranks that live"),
        },
    ),
    "resumed": Event(
        "The first step after a failure is finished.",
        {
            "ranks": DEAD,
            "stall_seconds": Field(
                "number", "from the last step before the failure to the first after it", "seconds"
            ),
        },
    ),
    "rebuilt": Event(
        "All rows that a failure lost are rebuilt.",
        {
            "ranks": DEAD,
            "shards": Field("list", "shards that were lost"),
            "rebuild_seconds": Field("number", "from noticing the failure to now", "seconds"),
            "rebuilt_bytes": Field("integer", "size of these shards", "bytes"),
            "on_demand_rows": Field(
                "integer", "rows that a step asked for before the background came to them", "rows"
            ),
            "failures_left": FAILURES_LEFT,
        },
    ),
    "restored": Event(
        'With `protection.name = "stateless"`: lost shards are back, as far as possible.',
        {
            "step": STEP,
            "epoch": Field("integer", "number of the view"),
            "shards": Field("list", "what came back of each, and what did not", parts=RESTORED),
        },
    ),
    "reshaped": Event(
        "Too few ranks were left, so all data was spread over fewer servers.",
        {
            "step": STEP,
            "servers": Field("integer", "servers from now on", "servers"),
            "k": Field("integer", "data rows per stripe from now on", "rows"),
            "m": Field("integer", "parity rows per stripe from now on", "rows"),
            "seconds": Field("number", "length of the pause", "seconds"),
            "moved_bytes": Field("integer", "bytes that went to another rank", "bytes"),
            "failures_left": FAILURES_LEFT,
        },
    ),
    "rolled_back": Event(
        "All ranks went back to a checkpoint, or to the last commit in mapped files.",
        {
            "step": Field("integer", "step that they went back to"),
            "epoch": Field("integer", "number of the view"),
            "from_step": Field("integer", "steps begun by then"),
            "why": Field("text", "what was lost"),
            "seconds": Field("number", "time that it took", "seconds"),
        },
    ),
    "checkpoint": Event(
        "A checkpoint is complete and on disk.",
        {
            "step": Field("integer", "step of the checkpoint"),
            "kind": Field("text", "`full` or `incremental`"),
            "rows": Field("integer", "rows written", "rows"),
            "bytes": Field("integer", "bytes written", "bytes"),
            "seconds": Field("number", "from its begin until it is on disk", "seconds"),
            "stall_seconds": Field("number", "of these, time that training waited", "seconds"),
        },
    ),
    "checkpoint_failed": Event(
        "A checkpoint could not be written; training goes on.",
        {
            "step": Field("integer", "step of the checkpoint"),
            "why": Field("text", "what went wrong"),
        },
    ),
    "corruption": Event(
        "Scrubbing found a stripe whose parity does not fit its data.",
        {
            "step": STEP,
            "kind": Field(
                "text", "what is wrong: `data`, `state` (of the optimizer), `parity` or `unknown`"
            ),
            "table": Field("text", "table of the wrong row", null=True),
            "row": Field("integer", "number of the wrong row in its table", null=True),
            "shard": Field("integer", "shard that holds what is wrong", null=True),
            "unit": Field("integer", "unit of the stripe that is wrong", null=True),
            "space": Field("integer", "row space: the tables of one embedding width"),
            "stripe": Field("integer", "number of the stripe in the row space"),
            "rows": Field("list", "first and last row of the stripe, as numbered in the row space"),
            "repaired": Field("true or false", "whether it was put right"),
            "exact": Field("true or false", "whether no step had used the wrong bits"),
        },
    ),
    "not_finite": Event(
        "A loss is NaN or infinite and `train.on_nonfinite` is `warn`; once for a step. With a "
        "`grad_scaler`, 50 steps in a row were skipped, or the scale is 0 or infinite.",
        {
            "step": STEP,
            "found_in": Field("text", "`step`"),
            "slot": Field("integer", "lowest slot with such a loss"),
            "where": Field("text", "rows, parameter or layer where it began"),
            "why": Field("text", "the same as a sentence"),
        },
    ),
    "evaluation": Event(
        "A function for `session.every` has reported named values, such as an evaluation.",
        {
            "step": Field("integer", "steps trained"),
            "values": Field(
                "object",
                "the values by name; null for an undefined value. A config's run has `auc` and "
                "`logloss` of the held-out samples, and `samples`, their number",
            ),
            "shards_away": Field(
                "list", "shards that are not back yet, with `stateless` alone: stand-ins answered"
            ),
        },
    ),
    "ended_early": Event(
        "Training ends before its last step: evaluations bring no gain, or the script has asked.",
        {
            "step": Field("integer", "last step"),
            "steps_wanted": Field("integer", "steps that the config asks for", "steps"),
            "best_step": Field(
                "integer",
                "step of the best evaluation; null where the script has ended it",
                null=True,
            ),
            "why": Field("text", "the reason as a sentence"),
        },
    ),
}


def check_event(event: Mapping[str, Any]) -> None:
    """Raise ValueError unless a line of events.jsonl matches EVENTS: name, fields, types."""
    name = event.get("event")
    if name not in EVENTS:
        raise ValueError(f"no event of ecrm/run/events.py: {event}")
    fields = {key: value for key, value in event.items() if key not in ("time", "event")}
    wrong = problems(EVENTS[name].fields, fields)
    if wrong:
        raise ValueError(f"event {name}: {'; '.join(wrong)}: {event}")


def problems(known: Mapping[str, Field], given: Mapping[str, Any]) -> list[str]:
    """The problems of an object that should have the `known` fields, a line each."""
    wrong = [
        f"{name} is missing"
        for name, wanted in known.items()
        if name not in given and not wanted.optional
    ]
    for name, value in given.items():
        if name not in known:
            wrong.append(f"{name} is not described")
        elif not _fits(known[name], value):
            wrong.append(f"{name} is {value!r}, not {known[name].type}")
        elif known[name].parts and value is not None:
            for entry in [value] if isinstance(value, dict) else value:
                wrong += [f"{name}: {why}" for why in problems(known[name].parts, entry)]
    return wrong


def _fits(wanted: Field, value: Any) -> bool:
    if value is None:
        return wanted.null
    is_bool = isinstance(value, bool)
    return isinstance(value, TYPES[wanted.type]) and is_bool == (wanted.type == "true or false")
