"""Endurance: ranks killed again and again for half an hour, or a thousand times, in pieces.

    python benchmarks/endurance.py                          # 30 minutes, a kill every 15 s
    python benchmarks/endurance.py --faults 1000 --every 5  # a thousand kills

Twelve ranks train. Every 15 s a random live rank is killed, once the run can survive a further
death. Dead ranks do not come back within a start of `ecrm launch`. So after some kills the run is
stopped, and the same command with `--resume auto` goes on with twelve ranks: a piece. After the
last kill the run trains to its end without kills, in a new folder. Then the same steps are trained
without any kill.

Checked: equal models; kills noticed as failures; after each piece no process of the run, no file in
the temporary folder of the run, and no further shared memory without a process; open files of
`mpirun` and of the ranks, and memory of the largest rank, in the last pieces as in the first.
Written: a line per piece and the result, as CSV, into the output folder. The exit code is 1 for a
broken promise.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ecrm.base.errors import STOPPED_EXIT_CODE
from ecrm.drill.killers import Survivability, kill_rank
from ecrm.run.reading import EventTail, read_json

ECRM = [sys.executable, "-m", "ecrm"]
RANKS = ("--servers", "7", "--trainers", "2", "--spares", "3", "-k", "4", "-m", "2")
POLL_SECONDS = 0.1
LONGEST_PIECE = 900.0
"""Seconds after which a piece counts as hanging."""
KEPT = {f"torchinductor_{getpass.getuser()}"}
"""Caches of torch in the temporary folder, which outlive any program."""
MANY_STEPS = 10_000_000
"""More steps than any piece comes to; SIGTERM ends a piece."""
MORE_STEPS = 50
"""Steps of the last piece, without kills."""
MOST_GROWTH = 1.25
"""Largest ratio of memory and of open files, last pieces to first pieces, that is no leak."""


@dataclass(frozen=True)
class Piece:
    """A start of `ecrm launch` and its kills, with memory in bytes."""

    number: int
    kills: int
    failures: int
    steps: int
    seconds: float
    held_back_seconds: float
    rank_bytes: int
    rank_files: int
    launch_files: int
    processes_left: int
    files_left: int


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800.0, help="of training with kills")
    parser.add_argument("--faults", type=int, default=0, help="kills in place of --seconds")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    parser.add_argument("--piece", type=int, default=6, help="kills in a piece (default 6)")
    parser.add_argument("--seed", default="0", help="of the killed ranks (default 0)")
    parser.add_argument("--output", type=Path, default=Path("runs/endurance"), metavar="DIR")
    given = parser.parse_args()
    shutil.rmtree(given.output, ignore_errors=True)
    (given.output / "tmp").mkdir(parents=True)
    output = given.output.absolute()
    data = prepared(output)
    rng, pieces, began = random.Random(given.seed), list[Piece](), time.monotonic()

    def over() -> bool:
        killed = sum(piece.kills for piece in pieces)
        return killed >= given.faults if given.faults else time.monotonic() - began > given.seconds

    run = output / "disturbed"
    while not over():
        pieces.append(disturbed(run, data, len(pieces), given.every, given.piece, rng, over))
        print(pieces[-1], flush=True)
    seconds, steps = time.monotonic() - began, sum(piece.steps for piece in pieces)
    last = steps + MORE_STEPS
    mine = finished(output / "finished", data, last, run)
    calm_began = time.monotonic()
    undisturbed = finished(output / "calm", data, last, "auto")
    calm = (time.monotonic() - calm_began) / last
    wrong = list(complaints(pieces, mine, undisturbed))
    written(output / "pieces.csv", [asdict(piece) for piece in pieces], fields(Piece))
    training = sum(piece.seconds for piece in pieces)
    result = {
        "kills": sum(piece.kills for piece in pieces),
        "pieces": len(pieces),
        "steps": steps,
        "seconds": round(seconds, 1),
        "share_of_calm_steps": round(steps * calm / seconds, 3),
        "share_within_pieces": round(steps * calm / training, 3),
        "model_sha256": mine["model_sha256"],
        "wrong": "; ".join(wrong),
    }
    written(output / "result.csv", [result], None)
    print(json.dumps(result, indent=2))
    return int(bool(wrong))


def prepared(output: Path) -> Path:
    """A small generated dataset."""
    text, data = output / "rows.txt", output / "data"
    for words in (
        ["generate", "criteo", "--rows", "20000", "--seed", "1", "--output", str(text)],
        ["prepare", "criteo", str(text), "--output", str(data)],
    ):
        subprocess.run([*ECRM, *words], check=True, stdout=subprocess.DEVNULL)
    return data


def started(run: Path, data: Path, steps: int, resume: Path | str) -> subprocess.Popen[str]:
    """Start `ecrm launch` on twelve ranks, with `--resume`."""
    sets = {
        "data.path": data,
        "train.steps": steps,
        "model.dense_arch": "native",
        "checkpoint.every_minutes": 30,
        "checkpoint.keep": 1,
    }
    words = ["--resume", str(resume)]
    for key, value in sets.items():
        words += ["--set", f"{key}={value}"]
    line = [*ECRM, "launch", "tiny", *RANKS, "--run-dir", str(run), *words]
    said = run.with_suffix(".log").open("a")
    environment = {**os.environ, "TMPDIR": str(run.parent / "tmp")}
    return subprocess.Popen(line, stdout=said, stderr=subprocess.STDOUT, text=True, env=environment)


def disturbed(
    run: Path,
    data: Path,
    number: int,
    every: float,
    kills: int,
    rng: random.Random,
    over: Callable[[], bool],
) -> Piece:
    """One piece: kill ranks in turn, then stop the run at a commit."""
    before, left = committed(run), files_around(run.parent)
    tail, state = EventTail(run / "events.jsonl"), Survivability()
    if run.exists():
        tail.new_events()  # of earlier pieces
    began = time.monotonic()
    launch = started(run, data, MANY_STEPS, "auto")
    killed: list[int] = []
    largest = opened = held_back = 0.0
    failures, due = 0, None
    launch_files = 0
    while launch.poll() is None and len(killed) < kills and not over():
        assert time.monotonic() - began < LONGEST_PIECE, "a piece hangs"
        time.sleep(POLL_SECONDS)
        events = tail.new_events()
        state.take(events)
        failures += sum(event["event"] == "failure" for event in events)
        if not state.started:
            continue
        due = time.monotonic() + every if due is None else due
        if time.monotonic() < due:
            continue
        entries = read_json(run / "ranks.json").get("ranks", [])
        if victims := state.victims(entries, killed):
            for entry in victims:
                largest = max(largest, memory(entry["pid"]))
                opened = max(opened, open_files(entry["pid"]))
            launch_files = max(launch_files, open_files(launch.pid))
            if (kill := kill_rank(run, rng.choice(victims))) is not None:
                killed.append(kill.rank)
                held_back += max(0.0, time.monotonic() - due - POLL_SECONDS)
                due += every
    settle = time.monotonic() + every
    while launch.poll() is None and time.monotonic() < settle:
        failures += sum(event["event"] == "failure" for event in tail.new_events())
        time.sleep(POLL_SECONDS)
    if launch.poll() is None:
        launch.send_signal(signal.SIGTERM)
    code = launch.wait(timeout=120)
    failures += sum(event["event"] == "failure" for event in tail.new_events())
    if code != STOPPED_EXIT_CODE:
        raise SystemExit(f"piece {number} ended with {code}: see {run.with_suffix('.log')}")
    for file in sorted(files_around(run.parent) - left):
        print(f"piece {number} left {file}", flush=True)
    return Piece(
        number,
        len(killed),
        failures,
        committed(run) - before,
        round(time.monotonic() - began, 1),
        round(held_back, 1),
        int(largest),
        int(opened),
        launch_files,
        len(processes_of(run)),
        len(files_around(run.parent) - left),
    )


def finished(run: Path, data: Path, steps: int, resume: Path | str) -> dict[str, Any]:
    """Train to the end without kills; the content of summary.json."""
    code = started(run, data, steps, resume).wait(timeout=4 * LONGEST_PIECE)
    if code != 0:
        raise SystemExit(f"ecrm launch ended with {code}: see {run.with_suffix('.log')}")
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def complaints(
    pieces: Sequence[Piece], mine: dict[str, Any], calm: dict[str, Any]
) -> Sequence[str]:
    """The broken promises."""
    said = []
    if mine["model_sha256"] != calm["model_sha256"]:
        said.append("the models differ")
    if sum(piece.kills for piece in pieces) == 0:
        said.append("nobody was killed")
    for piece in pieces:
        if piece.failures > piece.kills or (piece.kills and not piece.failures):
            said.append(f"piece {piece.number}: {piece.kills} kills, {piece.failures} failures")
        if piece.processes_left:
            said.append(f"piece {piece.number}: {piece.processes_left} processes are left")
        if piece.files_left:
            said.append(f"piece {piece.number}: {piece.files_left} files are left")
    some = max(1, len(pieces) // 4)
    for name in ("rank_bytes", "rank_files", "launch_files"):
        first = max(getattr(piece, name) for piece in pieces[:some])
        last = max(getattr(piece, name) for piece in pieces[-some:])
        if last > MOST_GROWTH * first:
            said.append(f"{name} grew from {first} to {last}")
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


def processes_of(run: Path) -> list[int]:
    """The processes with the run's folder in their command line."""
    name = os.fsencode(run)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if name in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


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
