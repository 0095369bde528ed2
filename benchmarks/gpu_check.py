"""All that a GPU has to show, in under ten minutes: `make gpu`.

    python benchmarks/gpu_check.py --output DIR       # on a machine with an NVIDIA GPU
    python benchmarks/gpu_check.py --imitated ...     # the same parts on an imitated GPU, tiny

What matters most comes first, each part with a limit of its own:
  kernels    the kernels' bits: on the GPU those of their references, and of the C++ on the CPU
  killed     seven ranks share the GPU, and a server is killed: the model is that of rows on the CPU
  bench      bench_gpu.py: bandwidth of kernels beside a copy, then a protected step
  trained    the model is trained on the GPU, with kills and without: equal models
  sanitizer  compute-sanitizer over the kernels' tests, where it is installed

A part that fails or runs out of time does not stop the next one. Each writes DIR/PART.log as it
goes. DIR/gpu_check.csv has a line per part as soon as it has ended, and DIR/gpu.csv is the
benchmark's. Ends with 1 where a part has failed. Installs nothing, and needs no network.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lib import measure

ROOT = Path(__file__).resolve().parent.parent
KERNEL_TESTS = ROOT / "tests" / "unit" / "test_kernels_triton.py"
RANKS = {"cluster.servers": 4, "cluster.trainers": 2, "cluster.spares": 1}
ON_GPU = {"storage.device": "cuda"}
TRAINED = {**ON_GPU, "train.device": "cuda"}
IMITATED = {"testing.imitated_gpu": True, "kernels.backend": "reference"}
KILLS = ("1@20:parity", "5@30:backward")


class PartFailed(Exception):
    """What a part has found to be wrong, in one line."""


@dataclass(frozen=True)
class Place:
    """Where results go, and whether the GPU is an imitated one."""

    output: Path
    imitated: bool

    def call(self, part: str, words: Sequence[str], seconds: float) -> None:
        """Run a command; what it prints is added to the part's log. Raises PartFailed."""
        with (self.output / f"{part}.log").open("a") as log:
            print("$", *words, file=log, flush=True)
            try:
                done = subprocess.run(
                    words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=seconds
                )
            except subprocess.TimeoutExpired:
                raise PartFailed(f"not done after {seconds:.0f} s") from None
        if done.returncode:
            raise PartFailed(f"ended with {done.returncode}, see {part}.log")

    def python(self, part: str, *words: str, seconds: float) -> None:
        """`call` of this Python."""
        self.call(part, [sys.executable, *words], seconds)

    def model(
        self, part: str, name: str, sets: Mapping[str, Any], kills: Sequence[str], seconds: float
    ) -> str:
        """The model's digest after a run of seven ranks. Raises PartFailed."""
        data = measure.prepare(self.output / "data", 2_000 if self.imitated else 200_000)
        folder = self.output / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)
        steps = {"train.epochs": 0, "train.steps": 40, "data.path": str(data)}
        words = measure.set_words({**RANKS, **steps, **sets})
        for kill in kills:
            words += ["--kill", kill]
        line = ("-m", "ecrm", "launch", "tiny", "--run-dir", str(folder), *words)
        self.python(part, *line, seconds=seconds)
        summary = json.loads((folder / "summary.json").read_text())
        if len(summary["failures"]) != len(kills):
            raise PartFailed(f"{len(summary['failures'])} failures, {len(kills)} were to come")
        digest: str = summary["model_sha256"]
        return digest

    def sets(self, sets: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a run on the GPU."""
        return {**sets, **(IMITATED if self.imitated else {})}


def kernels(place: Place) -> str:
    place.python("kernels", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(KERNEL_TESTS),
                 seconds=150)  # fmt: skip
    return "bits of the references"


def killed(place: Place) -> str:
    on_cpu = place.model("killed", "cpu", {}, (), 60)
    calm = place.model("killed", "calm", place.sets(ON_GPU), (), 90)
    after = place.model("killed", "killed", place.sets(ON_GPU), KILLS[:1], 90)
    if len({on_cpu, calm, after}) > 1:
        raise PartFailed(f"rows on the CPU {on_cpu}, on the GPU {calm}, with a kill {after}")
    return on_cpu


def bench(place: Place) -> str:
    more = ("--smoke",) if place.imitated else ("--output", str(place.output / "gpu.csv"))
    place.python("bench", str(ROOT / "benchmarks" / "bench_gpu.py"), *more, seconds=240)
    return "see gpu.csv"


def trained(place: Place) -> str:
    calm = place.model("trained", "trained", place.sets(TRAINED), (), 90)
    after = place.model("trained", "trained-killed", place.sets(TRAINED), KILLS, 90)
    if calm != after:
        raise PartFailed(f"undisturbed {calm}, with kills {after}")
    return calm


def sanitizer(place: Place) -> str:
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if tool is None or place.imitated:
        return "left out: no compute-sanitizer here"
    words = [tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", "-x"]
    place.call("sanitizer", [*words, "-k", "parity or decode or sparse", str(KERNEL_TESTS)], 120)
    return "no error"


PARTS: dict[str, Callable[[Place], str]] = {
    part.__name__: part for part in (kernels, killed, bench, trained, sanitizer)
}


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
    place = Place(arguments.output.resolve(), arguments.imitated)
    place.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in arguments.part or PARTS:
        began = time.monotonic()
        try:
            result, said = "passed", PARTS[name](place)
        except (PartFailed, OSError, subprocess.CalledProcessError) as error:
            result, said = "failed", str(error)
        seconds = round(time.monotonic() - began, 1)
        rows.append({"part": name, "result": result, "seconds": seconds, "said": said})
        measure.write_csv(place.output / "gpu_check.csv", rows)
        print(f"{name:<10} {result:<7} {seconds:6.1f} s  {said}", flush=True)
    return int(any(row["result"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
