"""The benchmark of GPUs where there is none: every kernel is called, and nothing is written."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from support.benchmarking import program
from support.drilling import is_running


def test_without_a_gpu_it_ends_with_one_line_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU: torch .* finds none here") as ended:
        program("bench_gpu").main(["--output", str(tmp_path / "gpu.csv")])
    assert str(ended.value).count("\n") == 0 and not list(tmp_path.iterdir())


def test_a_smoke_run_calls_every_kernel(committed_results, monkeypatch):
    pytest.importorskip("triton")
    benchmark, called = program("bench_gpu"), []
    right = benchmark.interpreted
    monkeypatch.setattr(
        benchmark, "interpreted", lambda case: called.append(case.name) or right(case)
    )
    benchmark.main(["--smoke"])
    words = {name.split()[0].rstrip(",") for name in called}
    assert words >= {"copy", "parity_apply", "decode", "sparse_update", "scatter_add"}
    assert words >= {"gather_records", "scatter_records", "xor_records", "merge_records"}
    assert words >= {"hash_uniform", "begin_rows", "dot_interaction", "unique_by_unit"}
    assert sum(name.startswith("sparse_update") for name in called) == 12


@pytest.fixture
def imagined_gpu(monkeypatch):
    """CUDA's events and waits noted; every call between two events takes a millisecond more."""
    noted, calls = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            noted.append("event")

        def elapsed_time(self, end):
            calls.append(self)
            return float(len(calls))

    monkeypatch.setattr(program("bench_gpu"), "FLUSHED", 8)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: noted.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: noted.append("wait"))
    return noted


def test_calls_are_queued_behind_a_gpu_that_sleeps_and_waited_for_once(imagined_gpu):
    benchmark = program("bench_gpu")
    timer = benchmark.OnGpu(torch.device("cpu"), repeats=4)
    assert timer._asleep == 1e-3
    timer._asleep = 1.0  # of a machine that may be busy
    imagined_gpu.clear()
    prepare, call = (lambda name=name: imagined_gpu.append(name) for name in ("prepare", "call"))
    timed = timer(benchmark.GpuCase("case", 1, 1, 1, call, prepare))
    assert imagined_gpu == [*("prepare", "sleep", "event", "call", "event") * 7, "wait"]
    assert len(timed.seconds) == len(timed.host) == 4 and timed.queued


def test_a_call_that_waits_for_the_gpu_is_told_from_those_that_do_not(imagined_gpu):
    benchmark = program("bench_gpu")
    timer = benchmark.OnGpu(torch.device("cpu"), repeats=1)
    timer._asleep = 1e-3
    waits = benchmark.GpuCase("case", 1, 1, 1, lambda: time.sleep(2e-3))
    assert not timer(waits).queued


def test_a_kernel_that_fails_has_an_empty_line_and_the_others_are_measured(capsys):
    benchmark = program("bench_gpu")

    def timer(case):
        if case.name == "xor_records":
            raise RuntimeError("out of memory\nadvice")
        return benchmark.Timed([3e-3, 1e-3, 2e-3], [1e-4], True)

    rows = list(benchmark.kernels(torch.device("cpu"), benchmark.TINY, timer, 1 << 10, [5e-3]))
    found = {(row["case"], row["dtype"]): row for row in rows}
    assert "xor_records float32 failed: out of memory\n" in capsys.readouterr().out
    failed = found["xor_records", "float32"]
    assert failed["counted_bytes"] and {failed[name] for name in benchmark.MEASURED} == {""}
    assert all(row["median_ms"] == "2.0000" for row in rows if row is not failed)
    copy = found["copy", "float32"]
    assert (copy["of_copy"], copy["host_ms"], copy["queued"]) == ("1.000", "0.1000", "yes")
    assert {name for name, row in found.items() if row["peer_ms"]} == {benchmark.PEER_OF}
    assert found[benchmark.PEER_OF]["peer_ms"] == "5.0000"


def test_where_the_copy_fails_no_kernel_takes_its_place():
    benchmark = program("bench_gpu")

    def timer(case):
        if case.name == "copy":
            raise RuntimeError("out of memory")
        return benchmark.Timed([1e-3], [1e-4], True)

    _, *others = benchmark.kernels(torch.device("cpu"), benchmark.TINY, timer, 1 << 10)
    assert others and all(row["median_ms"] and row["of_copy"] == "" for row in others)


@pytest.mark.parametrize(
    ("answer", "seconds", "said"),
    [
        (SimpleNamespace(returncode=0, stdout="noise\n[0.5, 0.25]\n", stderr=""), [0.5, 0.25], ""),
        (SimpleNamespace(returncode=1, stdout="", stderr="noise\nno build\n"), [], "no build"),
        (SimpleNamespace(returncode=-11, stdout="", stderr=""), [], "ended with -11"),
        (subprocess.TimeoutExpired("x", 1), [], "not done after 90 s"),
    ],
)
def test_the_peer_runs_in_a_process_of_its_own(monkeypatch, capsys, answer, seconds, said):
    def run(words, **options):
        assert words[0] == sys.executable and words[-4:] == ["--part", "peer", "--repeats", "7"]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(subprocess, "run", run)
    assert program("bench_gpu").peer(7) == seconds
    out = capsys.readouterr().out
    assert out == (f"no peer: FBGEMM on CUDA: {said}\n" if said else "")


def test_protected_steps_are_compared_with_plain_ones_of_their_round(tmp_path):
    speeds = {"none-0": 2048.0, "erasure-0": 1024.0}
    rows = program("bench_gpu").steps(
        1, lambda folder, sets: {"samples_per_second": speeds[folder.name]}, tmp_path, tmp_path
    )
    found = {row["case"]: (row["median_ms"], row["over_unprotected"]) for row in rows}
    assert found == {"none": ("1000.000", "1.0000"), "erasure": ("2000.000", "2.0000")}


def test_gpu_check_says_that_there_is_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"gpu_check\.py needs an NVIDIA GPU: torch .* finds none"):
        program("gpu_check").main(["--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_failed_part_of_gpu_check_is_told_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    check = program("gpu_check")
    wrong = {
        "killed": check.PartFailed("not done after 60 s"),
        "bench": ValueError("any error"),
        "sanitizer": check.LeftOut("compute-sanitizer is not installed"),
    }

    def part(name):
        def run(place):
            assert place.part == name and place.imitated
            if name in wrong:
                raise wrong[name]
            return "well"

        return run, 1

    for name in check.PARTS:
        monkeypatch.setitem(check.PARTS, name, part(name))
    results = {name: "failed" if name in ("killed", "bench") else "passed" for name in check.PARTS}
    results["sanitizer"] = "left"
    assert check.main(["--output", str(tmp_path), "--imitated"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert {line.split()[0]: line.split()[1] for line in told} == results
    written = (tmp_path / "gpu_check.csv").read_text()
    assert "bench,failed,0.0,any error" in written
    assert "sanitizer,left out,0.0,compute-sanitizer is not installed" in written
    passes = ["--imitated", "--part", "sanitizer", "--part", "machine"]
    assert check.main(["--output", str(tmp_path), *passes]) == 0


def test_all_parts_of_gpu_check_take_less_than_ten_minutes(tmp_path, monkeypatch, capsys):
    check = program("gpu_check")
    assert sum(limit for _, limit in check.PARTS.values()) <= check.TOTAL_SECONDS < 600
    monkeypatch.setattr(check, "TOTAL_SECONDS", 0)
    assert check.main(["--output", str(tmp_path), "--imitated", "--part", "killed"]) == 1
    assert "no time was left" in capsys.readouterr().out


def place(tmp_path, part="killed", seconds=20.0, imitated=True):
    return program("gpu_check").Place(part, tmp_path, seconds, imitated)


STARTS_ANOTHER = """
import subprocess, sys, time
words = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(words, start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_part_that_takes_too_long_is_killed_with_all_that_it_started(tmp_path):
    check = program("gpu_check")
    with pytest.raises(check.PartFailed, match="not done after 1 s, see killed.log"):
        place(tmp_path, seconds=1.0).call([sys.executable, "-c", STARTS_ANOTHER])
    (child,) = (tmp_path / "killed.log").read_text().splitlines()[-1:]
    deadline = time.monotonic() + 5
    while is_running(int(child)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_part_whose_tests_are_all_left_out_has_failed(tmp_path, monkeypatch):
    check = program("gpu_check")
    said = ["3 skipped in 0.1s"]
    monkeypatch.setattr(check.Place, "call", lambda self, words, more=None: said[0])
    with pytest.raises(check.PartFailed, match="no test has run, see killed.log"):
        check.killed(place(tmp_path))
    said[0] = "noise\n===== 2 passed, 3 skipped in 0.1s =====\n"
    assert check.killed(place(tmp_path)) == "2 passed, 3 skipped in 0.1s"


def test_compute_sanitizer_is_used_where_it_is_installed(tmp_path, monkeypatch):
    check = program("gpu_check")
    monkeypatch.setattr(check.shutil, "which", lambda name, path=None: None)
    with pytest.raises(check.LeftOut, match="compute-sanitizer is not installed"):
        check.sanitizer(place(tmp_path, imitated=False))
    monkeypatch.setattr(check.shutil, "which", lambda name, path=None: path and f"{path}/{name}")
    called = []

    def call(self, words, more=None):
        called.append((words, more))
        return "5 passed in 1s"

    monkeypatch.setattr(check.Place, "call", call)
    assert check.sanitizer(place(tmp_path, imitated=False)) == "5 passed in 1s"
    ((words, more),) = called
    assert words[0] == "/usr/local/cuda/bin/compute-sanitizer" and str(check.KERNEL_TESTS) in words
    # torch's own pool of memory would hide what is read beyond a tensor
    assert more == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with pytest.raises(check.LeftOut, match="there is no GPU for it"):
        check.sanitizer(place(tmp_path))
