"""Lines of events.jsonl are events of ecrm/engine/events.py, with all fields and no others.

mypy holds the writers to the fields. `support.drilling` and `support.training` hold real and
simulated runs of the whole suite to the types.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from functools import partial

import pytest

from ecrm.base.fields import TYPES
from ecrm.engine import events
from ecrm.engine.events import (
    EVENTS,
    CheckpointFailed,
    Start,
    check_event,
    fields_of,
    meaning_of,
    of_line,
)
from ecrm.launch.scalars import OF_NAMES, SCALARS
from ecrm.run.run_status import RunStatus
from support.paths import ROOT
from support.telling import an

PROGRESS = {
    "time": 1.5,
    "event": "progress",
    "step": 20,
    "samples": 20480,
    "committed": 20,
    "samples_per_second": 1e4,
    "steps_per_second": 10.0,
    "failures_left": 1,
    "rebuilt": 1.0,
    "finished": [[20, 1.5]],
    "logged": {"loss": None},
    "window": 20,
}


def test_every_event_has_a_meaning_and_types_and_meanings_of_its_fields():
    assert len(EVENTS) == 20
    for name, kind in EVENTS.items():
        assert meaning_of(kind).endswith("."), name
        for field in fields_of(kind).values():
            assert field.type in TYPES and field.meaning, (name, field)


def test_fields_of_a_line_are_written_in_the_order_of_the_class():
    failed = CheckpointFailed(why="the disk is full", step=4)
    line = '{"event": "checkpoint_failed", "step": 4, "why": "the disk is full"}'
    assert json.dumps(failed.to_dict()) == line


def test_an_optional_field_without_a_value_is_left_out_and_a_null_is_written():
    line = an(Start, oversubscribed=None, script="train.py").to_dict()
    assert line["oversubscribed"] is None and line["script"] == "train.py"
    assert "gpu" not in line and "resumed" not in line
    check_event(line)


def key_read(node: ast.AST) -> object:
    """The key of `event["key"]` or `event.get("key")`; None for other code."""
    match node:
        case ast.Subscript(value=ast.Name(id="event"), slice=ast.Constant(value=key)):
            return key
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="event"), attr="get"),
            args=[ast.Constant(value=key), *_],
        ):
            return key
    return None


def test_readers_of_lines_ask_for_events_and_fields_of_the_registry():
    """Readers of older runs have lines as dicts, which mypy does not know."""
    fields = {name for kind in EVENTS.values() for name in fields_of(kind)}
    keys, names = set(), set()
    for path in (ROOT / "ecrm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            keys.add(key_read(node))
            if isinstance(node, ast.Compare) and key_read(node.left) == "event":
                names |= {each.value for each in node.comparators if isinstance(each, ast.Constant)}
    assert {"finished", "moved", "failures_left"} <= keys and {"start", "failure"} <= names
    assert keys - {None} <= fields | {"event", "time"}
    assert names <= EVENTS.keys()
    tagged = {name for of in SCALARS.values() for name in of}
    assert tagged | {name for name, _ in OF_NAMES.values()} <= fields
    assert SCALARS.keys() | OF_NAMES.keys() <= EVENTS.keys()
    taken = {name for name in vars(RunStatus) if name in {f"_{each}" for each in EVENTS}}
    handlers = {
        name
        for name, method in vars(RunStatus).items()
        if callable(method) and "event" in method.__annotations__
    }
    assert taken == handlers and len(handlers) > 5


def test_a_line_read_is_the_event_written():
    failed = CheckpointFailed(why="the disk is full", step=4)
    assert of_line({"time": 1.5, **failed.to_dict()}) == failed
    with pytest.raises(TypeError, match="why"):
        of_line({"event": "checkpoint_failed", "step": 4})


def test_an_event_with_the_right_fields_passes():
    check_event(PROGRESS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"event": "progres"}, "no event"),
        ({"speed": 1}, "speed is not described"),
        ({"step": "20"}, "step is '20', not integer"),
        ({"step": True}, "step is True"),
        ({"committed": None}, "committed is None"),
    ],
)
def test_an_event_with_another_name_field_or_type_is_refused(change, why):
    with pytest.raises(ValueError, match=why):
        check_event({**PROGRESS, **change})


def test_an_event_without_a_field_is_refused():
    with pytest.raises(ValueError, match="window is missing"):
        check_event({name: value for name, value in PROGRESS.items() if name != "window"})


def test_the_parts_of_a_field_are_checked():
    restored = {"event": "restored", "step": 1, "epoch": 1, "shards": [{"shard": 0}]}
    with pytest.raises(ValueError, match="shards: lost_steps is missing"):
        check_event(restored)


def lines_of_events() -> str:
    """A line of each event with a line, and of each outcome with words of its own."""
    failure = an(events.Failure, ranks=[1], phase="parity", failures_left_when_rebuilt=1)
    restored = dict.fromkeys(events.RESTORED, 10) | {"refused": []}
    corruption = partial(an, events.Corruption, kind="data", table="a", rows=[0, 3])
    found = [
        failure,
        replace(failure, failures_left_when_rebuilt=0),
        an(events.Resumed),
        an(events.Rebuilt, shards=[1]),
        an(events.Reshaped, servers=3),
        an(events.RolledBack),
        an(events.Restored, shards=[restored]),
        events.SlotFailed(rank=4, step=7, slot=1, part="body", error=None),
        an(events.Interrupted, phase="update"),
        an(events.Joined, ranks=[3]),
        corruption(repaired=True, exact=True),
        corruption(repaired=True),
        corruption(),
        an(events.CheckpointFailed),
        an(events.NotFinite, why="the loss of step 60 is not finite"),
        an(events.NotFinite, why="50 steps in a row were skipped"),
    ]
    return "\n".join(each.line(events.Terms(protected=1)) for each in found)


def test_the_screen_knows_the_lines_of_events():
    checkpoint = an(events.Checkpoint, kind="full").line(events.Terms())
    ended = an(events.EndedEarly, step=5, steps_wanted=9).line(events.Terms())
    lines = [*lines_of_events().splitlines(), checkpoint, ended]
    assert len(lines) > 15 and all(events.EVENT_LINE.match(line) for line in lines if line)


def test_the_runbook_quotes_the_lines_of_events():
    text = (ROOT / "docs/operations/runbook.md").read_text()
    rows = text[text.index("### When ranks die") : text.index("## Errors")]
    cells = re.findall(r"^\| ([^|]+) \|", rows, re.MULTILINE)
    quoted = [line for cell in cells for line in re.findall(r"`([^`]+)`", cell) if " " in line]
    own = [line for line in quoted if not line.startswith("! train.py failed on rank")]
    assert len(own) > 14 and sum(line.startswith("! ") for line in own) > 10
    said = re.sub(r"[\d.]+", "#", lines_of_events())
    for line in own:
        for piece in filter(None, map(str.strip, line.split("..."))):
            assert re.sub(r"[\d.]+", "#", piece) in said, piece
