"""Ranks with a GPU under mpirun: killed, taken over by the CPU, and gone on with there."""

import pytest

from support.drilling import BASE, REBUILT_AT_ONCE, drill, resume
from support.examples import dead_ranks, run_example
from support.paths import PROGRAMS

ROWS = {**BASE, "storage.device": "cuda", **REBUILT_AT_ONCE}
SEVEN = {"cluster.servers": 4, "cluster.spares": 1}
BOTH_KILLED = ("1@9:parity", "3@20:backward")
"""A server, and the first of two trainers beside three servers."""


def test_seven_ranks_share_a_gpu_and_a_killed_server_costs_no_bit(
    tmp_path, criteo_rows, undisturbed, gpu
):
    run = drill(tmp_path / "run", criteo_rows, {**ROWS, **SEVEN, **gpu.sets}, ("1@9:parity",))
    assert len(run.ranks) == 7
    assert run.model == undisturbed, "that of rows on the CPU"
    ran = run.summary["kernels_ran"]
    assert {ran[name] for name in ("sparse_update", "parity_apply", "decode")} == {gpu.kernels}
    # what is lent on a GPU is read where its twin lies
    shared = {each["rank"]: each["shared"] for each in run.summary["traffic_bytes_per_rank"]}
    assert min(shared[0], shared[2]) > 0


def test_interpreted_kernels_survive_a_killed_server(tmp_path, criteo_rows):
    """A short run: they take a while."""
    sets = {**BASE, **SEVEN, "train.steps": 10, "train.global_batch": 16}
    sets |= {"model.max_rows_per_table": 20, **REBUILT_AT_ONCE}
    imitated = {"storage.device": "cuda", "testing.imitated_gpu": True, "kernels.backend": "triton"}
    calm = drill(tmp_path / "calm", criteo_rows, sets)
    run = drill(tmp_path / "run", criteo_rows, {**sets, **imitated}, ("1@4:parity",))
    assert run.model == calm.model
    ran = run.summary["kernels_ran"]
    assert {ran[name] for name in ("sparse_update", "parity_apply", "decode")} == {"triton"}


@pytest.mark.parametrize("devices", [("train",), ("train", "storage")])
def test_a_model_trained_on_a_gpu_survives_kills(tmp_path, criteo_rows, undisturbed, gpu, devices):
    """Its bits are the CPU's on an imitated one alone."""
    sets = {**BASE, "cluster.spares": 2, **REBUILT_AT_ONCE, **gpu.sets}
    sets |= {f"{device}.device": "cuda" for device in devices}
    calm = undisturbed if gpu.is_imitated else drill(tmp_path / "calm", criteo_rows, sets).model
    run = drill(tmp_path / "run", criteo_rows, sets, BOTH_KILLED)
    assert run.model == calm
    assert run.summary["kernels_ran"]["dot_interaction"] == gpu.kernels


def test_a_cpu_spare_takes_over_from_a_gpu(tmp_path, criteo_rows, undisturbed, gpu):
    """The spare's own config has no GPU."""
    on_cpu = "set storage.device=cpu testing.imitated_gpu=false kernels.backend=auto:6"
    program = (str(PROGRAMS / "misbehaving.py"), on_cpu)
    sets = {**ROWS, **SEVEN, **gpu.sets}
    run = drill(tmp_path / "run", criteo_rows, sets, ("1@9:parity",), program)
    assert run.events_of("failure")[0]["shards"] == {"1": 6}
    assert run.model == undisturbed


@pytest.mark.parametrize("first", ["cpu", "gpu"])
def test_a_run_goes_on_from_a_checkpoint_of_the_other_device(
    tmp_path, criteo_rows, undisturbed, gpu, first
):
    on_cpu = {**BASE, "checkpoint.every_steps": 15}
    on_gpu = {**ROWS, **on_cpu, **gpu.sets}
    before, after = (on_cpu, on_gpu) if first == "cpu" else (on_gpu, on_cpu)
    half = drill(tmp_path / "half", criteo_rows, {**before, "train.steps": 20})
    run = resume(tmp_path / "run", criteo_rows, half.folder, after, ("1@29:update",))
    assert run.code == 0 and "from step 20" in run.output, run.output
    assert dead_ranks(run) == [1] and run.model == undisturbed


def test_a_script_on_a_gpu_survives_a_killed_server_and_a_killed_trainer(
    tmp_path, criteo_rows, gpu
):
    """The bits of its model are the CPU's on an imitated one alone."""
    on_gpu = {"storage.device": "cuda", "train.device": "cuda", **gpu.sets}
    words = tuple(
        word for key, value in on_gpu.items() for word in ("--set", f"{key}={value}".lower())
    )

    def train(name, *words):
        (tmp_path / name).mkdir()
        own = (str(criteo_rows), "--steps", "30", "--max-rows", "2000")
        run = run_example("criteo_dlrm.py", tmp_path / name, words, own)
        assert run.code == 0, run.output
        return run

    calm = train("calm", *(() if gpu.is_imitated else words))
    killed = train("killed", *words, "--kill", "1@9:parity", "--kill", "4@20")
    assert (dead_ranks(calm), dead_ranks(killed)) == ([], [1, 4])
    assert killed.summary["kernels_ran"]["sparse_update"] == gpu.kernels
    assert killed.model == calm.model
    saved = [tmp_path / name / "model.safetensors" for name in ("calm", "killed")]
    assert saved[0].read_bytes() == saved[1].read_bytes()
