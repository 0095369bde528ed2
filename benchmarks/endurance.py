"""Endurance: ranks killed and links broken again and again, for half an hour or a thousand times.

    python benchmarks/endurance.py                          # 30 minutes, a kill every 15 s
    python benchmarks/endurance.py --faults 1000 --every 5  # a thousand kills
    python benchmarks/endurance.py --hosts 3                # links, too; as root

Twelve ranks train. Every 15 s a fault comes. A random live rank is killed, once the run can survive
a further death. With `--hosts` the ranks are spread over imitated hosts, network namespaces of this
machine. Half of the faults are then of links: a connection between two hosts is reset, or all of
them, or two hosts do not hear each other for half a second. No link fault may cost a rank.

Dead ranks do not come back within a start of `ecrm launch`. So after some kills the run is stopped,
and the same command with `--resume auto` goes on with twelve ranks: a piece. After the last fault
the run trains to its end without faults, in a new folder. Then the same steps are trained without
any fault. `--go-on` continues a call that was ended: a piece that had not ended counts for nothing.

Checked: equal models; every killed rank noticed, and no other rank lost; faults as often as wanted;
after each piece no process of the run, no file in the temporary folder of the run, and no further
shared memory without a process; open files and memory of the ranks, of `ecrm launch` and of its
children, at the last fault of a piece as at the first fault, and in the last pieces as in the
first. Written: a line per piece and the result, as CSV, into the output folder. The exit code is 1
for a broken promise.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import getpass
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ecrm.base.errors import STOPPED_EXIT_CODE
from ecrm.drill.killers import Survivability, kill_rank
from ecrm.run.reading import EventTail, read_json
from lib import measure

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.host_loss import KEEP_ALIVE, STARTER
from support.imitated_hosts import ImitatedHosts, why_not

ECRM = [sys.executable, "-m", "ecrm"]
RANKS = ("--servers", "7", "--trainers", "2", "--spares", "3", "-k", "4", "-m", "2")
RANK_COUNT = 12
POLL_SECONDS = 0.1
HOLE_SECONDS = 0.5
"""Two hosts do not hear each other for so long: less than the keep-alive time."""
LINK_FAULTS = ("reset", "resets", "hole")
LONGEST_PIECE = 900.0
"""Seconds after which a piece counts as hanging, if its faults do not need longer."""
ENDING_SECONDS = 120.0
"""Seconds for a run to stop at a commit, after SIGTERM."""
KEPT = {f"torchinductor_{getpass.getuser()}"}
"""Caches of torch in the temporary folder, which outlive any program."""
MANY_STEPS = 10_000_000
"""More steps than any piece comes to; SIGTERM ends a piece."""
MORE_STEPS = 50
"""Steps of the last piece, without kills."""
MOST_GROWTH = 1.25
"""Largest ratio of memory and of open files, last to first, that is no leak."""
FEW_LINKS = 6
"""Link faults of which one at least must be a reset."""
RAREST = 2.0
"""Largest ratio of the time between faults to `--every`."""


@dataclass(frozen=True)
class Piece:
    """A start of `ecrm launch` and its faults, with memory in bytes.

    `resets` of the `link_faults` reset a connection or more. `noticed` of the killed ranks were
    noticed as dead, and `others_lost` ranks died unkilled. `training_steps` and `training_seconds`
    are from the first step to the last step known to the reporter. `first` numbers are of the first
    fault, others of the last fault.
    """

    number: int
    kills: int
    link_faults: int
    resets: int
    noticed: int
    others_lost: int
    steps: int
    seconds: float
    training_steps: int
    training_seconds: float
    held_back_seconds: float
    first_rank_bytes: int
    rank_bytes: int
    first_rank_files: int
    rank_files: int
    first_launch_bytes: int
    launch_bytes: int
    first_launch_files: int
    launch_files: int
    processes_left: int
    files_left: int


Numbers = tuple[int, ...]
"""The largest memory and number of open files of the ranks, then of the launch and its children.

On hosts without the connections to live ranks.
"""


@dataclass
class Watched:
    """The events of a run since the start of a piece."""

    tail: EventTail
    state: Survivability
    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None

    def look(self) -> None:
        """Take in new events."""
        for event in self.tail.new_events():
            self.state.take([event])
            for step, at in event["finished"] if event["event"] == "progress" else ():
                self.first = self.first or (step, at)
                if self.last is None or at > self.last[1]:
                    self.last = step, at

    def training(self) -> tuple[int, float]:
        """Steps and seconds from the first to the last known step."""
        if self.first is None or self.last is None:
            return 0, 0.0
        return self.last[0] - self.first[0], self.last[1] - self.first[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800.0, help="of training with faults")
    parser.add_argument("--faults", type=int, default=0, help="faults in place of --seconds")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two faults")
    parser.add_argument("--piece", type=int, default=6, help="kills in a piece (default 6)")
    parser.add_argument("--hosts", type=int, default=0, help="imitated hosts, as root (default 0)")
    parser.add_argument("--seed", default="0", help="of the faults (default 0)")
    parser.add_argument("--output", type=Path, default=Path("runs/endurance"), metavar="DIR")
    parser.add_argument("--go-on", action="store_true", help="with the pieces of an earlier call")
    parser.add_argument("--csv", type=Path, help="the result once more, as a row of this file")
    given = parser.parse_args()
    if given.hosts and (given.hosts == 1 or RANK_COUNT % given.hosts):
        parser.error(f"--hosts {given.hosts}: type 2, 3, 4, 6 or 12")
    if given.hosts and (reason := why_not()):
        parser.error(f"--hosts {given.hosts}: {reason}; type the command without --hosts")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # hosts go, too
    if not given.go_on:
        shutil.rmtree(given.output, ignore_errors=True)
        (given.output / "tmp").mkdir(parents=True)
    elif not (given.output / "pieces.csv").exists():
        parser.error(f"--go-on: {given.output} has no pieces.csv; type the command without --go-on")
    with ImitatedHosts(given.hosts) if given.hosts else contextlib.nullcontext() as hosts:
        result = endured(given, given.output.absolute(), hosts)
    written(given.output / "result.csv", [result], None)
    if given.csv is not None:
        before = list(csv.DictReader(given.csv.open())) if given.csv.exists() else []
        written(given.csv, [*before, {**result, **measure.device()}], None)
    print(json.dumps(result, indent=2))
    return int(bool(result["wrong"]))


def endured(given: argparse.Namespace, output: Path, hosts: ImitatedHosts | None) -> dict[str, Any]:
    """All pieces, the end without faults and the calm run, as a row of the result."""
    data, pieces = (output / "data", earlier(output)) if given.go_on else (prepared(output), [])
    rng = random.Random(f"{given.seed} {len(pieces)}" if pieces else given.seed)
    began = time.monotonic() - sum(piece.seconds for piece in pieces)

    def over(more: int = 0) -> bool:
        done = sum(piece.kills + piece.link_faults for piece in pieces) + more
        return done >= given.faults if given.faults else time.monotonic() - began > given.seconds

    run = output / "disturbed"
    while not over():
        pieces.append(disturbed(run, data, hosts, len(pieces), given.every, given.piece, rng, over))
        print(pieces[-1], flush=True)
        written(output / "pieces.csv", [asdict(piece) for piece in pieces], fields(Piece))
    seconds, steps = time.monotonic() - began, sum(piece.steps for piece in pieces)
    last, most = steps + MORE_STEPS, 4 * LONGEST_PIECE + 2 * seconds
    for name in ("finished", "calm"):
        shutil.rmtree(output / name, ignore_errors=True)
    mine, _ = finished(output / "finished", data, hosts, last, run, most)
    undisturbed, calm = finished(output / "calm", data, hosts, last, "auto", most)
    wrong = list(complaints(pieces, mine, undisturbed, given.every))
    faults = sum(piece.kills + piece.link_faults for piece in pieces)
    trained = sum(piece.training_steps for piece in pieces)
    training = sum(piece.training_seconds for piece in pieces)
    return {
        "ranks": RANK_COUNT,
        "hosts": given.hosts,
        "kills": sum(piece.kills for piece in pieces),
        "link_faults": sum(piece.link_faults for piece in pieces),
        "pieces": len(pieces),
        "steps": steps,
        "seconds": round(seconds, 1),
        "seconds_between_faults": round(training / max(1, faults), 1),
        "kept_while_training": round(trained * calm / training, 3) if training else 0.0,
        "kept_with_starts": round(steps * calm / seconds, 3),
        "model_sha256": mine["model_sha256"],
        "wrong": "; ".join(wrong),
    }


def earlier(output: Path) -> list[Piece]:
    """The pieces of an earlier call."""
    number = {"int": int, "float": float}
    with (output / "pieces.csv").open(newline="") as file:
        return [
            Piece(**{each.name: number[str(each.type)](row[each.name]) for each in fields(Piece)})
            for row in csv.DictReader(file)
        ]


def prepared(output: Path) -> Path:
    """A small generated dataset."""
    text, data = output / "rows.txt", output / "data"
    for words in (
        ["generate", "criteo", "--rows", "20000", "--seed", "1", "--output", str(text)],
        ["prepare", "criteo", str(text), "--output", str(data)],
    ):
        subprocess.run([*ECRM, *words], check=True, stdout=subprocess.DEVNULL)
    return data


@contextlib.contextmanager
def launched(
    run: Path, data: Path, hosts: ImitatedHosts | None, steps: int, resume: Path | str
) -> Iterator[subprocess.Popen[str]]:
    """Start `ecrm launch` on twelve ranks, with `--resume`; an error of the caller ends the run."""
    sets = {
        "data.path": data,
        "train.steps": steps,
        "model.dense_arch": "native",
        "checkpoint.every_minutes": 30,
        "checkpoint.keep": 1,
    }
    words, private = ["--resume", str(resume)], run.parent / "tmp"
    for key, value in sets.items():
        words += ["--set", f"{key}={value}"]
    if hosts is not None:
        file, slots = run.parent / "hosts", RANK_COUNT // len(hosts.names)
        file.write_text("".join(f"{hosts.namespace(name)} slots={slots}\n" for name in hosts.names))
        words += ["--hosts", str(file), "--interface", hosts.bridge]
        words += ["--keep-alive", str(KEEP_ALIVE)]
        words += ["--starter", STARTER.replace("{private}", str(private))]
    line = [*ECRM, "launch", "tiny", *RANKS, "--run-dir", str(run), *words]
    said = run.with_suffix(".log").open("a")
    environment = {**os.environ, "TMPDIR": str(private)}
    with said:
        launch = subprocess.Popen(
            line, stdout=said, stderr=subprocess.STDOUT, text=True, env=environment
        )
    try:
        yield launch
    finally:
        if launch.poll() is None:
            launch.send_signal(signal.SIGTERM)
            try:
                launch.wait(timeout=ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                launch.kill()


def break_link(hosts: ImitatedHosts, rng: random.Random) -> str:
    """Break a link between two hosts for a moment; return the fault, "" if nothing was broken."""
    one, other = rng.sample(hosts.names, 2)
    how = rng.choice(LINK_FAULTS)
    if how != "hole":
        return how if hosts.reset(one, other, every=how == "resets") else ""
    hosts.part(one, other)
    try:
        time.sleep(HOLE_SECONDS)
    finally:
        hosts.join(one, other)
    return how


def disturbed(
    run: Path,
    data: Path,
    hosts: ImitatedHosts | None,
    number: int,
    every: float,
    kills: int,
    rng: random.Random,
    over: Callable[[int], bool],
) -> Piece:
    """One piece: faults in turn until `kills` ranks are dead, then stop the run at a commit."""
    before, left = committed(run), files_around(run.parent)
    watched = Watched(EventTail(run / "events.jsonl"), Survivability())
    if run.exists():
        watched.tail.skip()  # the events of earlier pieces
    began = time.monotonic()
    killed: list[int] = []
    measured: list[Numbers] = []
    held_back, due, links = 0.0, None, list[str]()
    wanted = "kill"
    longest = LONGEST_PIECE + 4 * kills * every
    with launched(run, data, hosts, MANY_STEPS, "auto") as launch:
        while launch.poll() is None and len(killed) < kills and not over(len(killed) + len(links)):
            if time.monotonic() - began > longest:
                raise SystemExit(f"piece {number} hangs: see {run.with_suffix('.log')}")
            time.sleep(POLL_SECONDS)
            watched.look()
            if not watched.state.started or watched.last is None:
                continue
            if due is None:
                due, wanted = time.monotonic() + every, drawn(hosts, rng)
            if time.monotonic() < due:
                continue
            entries, pids = read_json(run / "ranks.json").get("ranks", []), pids_of(hosts)
            if hosts is not None:
                entries = [{**e, "pid": pids.get((e["host"], e["pid"]), 0)} for e in entries]
            live = [entry["pid"] for entry in entries if entry["live"]]
            # fewer connections after kills are no room for a leak
            peers = max(len(live) - 1, 0) if hosts is not None else 0
            numbers: Numbers = (
                max(map(memory, live), default=0),
                max(map(open_files, live), default=0) - peers,
            )
            if wanted == "link":
                assert hosts is not None
                if not (how := break_link(hosts, rng)):
                    continue
                links.append(how)
            else:
                victims = watched.state.victims(entries, killed)
                if not victims or (kill := kill_rank(run, rng.choice(victims))) is None:
                    continue
                killed.append(kill.rank)
            heads = [pid for pid in family(launch.pid) if pid not in live]
            numbers += max(map(memory, heads)), max(map(open_files, heads))
            measured.append(numbers)
            held_back += max(0.0, time.monotonic() - due - POLL_SECONDS - HOLE_SECONDS)
            due, wanted = max(due + every, time.monotonic()), drawn(hosts, rng)
        settle = time.monotonic() + every
        while launch.poll() is None and time.monotonic() < settle:
            watched.look()
            time.sleep(POLL_SECONDS)
        watched.look()
        trained, training = watched.training()
        if launch.poll() is None:
            launch.send_signal(signal.SIGTERM)
        try:
            code = launch.wait(timeout=ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"piece {number} did not stop within {ENDING_SECONDS:g} s: "
                f"see {run.with_suffix('.log')}"
            ) from None
    watched.look()
    gone = time.monotonic() + 2 * KEEP_ALIVE  # agents of hosts end after the launch
    while hosts is not None and processes_of(run, hosts) and time.monotonic() < gone:
        time.sleep(POLL_SECONDS)
    if code != STOPPED_EXIT_CODE:
        raise SystemExit(f"piece {number} ended with {code}: see {run.with_suffix('.log')}")
    for file in sorted(files_around(run.parent) - left):
        print(f"piece {number} left {file}", flush=True)
    dead = watched.state.dead
    first, last = (measured or [(0, 0, 0, 0)])[0], (measured or [(0, 0, 0, 0)])[-1]
    return Piece(
        number,
        len(killed),
        len(links),
        len(links) - links.count("hole"),
        len(dead.intersection(killed)),
        len(dead.difference(killed)),
        committed(run) - before,
        round(time.monotonic() - began, 1),
        trained,
        round(training, 1),
        round(held_back, 1),
        *(each for pair in zip(first, last, strict=True) for each in pair),
        len(processes_of(run, hosts)),
        len(files_around(run.parent) - left),
    )


def drawn(hosts: ImitatedHosts | None, rng: random.Random) -> str:
    """The kind of the next fault: `kill` or `link`."""
    return "link" if hosts is not None and rng.random() < 0.5 else "kill"


def finished(
    run: Path,
    data: Path,
    hosts: ImitatedHosts | None,
    steps: int,
    resume: Path | str,
    seconds: float,
) -> tuple[dict[str, Any], float]:
    """Train to the end without faults; the content of summary.json, and the time of a step."""
    with launched(run, data, hosts, steps, resume) as launch:
        try:
            code = launch.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"no end within {seconds:.0f} s: see {run.with_suffix('.log')}"
            ) from None
    if code != 0:
        raise SystemExit(f"ecrm launch ended with {code}: see {run.with_suffix('.log')}")
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    watched = Watched(EventTail(run / "events.jsonl"), Survivability())
    watched.look()
    trained, training = watched.training()
    return found, training / max(1, trained)


def complaints(
    pieces: Sequence[Piece], mine: dict[str, Any], calm: dict[str, Any], every: float
) -> Sequence[str]:
    """The broken promises."""
    said = []
    if mine["model_sha256"] != calm["model_sha256"]:
        said.append("the models differ")
    faults = sum(piece.kills + piece.link_faults for piece in pieces)
    if sum(piece.kills for piece in pieces) == 0:
        said.append("nobody was killed")
    elif (apart := sum(piece.training_seconds for piece in pieces) / faults) > RAREST * every:
        said.append(f"a fault came every {apart:.1f} s, not every {every:g} s")
    links = sum(piece.link_faults for piece in pieces)
    if links >= FEW_LINKS and not any(piece.resets for piece in pieces):
        said.append("no connection was reset: this kernel does not end connections for ss --kill")
    for piece in pieces:
        if piece.noticed != piece.kills:
            said.append(f"piece {piece.number}: {piece.kills} kills, {piece.noticed} noticed")
        if piece.others_lost:
            said.append(f"piece {piece.number}: {piece.others_lost} ranks lost without a kill")
        if piece.processes_left:
            said.append(f"piece {piece.number}: {piece.processes_left} processes are left")
        if piece.files_left:
            said.append(f"piece {piece.number}: {piece.files_left} files are left")
    some = max(1, len(pieces) // 4)
    for name in ("rank_bytes", "rank_files", "launch_bytes", "launch_files"):
        # of both faults: a piece of few kills ends with more ranks, and more files of the launch
        first, last = (
            max(getattr(piece, of) for piece in part for of in (f"first_{name}", name))
            for part in (pieces[:some], pieces[-some:])
        )
        if last > MOST_GROWTH * first:
            said.append(f"{name} grew from {first} to {last}")
        for piece in pieces:
            first, last = getattr(piece, f"first_{name}"), getattr(piece, name)
            if last > MOST_GROWTH * first:
                said.append(f"piece {piece.number}: {name} grew from {first} to {last}")
    return said


def committed(run: Path) -> int:
    """The steps of the newest checkpoint, 0 without one."""
    names = [path.name for path in (run / "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def memory(pid: int) -> int:
    """Resident bytes of a process without shared pages, 0 if the process is gone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> int:
    """The number of open files of a process, 0 if the process is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def pids_of(hosts: ImitatedHosts | None) -> dict[tuple[str, int], int]:
    """Pids on this machine by host and pid there, as hosts have pids of their own."""
    found = {}
    if hosts is None:
        return found
    for name in hosts.names:
        for pid in hosts.pids(name):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                own = next(line for line in lines if line.startswith("NSpid")).split()[-1]
                found[hosts.namespace(name), int(own)] = pid
    return found


def family(pid: int) -> set[int]:
    """A process and all its descendants."""
    found = {pid}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                found |= family(int(child))
    return found


def processes_of(run: Path, hosts: ImitatedHosts | None) -> list[int]:
    """The processes with the run's folder in their command line, or on a host."""
    name = os.fsencode(run)
    found = [pid for host in (hosts.names if hosts else ()) for pid in hosts.pids(host)]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if name in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return sorted(set(found))


def files_around(output: Path) -> set[str]:
    """Temporary files of the run, and shared memory mapped by no process of the machine."""
    mapped = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {line.split()[-1] for line in maps.read_text().splitlines() if "shm" in line}
    shared = {str(path) for path in Path("/dev/shm").iterdir()}
    temporary = {str(path) for path in (output / "tmp").iterdir() if path.name not in KEPT}
    return temporary | (shared - mapped)


def written(path: Path, rows: Sequence[dict[str, Any]], columns: Any) -> None:
    with path.open("w", newline="") as file:
        names = [column.name for column in columns] if columns else list(rows[0])
        table = csv.DictWriter(file, names)
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
