"""Times the kernels beside their peers and their floors, all in one run.

    python benchmarks/bench_kernels.py            # 1,048,576 rows of 256 bytes; a minute, 3 GB
    python benchmarks/bench_kernels.py --smoke    # seconds; what the tests run

parity_apply runs on a permutation of all rows and on sorted rows, with a product and as a plain
XOR, and on rows as wide as a record of row-wise Adagrad (260 bytes, not aligned). Compared with
  isa-l contiguous  The peer: ISA-L's `ec_encode_data_update` on as many bytes, contiguous, in one
                    call. It is that of the pyeclib wheel (pyeclib.libs/libisal*.so), by ctypes.
  no-arithmetic     The floor: the same rows are read and written back and the same deltas read.
                    Nothing is computed. g++ -O3 -march=native compiles it here for this one
                    width, with the kernel's own prefetching.

sparse_update (row-wise Adagrad) runs on distinct random rows, others at every call. Gradients have
just been summed, as in a step, and the delta is written over them. Compared with
  without-delta     the same kernel without the delta.
  fbgemm            What one would do without this kernel: FBGEMM's backward pass on one table,
                    between two gathers of row and state, and an XOR of the two. Its forward pass
                    is not timed. Its backward pass also sorts its indices.

sparse_update into a log (commit intervals above 1) has half of the update's rows already. Compared
with
  merged-after      the same kernel with the delta written over the gradients, then merge_records.

decode makes one unit from k = 4 others. Compared with
  isa-l             `ec_encode_data` on the same bytes; the kernel also allocates what it returns.

gather_records reads rows and row-wise Adagrad's state, others at every call. scatter_add sums
gradients of skewed rows. divide divides a slot's gradients and tests them. row_digest adds up
hashes of rows. Compared with
  torch             index_select of both and their concatenation; index_add_; div_, sum and the test
                    of the sum.
  sha256            hashlib on the same bytes.

unique_with_uses sorts a slot's ids, bag_sum pools their rows from five places, and segment_sum adds
the gradients of the bags by row, divides and tests them. Compared with
  torch             unique, and a stable sort of the places; embedding_bag of the rows, after their
                    copy to one place by pieces.
  two passes        scatter_add, then divide.

pieces packs the rows of a slot for a thousand ranks, and places them again. Compared with
  torch             index_select and index_copy_, a call for each rank.
The second case has no peer: split, requests, gradients, messages packed and rows collected.

dot_interaction runs forward, and backward to sums of unique rows, on 26 features whose rows are as
skewed as a batch's. Compared with
  torchrec          What a step does without this kernel: TorchRec's InteractionArch and its
                    gradients, between spreading rows to samples and summing by scatter_add.

All large arrays come from numpy.zeros, which asks the system for huge pages, and begin at a cache
line; so does FBGEMM's table. What contenders allocate themselves stays with the process when they
free it, as in ECRM's ranks. Bytes counted are those that have to cross the memory bus once, row
numbers included. Writing counts once, though a cache reads a line before it writes part of it.
Every contender runs once per round, in a random order: what ran before decides what is in the
cache. Ratios are of the same round.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import hashlib
import importlib.metadata
import platform
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ecrm.kernels import native
from ecrm.kernels.dot_interaction import dot_interaction, dot_interaction_backward
from ecrm.kernels.parity_apply import parity_apply
from ecrm.kernels.records import gather_records
from ecrm.kernels.scatter_add import scatter_add
from ecrm.kernels.sparse_update import sparse_update
from ecrm.process.memory import keep_freed_memory
from lib.kernel_case import Batches, Case, Contender, load_isa_l, zeros
from lib.kernel_rows import (
    decode_case,
    digest_case,
    divide_case,
    gather_case,
    logged_case,
    scatter_add_case,
)
from lib.kernel_slots import bag_cases, messages_cases

COEFFICIENT = 29
FLOOR_SOURCE = """
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
constexpr int64_t line = 64;
#elif defined(__AVX__)
constexpr int64_t line = 32;
#else
constexpr int64_t line = 16;
#endif
typedef uint64_t Line __attribute__((vector_size(line), aligned(1)));
static inline void keep(Line& kept, Line read) { asm volatile("" : "+x"(kept) : "x"(read)); }
extern "C" void touch(uint8_t* parity, const int64_t* rows, int64_t n, const uint8_t* delta) {
  constexpr int64_t width = WIDTH;
  constexpr int64_t ahead = width > 4096 ? 1 : width < 256 ? 32 : 8192 / width;
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t* next = parity + rows[i + ahead < n ? i + ahead : n - 1] * width;
    uint8_t* row = parity + rows[i] * width;
    const uint8_t* from = delta + i * width;
#pragma GCC unroll 16
    for (int64_t at = 0; at < width; at += 64) {
      __builtin_prefetch(next + at, 1, 3);
      __builtin_prefetch(from + 2048 + at, 0, 3);
    }
    Line kept, read;
#pragma GCC unroll 16
    for (int64_t at = 0; at < width; at += line) {
      const int64_t place = at + line <= width ? at : width - line;
      memcpy(&kept, row + place, line);
      memcpy(&read, from + place, line);
      keep(kept, read);
      memcpy(row + place, &kept, line);
    }
  }
}
"""


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round; one round more, the first, is not kept."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in case.contenders}
    order = random.Random(0)
    for round_number in range(rounds + 1):
        for contender in order.sample(case.contenders, len(case.contenders)):
            contender.prepare()
            start = time.perf_counter()
            contender.call()
            taken = time.perf_counter() - start
            if round_number:
                seconds[contender.name].append(taken)
    return seconds


def report(case: Case, seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    """One line per contender for the CSV."""
    digest = hashlib.sha256(case.result().contiguous().numpy().tobytes()).hexdigest()[:16]
    ours = np.array(seconds[case.contenders[0].name])
    lines = []
    for contender in case.contenders:
        times = np.array(seconds[contender.name])
        p20, median, p80 = np.percentile(times, [20, 50, 80])
        ratio20, ratio, ratio80 = np.percentile(ours / times, [20, 50, 80])
        lines.append(
            {
                "case": case.name,
                "contender": contender.name,
                "rows": case.rows,
                "row_bytes": case.row_bytes,
                "counted_bytes": contender.counted_bytes,
                "rounds": len(times),
                "median_ms": round(median * 1e3, 4),
                "p20_ms": round(p20 * 1e3, 4),
                "p80_ms": round(p80 * 1e3, 4),
                "gb_per_second": round(contender.counted_bytes / median / 1e9, 2),
                "ours_over_this": round(ratio, 4),
                "ours_over_this_p20": round(ratio20, 4),
                "ours_over_this_p80": round(ratio80, 4),
                "result_sha256": digest,
            }
        )
    return lines


def parity_cases(
    rows: int, width: int, orders: tuple[str, ...] = ("permuted", "sorted")
) -> list[Case]:
    """parity_apply with and without a multiplication."""
    generator = torch.Generator().manual_seed(0)
    parity, delta = zeros(rows, width, dtype=torch.uint8), zeros(rows, width, dtype=torch.uint8)
    for matrix in (parity, delta):
        matrix.random_(0, 256, generator=generator)
    isa_l, floor = load_isa_l(), compile_floor(width)
    update = isa_l_update(isa_l, parity, delta)
    check_against_isa_l(parity, delta, update)
    counted = 3 * rows * width
    cases = []
    for order in orders:
        numbers = (
            torch.randperm(rows, generator=generator) if order == "permuted" else torch.arange(rows)
        )
        for kind, coefficient in (("product", COEFFICIENT), ("xor", 1)):

            def ours(numbers=numbers, coefficient=coefficient):
                parity_apply(parity, numbers, coefficient, delta, backend="cpu")

            def touch(numbers=numbers):
                floor.touch(parity.data_ptr(), numbers.data_ptr(), rows, delta.data_ptr())

            contenders = [
                Contender("parity_apply", ours, counted + 8 * rows),
                Contender("isa-l contiguous", update, counted),
                Contender("no-arithmetic", touch, counted + 8 * rows),
            ]
            cases.append(
                Case(f"parity_apply {kind}, {order} rows", rows, width, contenders, lambda: parity)
            )
    return cases


def isa_l_update(
    isa_l: ctypes.CDLL, parity: torch.Tensor, delta: torch.Tensor
) -> Callable[[], None]:
    """`parity ^= COEFFICIENT * delta` by ISA-L, over all bytes in one call.

    The call's length is a C int, so the bytes must be fewer than 2 GiB.
    """
    length = delta.numel()
    if length >= 2**31:
        raise SystemExit(
            f"{length} bytes of delta are more than ISA-L takes in one call; give fewer rows"
        )
    tables, coefficient = np.zeros(32, np.uint8), np.array([COEFFICIENT], np.uint8)
    isa_l.ec_init_tables(
        1, 1, ctypes.c_void_p(coefficient.ctypes.data), ctypes.c_void_p(tables.ctypes.data)
    )
    outputs = (ctypes.c_void_p * 1)(parity.data_ptr())

    def update() -> None:
        isa_l.ec_encode_data_update(
            length,
            1,
            1,
            0,
            ctypes.c_void_p(tables.ctypes.data),
            ctypes.c_void_p(delta.data_ptr()),
            outputs,
        )

    return update


def check_against_isa_l(
    parity: torch.Tensor, delta: torch.Tensor, update: Callable[[], None]
) -> None:
    """Both must do the same to the same bytes."""
    expected = parity.clone()
    parity_apply(expected, torch.arange(len(parity)), COEFFICIENT, delta, backend="cpu")
    update()
    if not torch.equal(expected, parity):
        raise SystemExit("parity_apply and ISA-L disagree")


def compile_floor(width: int) -> ctypes.CDLL:
    """The floor, built by g++ for this very machine and this width, at least 64."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "floor.cpp"), Path(folder, "floor.so")
        source.write_text(FLOOR_SOURCE)
        options = ["-O3", "-march=native", "-w", f"-DWIDTH={width}", "-shared", "-fPIC"]
        subprocess.run(["g++", *options, source, "-o", library], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.touch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    loaded.touch.restype = None
    return loaded


def update_cases(height: int, dimension: int, touched: int) -> list[Case]:
    """sparse_update on `touched` distinct random rows.

    There are two cases, because FBGEMM would empty the cache of the first.
    """
    batches = Batches(height, touched)
    generator = torch.Generator().manual_seed(2)
    weights, state, gradients = zeros(height, dimension), [zeros(height)], zeros(touched, dimension)
    for matrix in (weights, gradients):
        matrix.normal_(generator=generator)
    record = 4 * dimension + 4
    narrow, wide = zeros(touched, dimension), zeros(touched, dimension + 1)
    delta = wide.view(torch.uint8)

    def with_delta() -> None:
        sparse_update(
            weights,
            state,
            batches.rows,
            wide[:, :dimension],
            "rowwise_adagrad",
            lr=0.01,
            delta=delta,
            backend="cpu",
        )

    def without_delta() -> None:
        sparse_update(
            weights, state, batches.rows, narrow, "rowwise_adagrad", lr=0.01, backend="cpu"
        )

    def summed(into: torch.Tensor) -> None:
        """As in a step: gradients have just been summed there."""
        batches.advance()
        into[:, :dimension] = gradients

    # row number, gradient, record read and written
    moved = touched * (8 + 4 * dimension + 2 * record)
    ours = Contender("sparse_update", with_delta, moved + touched * record, lambda: summed(wide))
    bare = Contender("without-delta", without_delta, moved, lambda: summed(narrow))
    cases = [
        Case(
            f"sparse_update rowwise_adagrad, of {height} rows",
            touched,
            record,
            [ours, bare],
            lambda: delta,
        )
    ]
    theirs = fbgemm_contenders(weights, batches, gradients, moved + 7 * touched * record)
    if theirs:
        name = f"sparse_update rowwise_adagrad against FBGEMM, of {height} rows"
        cases.append(Case(name, touched, record, [ours, *theirs], lambda: delta))
    return cases


def fbgemm_contenders(
    initial: torch.Tensor, batches: Batches, gradients: torch.Tensor, counted_bytes: int
) -> list[Contender]:
    """Gather, FBGEMM's backward pass, gather, XOR.

    Without FBGEMM there are no cases, and a line says so.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
                EmbeddingLocation,
                PoolingMode,
            )
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
    except ImportError as error:
        print(f"fbgemm left out: {error}", file=sys.stderr)
        return []
    height, dimension = initial.shape
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(height, dimension, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
        preallocated_host_buffers={
            "weights": zeros(height * dimension),
            "momentum1": zeros(height),
        },
    )
    weights = table.split_embedding_weights()[0]
    weights.copy_(initial)
    state = [table.split_optimizer_states()[0][0].reshape(height)]
    offsets = torch.arange(len(gradients) + 1)
    pooled: list[torch.Tensor] = []

    def forward() -> None:
        batches.advance()
        pooled[:] = [table(batches.rows, offsets)]

    def backward_with_gathers() -> None:
        before = gather_records(weights, state, batches.rows, backend="cpu")
        pooled[0].backward(gradients)
        before ^= gather_records(weights, state, batches.rows, backend="cpu")

    return [Contender("fbgemm", backward_with_gathers, counted_bytes, forward)]


def interaction_cases(batch: int, dimension: int) -> list[Case]:
    """dot_interaction of one slot's samples.

    Without TorchRec there are no cases, and a line says so.
    """
    try:
        from torchrec.models.dlrm import InteractionArch
    except ImportError as error:
        print(f"dot_interaction left out: {error}", file=sys.stderr)
        return []
    features, generator = 26, torch.Generator().manual_seed(3)
    skewed = (
        torch.rand(batch, features, generator=generator) ** 4 * 20_000
    ).long() + 20_000 * torch.arange(features)
    rows, places = skewed.unique(return_inverse=True)
    places = places.reshape(-1)
    values, dense = zeros(rows.numel(), dimension), zeros(batch, dimension)
    gradients = zeros(batch, dimension + features * (features + 1) // 2)
    for matrix in (values, dense, gradients):
        matrix.normal_(generator=generator)
    arch, sums = InteractionArch(features), [torch.zeros(0)]

    def ours() -> None:
        dot_interaction(dense, values, places, backend="cpu")
        sums[0] = dot_interaction_backward(gradients, dense, values, places, backend="cpu")[1]

    def theirs() -> None:
        spread, first = (
            values.index_select(0, places).view(batch, features, -1).requires_grad_(),
            dense.clone().requires_grad_(),
        )
        _, of_rows = torch.autograd.grad(arch(first, spread), (first, spread), gradients)
        scatter_add(torch.zeros_like(values), places, of_rows.flatten(0, 1), backend="cpu")

    # forward: rows read; backward: rows read, sums read and written
    once = 4 * dimension * places.numel()
    counted = 4 * once + 2 * gradients.nbytes
    contenders = [
        Contender("dot_interaction", ours, counted),
        Contender("torchrec", theirs, counted),
    ]
    return [
        Case(
            "dot_interaction, forward and backward",
            batch,
            4 * dimension,
            contenders,
            lambda: sums[0],
        )
    ]


def machine() -> dict[str, object]:
    """Where and with what this ran."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in open("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        "?",
    )
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True
    )
    packages = {name: version(name) for name in ("torch", "fbgemm_gpu-cpu", "pyeclib")}
    return {
        "device": f"{model} ({platform.machine()}), 1 thread",
        "instruction_set": native.instruction_set(),
        "python": platform.python_version(),
        **packages,
        "commit": commit.stdout.strip() or "?",
        "date": time.strftime("%Y-%m-%d"),
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=2**20, help="parity rows, rows of the table (default 1,048,576)"
    )
    parser.add_argument(
        "--dimension", type=int, default=64, help="floats per row, at least 16 (default 64)"
    )
    parser.add_argument(
        "--touched", type=int, nargs="*", default=[20_000, 2**18], help="rows per sparse update"
    )
    parser.add_argument("--rounds", type=int, default=21, help="rounds to measure (default 21)")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="2,048 rows, 2 rounds: shows that it runs, not how fast",
    )
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="the cases with these words in their names"
    )
    parser.add_argument(
        "--csv",
        type=Path,
        help="file for the lines; benchmarks/results/kernels.csv unless --smoke or --only",
    )
    options = parser.parse_args(arguments)
    if options.csv is None and not options.smoke and not options.only:
        options.csv = Path(__file__).with_name("results") / "kernels.csv"
    if options.smoke:
        options.rows, options.touched, options.rounds = 2048, [512], 2

    keep_freed_memory()
    torch.set_num_threads(1)
    where, lines = machine(), []
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    cases = parity_cases(options.rows, 4 * options.dimension)
    cases += parity_cases(options.rows, 4 * options.dimension + 4, orders=("permuted",))
    for touched in options.touched:
        cases += update_cases(options.rows, options.dimension, touched)
        cases.append(logged_case(options.rows, options.dimension, touched))
        cases.append(gather_case(options.rows, options.dimension, touched))
    cases.append(decode_case(max(options.rows // 64, 1), 4 * options.dimension))
    cases.append(scatter_add_case(options.rows // 32, options.dimension, options.rows // 16))
    cases.append(divide_case(options.rows // 32, options.dimension))
    cases.append(digest_case(options.rows // 32, options.dimension))
    for batch, dimension in ((32, 16),) if options.smoke else ((1024, 64), (2048, 128)):
        cases += interaction_cases(batch, dimension)
    for batch, ids, dimension in (
        ((8, 3, 16),) if options.smoke else ((2048, 1, 128), (512, 20, 128))
    ):
        cases += bag_cases(batch, ids, dimension)
    cases += messages_cases(*((20, 500) if options.smoke else (1000, 20_000)))
    for case in cases:
        if options.only not in case.name:
            continue
        print(f"\n{case.name}: {case.rows} rows of {case.row_bytes} bytes")
        for line in report(case, measure(case, options.rounds)):
            lines.append(line | where)
            print(
                "  {contender:18s} {median_ms:9.3f} ms  (p20 {p20_ms:.3f}, p80 {p80_ms:.3f})  "
                "{gb_per_second:6.1f} GB/s"
                "   ours / this {ours_over_this:.3f}  "
                "({ours_over_this_p20:.3f} .. {ours_over_this_p80:.3f})".format(**line)
            )
        print(f"  sha256 of the result {lines[-1]['result_sha256']}")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
