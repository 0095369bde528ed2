"""`ecrm report`: a run as one self-contained HTML page, from the files of the run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from pathlib import Path
from typing import Any

from ecrm.base.atomic_files import staged_file
from ecrm.base.errors import DataError
from ecrm.base.wording import counted, duration
from ecrm.config.reference import effective
from ecrm.drill import html
from ecrm.drill.charts import ROOM, curves, throughput
from ecrm.drill.roles import BOTH, SERVER, SPARE, TRAINER, Stay, stays
from ecrm.drill.run_record import RunRecord, run_record
from ecrm.drill.svg import Lane, drawn, drawn_lanes, key
from ecrm.drill.table import FAILURE_COLUMNS, FAILURE_LEGEND, NO_FAILURE, failure_cells
from ecrm.drill.throughput import pace, spans
from ecrm.drill.timeline import timeline
from ecrm.launch.run_state import RunState, run_state
from ecrm.run.reading import Event, parse_events, read_json
from ecrm.run.session_folders import told_session

MOST_LANES = 48
"""The most ranks of a time line; ranks with one role throughout are left out first."""
MOST_STAYS = 200
"""The most rows of a table of checkpoints or failures."""
ROLES = {"server": SERVER, "trainer": TRAINER, "server and trainer": BOTH, "spare": SPARE}


@dataclass(frozen=True)
class Story:
    """A run folder as read: events without the time between starts, and the last files.

    `starts` counts the starts of the run. `trace` is the content of trace.json, {} without one.
    """

    name: str
    state: RunState
    events: Sequence[Event]
    record: RunRecord
    ranks: Sequence[Mapping[str, Any]]
    starts: int
    trace: Mapping[str, Any]


def report(run_dir: Path, output: Path | None = None, session: int | None = None) -> Path:
    """Write the page of a run, and return the path of the page.

    `output` is by default report.html in the run folder. `session` is the number of a session, by
    default the newest. Raises UsageError for a folder without the run or the session, DataError
    without events, EcrmError for a file impossible to write.
    """
    run_state(run_dir)  # refuses a folder without a run
    folder = told_session(run_dir, session)
    state = run_state(run_dir, session=session)
    events, damaged = _events(folder)
    if not events:
        raise DataError(f"{folder / 'events.jsonl'}: holds no event yet: training has not begun")
    squeezed, starts = without_pauses(events)
    summary = read_json(folder / "summary.json")
    story = Story(
        name=run_dir.resolve().name,
        state=state,
        events=squeezed,
        record=of_lives(squeezed, summary, damaged),
        ranks=read_json(folder / "ranks.json").get("ranks", []),
        starts=starts,
        trace=read_json(folder / "trace.json"),
    )
    target = run_dir / "report.html" if output is None else output
    with staged_file(target) as file:
        file.write(page(story).encode())
    return target


def _events(folder: Path) -> tuple[list[Event], int]:
    try:
        return parse_events((folder / "events.jsonl").read_text(errors="replace"))
    except OSError:
        return [], 0


def without_pauses(events: Sequence[Event]) -> tuple[list[Event], int]:
    """The events as if each start followed at once on the last event before, and the starts.

    A run stopped for a night otherwise has its curves on a tenth of the picture.
    """
    moved: list[Event] = []
    shift, starts = 0.0, 0
    for event in events:
        if event["event"] == "start":
            starts += 1
            if moved:
                shift = event["time"] - moved[-1]["time"]
        changed = {**event, "time": event["time"] - shift}
        if "finished" in event:
            changed["finished"] = [[step, at - shift] for step, at in event["finished"]]
        moved.append(changed)
    return moved, starts


def of_lives(events: Sequence[Event], summary: dict[str, Any], damaged_lines: int = 0) -> RunRecord:
    """One record of all lives of a run; a rank may die once in each life."""
    begins = [at for at, event in enumerate(events) if event["event"] == "start"] or [0]
    lives = []
    for begin, end in zip(begins, [*begins[1:], len(events)], strict=True):
        own = summary if end == len(events) else {}
        lives.append(run_record(events[begin:end], own, damaged_lines=damaged_lines))
    joined: dict[str, Any] = {
        each.name: tuple(entry for life in lives for entry in getattr(life, each.name))
        for each in fields(RunRecord)
        if isinstance(getattr(lives[0], each.name), tuple)
    }
    return replace(lives[-1], started_at=lives[0].started_at, **joined)


def page(story: Story) -> str:
    """The page of a run as HTML text."""
    record, state = story.record, story.state
    batch = _samples_of_a_step(story.events)
    line = timeline(RunRecord(), record, batch)
    end = (story.events[-1]["time"] - (record.started_at or 0.0)) or 1.0
    unit = "steps/s" if batch is None else "samples/s"
    drawn_curves = curves(record)
    return html.page(
        f"{story.name}: {state.state}, {counted(record.last_step, 'step')}, "
        f"{counted(len(record.failures), 'failure')} survived",
        [
            _verdict(state),
            html.facts(_facts(story, batch)),
            "<h2>Curves</h2>",
            '<div class="curves">' + "".join(map(drawn, drawn_curves)) + "</div>"
            if drawn_curves
            else "<p>no curve: a curve needs two values of session.log or session.report</p>",
            "<h2>Throughput</h2>",
            html.with_key(throughput(line, unit, end)),
            "<h2>Ranks and roles</h2>",
            _lanes(story, end * ROOM),
            "<h2>Failures</h2>",
            _failures(record),
            "<h2>Checkpoints</h2>",
            _checkpoints(record),
            *_phases(story),
            html.folded("The config", effective(_config(story))),
        ],
    )


def _verdict(state: RunState) -> str:
    bad = "" if state.exit_code == 0 else " bad"
    why = f" {escape(state.why)}" if state.why else ""
    return f'<p class="verdict{bad}"><strong>{state.state.capitalize()}.</strong>{why}</p>'


def _config(story: Story) -> Mapping[str, Any]:
    config: Mapping[str, Any] = story.record.start.get("config", {})
    return config


def _samples_of_a_step(events: Sequence[Event]) -> int | None:
    told = [each for each in events if each["event"] == "progress" and each.get("samples")]
    return told[-1]["samples"] // told[-1]["step"] if told and told[-1]["step"] else None


def _facts(story: Story, batch: int | None) -> dict[str, str]:
    record, start = story.record, story.record.start
    found = pace(spans(record), batch)
    facts = {"ranks": str(start.get("world_size", "?"))}
    if "script" in start:
        facts["script"] = str(start["script"])
    if "steps" in record.summary:
        label = "training, last start" if story.starts > 1 else "training"
        facts[label] = duration(record.summary.get("training_seconds", 0.0))
    if found.steps_per_second is not None:
        samples = found.samples_per_second
        facts["pace"] = (
            f"{found.steps_per_second:,.1f} steps/s"
            + (f", {samples:,.0f} samples/s" if samples is not None else "")
            + " without evaluations"
        )
    if record.summary.get("model_sha256"):
        facts["model_sha256"] = record.summary["model_sha256"]
    facts["starts"] = str(story.starts) + (
        "; the time between starts is left out" if story.starts > 1 else ""
    )
    facts["version"] = f"ecrm {start.get('version', '?')}"
    facts["written"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return facts


def _lanes(story: Story, end: float) -> str:
    origin = story.record.started_at or 0.0
    found = stays(story.events, story.ranks)
    of: dict[int, list[Stay]] = {}
    for stay in found:
        of.setdefault(stay.rank, []).append(stay)
    shown, more = list(of), ""
    if len(of) > MOST_LANES:
        changed = [rank for rank, own in of.items() if len(own) > 1 or own[0].dies]
        shown = changed[:MOST_LANES]
        more = html.legend(f"{counted(len(of) - len(shown), 'rank')} left out")
    if not shown:
        return more
    lanes = []
    for rank in shown:
        bars = [(stay.begin - origin, stay.end - origin, stay.role) for stay in of[rank]]
        deaths = [stay.end - origin for stay in of[rank] if stay.dies]
        bars += [(at, at + 0.006 * end, "bad") for at in deaths]
        lanes.append(Lane(f"rank {rank}", bars))
    about = f"roles of {len(shown)} ranks over {end:.0f} seconds"
    present = {stay.role for stay in found}
    colours = {word: colour for word, colour in ROLES.items() if colour in present}
    colours |= {"death": "bad"} if any(stay.dies for stay in found) else {}
    return drawn_lanes(about, "seconds since the start", end, lanes) + key(colours) + more


def _failures(record: RunRecord) -> str:
    rows = failure_cells(record)[:MOST_STAYS]
    if not rows:
        return f"<p>{escape(NO_FAILURE)}</p>"
    return html.table(FAILURE_COLUMNS, rows, words=(0, 3)) + html.legend(FAILURE_LEGEND)


CHECKPOINT_COLUMNS = (
    ("step", ""),
    ("at", "s"),
    ("kind", ""),
    ("rows", ""),
    ("size", "bytes"),
    ("writing", "s"),
    ("wait", "s"),
)


def _checkpoints(record: RunRecord) -> str:
    if not record.checkpoints:
        return "<p>no checkpoint was written</p>"
    rows = [
        (
            str(each.step),
            f"{record.since_start(each.time) or 0:.2f}",
            each.kind,
            f"{each.rows:,}",
            f"{each.bytes:,}",
            f"{each.seconds:.2f}",
            f"{each.stall_seconds:.2f}",
        )
        for each in record.checkpoints[-MOST_STAYS:]
    ]
    return html.table(CHECKPOINT_COLUMNS, rows, words=(2,)) + html.legend(
        "writing: until the checkpoint was on disk; wait: the part for which training waited"
    )


def _phases(story: Story) -> list[str]:
    """The phases of a step, with `--profile` their times, and the bytes sent by phase."""
    parts = ["<h2>Phases</h2>"]
    spent = [
        each
        for each in story.trace.get("traceEvents", [])
        if each.get("ph") == "X" and each.get("cat") == "phase"
    ]
    if spent:
        ranks = len({each["pid"] for each in spent})
        steps = len({each["args"]["step"] for each in spent})
        totals: dict[str, float] = {}
        for each in spent:
            totals[each["name"]] = totals.get(each["name"], 0.0) + each["dur"]
        rows = [(name, f"{us / 1e3 / ranks / steps:.3f}") for name, us in totals.items()]
        parts.append(html.table((("phase", ""), ("time of a step", "ms")), rows, words=(0,)))
        parts.append(html.legend(f"the mean over ranks and the last {counted(steps, 'step')}"))
    sent: dict[str, int] = {}
    for rank in story.record.summary.get("traffic_bytes_per_rank", []):
        for name, size in rank["sent"].items():
            sent[name] = sent.get(name, 0) + size
    if sent:
        rows = [(name, f"{size / 1e6:,.1f}") for name, size in sent.items() if size >= 50_000]
        parts.append(html.table((("phase", ""), ("sent by all ranks", "MB")), rows, words=(0,)))
        parts.append(html.legend("phases that sent less than 0.05 MB are left out"))
    return parts if len(parts) > 1 else []
