"""The `ecrm` command: exit codes, one-line errors without traceback, no heavy imports."""

import os
import shutil
import subprocess
import sys

import pytest

from support.commands import ECRM, assert_one_line, ecrm, forked_ecrm


@pytest.fixture
def dataset(criteo_rows):
    return f"data.path={criteo_rows}"


def test_help_and_errors_import_nothing_heavy():
    program = """
import sys, ecrm.cli.commands
ecrm.cli.commands.main(['launch', 'quickstart', '--set', 'data.path=absent'])
print({'torch', 'numpy', 'mpi4py', 'pyarrow'} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "set()\n" and "no such directory" in done.stderr
    assert "launch" in ecrm("--help").stdout


def test_config_prints_the_reference_and_the_effective_values():
    assert "# Floats per embedding row." in forked_ecrm("config").stdout
    done = forked_ecrm("config", "quickstart", "--set", "train.seed=99")
    assert done.returncode == 0 and "seed = 99" in done.stdout and "[testing]" in done.stdout


def test_output_onto_a_full_disk_is_one_line(tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("label,id\n0,1\n1,2\n")
    for words in (["config"], ["schema", str(rows)]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*ECRM, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
            )
        assert_one_line(done, "the output cannot be written: No space left on device", code=1)


@pytest.mark.parametrize("command", ["train", "launch", "config"])
def test_a_wrong_config_is_one_line_and_exit_code_2(command):
    assert_one_line(
        forked_ecrm(command, "quickstart", "--set", "train.sead=1"), "did you mean train.seed?"
    )
    assert_one_line(forked_ecrm(command, "absent.toml"), "no config file 'absent.toml'")


def test_missing_data_is_told_before_anything_starts(tmp_path):
    done = forked_ecrm("launch", "quickstart", "--set", "data.path=absent", cwd=tmp_path)
    assert_one_line(
        done,
        "absent: there is no such directory; `ecrm prepare criteo FILE --output absent` makes one, "
        "or `ecrm prepare table FILES --schema schema.toml --output absent`",
    )
    (tmp_path / "empty").mkdir()
    done = forked_ecrm("launch", "quickstart", "--set", "data.path=empty", cwd=tmp_path)
    assert_one_line(done, "no manifest.json")
    (tmp_path / "empty" / "manifest.json").write_text("{")
    done = forked_ecrm("launch", "quickstart", "--set", "data.path=empty", cwd=tmp_path)
    assert_one_line(done, "not valid JSON", code=4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["empty"]


@pytest.fixture
def damaged(criteo_rows, tmp_path):
    """A copy of the dataset that a test may damage."""
    return shutil.copytree(criteo_rows, tmp_path / "damaged")


@pytest.mark.parametrize(
    "command", [["launch"], ["launch", "--dry-run"], ["drill", "--kill", "1@3"]]
)
def test_damaged_data_is_told_before_anything_starts(damaged, tmp_path, command):
    words = [*command, "tiny", "--set", f"data.path={damaged}"]
    os.truncate(damaged / "dense.bin", 100)
    assert_one_line(
        forked_ecrm(*words, cwd=tmp_path), "dense.bin: expected 624000 bytes, found 100", code=4
    )
    (damaged / "sparse.bin").unlink()
    (damaged / "dense.bin").write_bytes(bytes(624000))
    assert_one_line(forked_ecrm(*words, cwd=tmp_path), "sparse.bin: missing, expected", code=4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["damaged"]


def test_a_rank_tells_damaged_data_before_torch_is_imported(damaged):
    os.truncate(damaged / "dense.bin", 100)
    program = """
import sys, ecrm.cli.commands
code = ecrm.cli.commands.main(sys.argv[1:])
print(code, {'torch', 'mpi4py'} & set(sys.modules))
"""
    sets = (
        f"data.path={damaged}",
        "cluster.layout=colocated",
        "cluster.servers=1",
        "cluster.trainers=1",
        "cluster.spares=0",
        "protection.name=none",
    )
    words = ["train", "tiny", *(word for one in sets for word in ("--set", one))]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr.count("\n")) == ("4 set()\n", 1), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--set", "train.global_batch=20000"],
            "10800 training rows, fewer than train.global_batch, 20000: set "
            "train.global_batch=10800",
        ),
        (
            ["--set", "train.epochs=0.001"],
            "less than one step of train.global_batch=64: set train.epochs=0.006, or more",
        ),
        (
            ["--set", "train.epochs=2", "--kill", "1@337:parity"],
            "there is no step 337, the last is 336",
        ),
        (
            ["--set", "model.max_rows_per_table=1"],
            "model.max_rows_per_table is 1: must be 0, for no cap, or at least 2",
        ),
        (["--mpirun-args", '"'], '--mpirun-args ": no closing quotation'),
    ],
)
def test_what_cannot_run_is_told_before_anything_starts(dataset, tmp_path, words, said):
    for dry in ([], ["--dry-run"]):
        assert_one_line(
            forked_ecrm("launch", *dry, "tiny", "--set", dataset, *words, cwd=tmp_path), said
        )
    assert list(tmp_path.iterdir()) == []


def test_the_least_number_of_epochs_named_is_enough(dataset):
    assert (
        forked_ecrm(
            "launch", "--dry-run", "tiny", "--set", dataset, "--set", "train.epochs=0.006"
        ).returncode
        == 0
    )


def test_several_problems_are_one_error_with_a_line_each():
    done = forked_ecrm(
        "launch", "quickstart", "--set", "train.sead=1", "--set", "cluster.spares=-1"
    )
    first, *others = done.stderr.splitlines()
    assert first == "ecrm: error: quickstart.toml: 2 problems" and len(others) == 2
    assert all(line.startswith("  ") and "error" not in line for line in others)


@pytest.mark.parametrize(
    ("kill", "said"),
    [
        ("1", "--kill 1: "),
        ("1@" + "9" * 5000, "type RANK@STEP"),
        ("1@" + "9" * 18, "there is no step"),
        ("1@x", "--kill 1@x: "),
        ("1@3:sleep", "sleep"),
        ("6@3", "6"),
        ("1@20:parity", "20"),
    ],
)
def test_a_kill_that_cannot_happen_is_refused(dataset, kill, said):
    assert_one_line(
        forked_ecrm("launch", "tiny", "--set", dataset, "--kill", kill, "--dry-run"), said
    )


@pytest.mark.parametrize("command", ["train", "launch"])
def test_scrubbing_is_an_option_that_names_its_key_when_wrong(command):
    for value, said in (
        ("many", "must be a whole number"),
        ("-1", "must be at least 0"),
        ("1.5", "must be a whole number"),
    ):
        done = forked_ecrm(command, "quickstart", f"--scrub-rows-per-step={value}")
        assert_one_line(done, "protection.scrub_rows_per_step")
        assert said in done.stderr
    done = forked_ecrm(
        command, "quickstart", "--set", "protection.name=none", "--scrub-rows-per-step", "100"
    )
    assert_one_line(done, "protection.name is none, which keeps no parity to compare with")


def test_launch_hands_scrubbing_on(dataset):
    done = forked_ecrm(
        "launch", "tiny", "--set", dataset, "--scrub-rows-per-step", "100", "--dry-run"
    )
    assert done.returncode == 0, done.stderr
    assert "--set protection.scrub_rows_per_step=100" in done.stdout


def test_a_run_folder_that_holds_anything_is_refused_and_left_alone(dataset, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for command in (["launch"], ["launch", "--dry-run"]):
        assert_one_line(
            forked_ecrm(*command, "tiny", "--set", dataset, "--run-dir", str(folder)), "not empty"
        )
    (folder / "summary.json").write_text("{}")
    assert_one_line(
        forked_ecrm("launch", "tiny", "--set", dataset, "--run-dir", str(folder)),
        "holds a finished run",
    )
    assert_one_line(
        forked_ecrm("launch", "tiny", "--set", dataset, "--run-dir", str(folder / "notes.txt")),
        "not a folder",
    )
    assert sorted(entry.name for entry in folder.iterdir()) == ["notes.txt", "summary.json"]
    assert_one_line(
        forked_ecrm("launch", "tiny", "--set", dataset, "--run-dir", str(tmp_path / ("x" * 300))),
        "File name too long; name a folder",
    )


def test_a_wrong_command_line_is_exit_code_2_without_a_traceback():
    for words in ([], ["fly"], ["train"], ["launch", "tiny", "--sett", "a"]):
        done = forked_ecrm(*words)
        assert done.returncode == 2 and "Traceback" not in done.stderr


def test_the_root_folder_as_an_output_is_refused(tmp_path):
    made = tmp_path / "rows.txt"
    assert (
        forked_ecrm(
            "generate", "criteo", "--rows", "10", "--seed", "1", "--output", str(made)
        ).returncode
        == 0
    )
    for words in (
        ["generate", "criteo", "--rows", "10", "--seed", "1"],
        ["prepare", "criteo", str(made)],
    ):
        assert_one_line(
            forked_ecrm(*words, "--output", "/"),
            "/: cannot be written: it is the root folder; name one in it",
        )


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import subprocess; p = subprocess.Popen({[*ECRM, 'config']!r}, "
            f"stdout=subprocess.PIPE); "
            "p.stdout.close(); raise SystemExit(p.wait())",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (141, "")
