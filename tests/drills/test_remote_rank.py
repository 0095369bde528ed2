"""Thirty ranks of one host, reached by real ssh."""

from __future__ import annotations

import pytest

from ecrm.process.preflight import JOB_FOLDER
from support.imitated_hosts import imitated, why_not
from support.remote_ranks import starting_clients
from support.ssh_servers import serve, why_no_ssh


@pytest.fixture
def reach(tmp_path):
    with starting_clients(tmp_path) as start:
        yield start


@pytest.mark.skipif((why_no_ssh() or why_not()) is not None, reason=str(why_no_ssh() or why_not()))
@pytest.mark.parametrize("turns", [True, False])
def test_many_ranks_of_a_host_are_started_by_ssh(reach, tmp_path, turns):
    """A real sshd with MaxStartups 10, and thirty ranks: without turns some are dropped."""
    with imitated(1) as hosts:
        (tmp_path / "private").mkdir()
        (tmp_path / "hosts").write_text(f"here\nthere slots=100 address={hosts.address('h1')}\n")
        starter = serve(hosts, tmp_path / "ssh", tmp_path / "private")
        variables = {"OMPI_COMM_WORLD_SIZE": "31", **({JOB_FOLDER: str(tmp_path)} if turns else {})}
        clients = [
            reach(
                "echo", "well", starter=starter, head=hosts.head, PMIX_RANK=str(rank), **variables
            )
            for rank in range(1, 31)
        ]
        ended = [(*client.communicate(timeout=60), client.returncode) for client in clients]
    dropped = sum(errors.count("trying again") for _, errors, _ in ended)
    print(f"{dropped} connections dropped")
    assert (dropped == 0) == turns
    well = [(output, code) == ("well\n", 0) for output, _, code in ended]
    assert not turns or all(well), ended
