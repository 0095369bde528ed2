"""A user's script on ranks under mpirun: it runs, and an error in it ends all ranks."""

from support.commands import ecrm

TWO = ("--servers", "1", "--trainers", "1", "--spares", "0", "--protection", "none")

SHARES = """
import sys
from ecrm.rank.collective_check import share_json
from ecrm.session.rank import this_rank

transport = this_rank().transport
said = share_json(transport, [transport.rank, sys.argv[1]])
print("shared", sorted(said.values()))
"""

FAILS = """
from ecrm.session.rank import this_rank

if this_rank().transport.rank == 1:
    raise ValueError("one rank has no data")
from ecrm.rank.collective_check import collective_check
collective_check(this_rank().transport, lambda: None)  # as a Session does
print("never")
"""


def run(tmp_path, text: str, *arguments: str):
    (tmp_path / "train.py").write_text(text)
    words = ("launch", "train.py", *TWO, "--run-dir", "run", "--", *arguments)
    return ecrm(*words, cwd=tmp_path, timeout=100)


def test_ranks_of_a_script_reach_one_another_and_one_that_trains_nothing_is_refused(tmp_path):
    done = run(tmp_path, SHARES, "x")
    assert done.stdout.count("shared [[0, 'x'], [1, 'x']]") == 2
    assert "ecrm: error: train.py has ended without training" in done.stderr
    assert done.returncode == 8
    assert not (tmp_path / "run").exists()


def test_an_error_on_one_rank_ends_all_with_its_traceback_once(tmp_path):
    done = run(tmp_path, FAILS)
    assert done.returncode == 8
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ecrm: error: ") == 1
    assert "ecrm: error: train.py failed on rank 1: ValueError: one rank has no data" in done.stderr
    assert "never" not in done.stdout
