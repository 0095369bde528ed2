"""ecrm/run/events.py is what the code emits: no event, no field and no type beside it.

Real and simulated runs of the whole suite are held to it in `support.drilling` and
`support.training`; here is the source, which also has the events that are rare.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from ecrm.config import faults
from ecrm.run.events import EVENTS, TYPES, check_event
from support.paths import ROOT

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


def emitted() -> Iterator[tuple[str, str, set[str], bool]]:
    """Yields (place, event, literal fields, complete) of every dict with the key "event".

    `complete` is true if the dict has no other fields than these.
    """
    for path in sorted((ROOT / "ecrm").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                keys = {key.value: v for key, v in _literal(node)}
                value = keys.get("event")
                if isinstance(value, ast.Constant):
                    kind = value.value
                elif isinstance(value, ast.Name):
                    kind = names.get(value.id) or getattr(faults, value.id)
                else:
                    continue
                yield (
                    f"{path.relative_to(ROOT)}:{node.lineno}",
                    kind,
                    keys.keys() - {"event"},
                    None not in node.keys,
                )


def _literal(node: ast.Dict) -> Iterator[tuple[ast.Constant, ast.expr]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant):
            yield key, value


def test_the_source_emits_the_events_of_the_registry_and_no_others():
    found = list(emitted())
    told_by_progress = {"progress"}  # its name is put to its fields as it is written
    assert {kind for _, kind, _, _ in found} | told_by_progress == EVENTS.keys()
    for place, kind, fields, whole in found:
        if fields == {"step", "view"}:  # within the engine a view is one object
            continue
        known = EVENTS[kind].fields
        assert fields <= known.keys(), (place, kind, fields - known.keys())
        needed = {name for name, field in known.items() if not field.optional}
        if whole:
            assert needed <= fields, (place, kind, needed - fields)


def test_every_field_has_a_type_and_a_meaning():
    for name, event in EVENTS.items():
        assert event.meaning.endswith("."), name
        for field in event.fields.values():
            assert field.type in TYPES and field.meaning, (name, field)


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
