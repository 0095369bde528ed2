"""Thirty ranks of one host, reached by real ssh."""

from __future__ import annotations

import pytest

from support.imitated_hosts import imitated, why_not
from support.remote_runs import starting_runs
from support.ssh_servers import serve, why_no_ssh


@pytest.mark.skipif((why_no_ssh() or why_not()) is not None, reason=str(why_no_ssh() or why_not()))
def test_many_ranks_of_a_host_are_started_by_one_ssh(tmp_path):
    """A real sshd with MaxStartups 10: a connection for each rank was dropped."""
    with starting_runs(tmp_path) as reach, imitated(1) as hosts:
        (tmp_path / "private").mkdir()
        (tmp_path / "hosts").write_text(f"there slots=100 address={hosts.address('h1')}\n")
        starter = serve(hosts, tmp_path / "ssh", tmp_path / "private")
        run = reach("echo", "well", ranks=30, starter=starter, head=hosts.head)
        output, errors = run.communicate(timeout=60)
    assert (output, errors, run.returncode) == ("well\n" * 30, "", 0)
