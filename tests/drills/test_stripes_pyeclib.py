"""Stripes of a running job are pyeclib's, byte for byte, before and after a kill."""

from __future__ import annotations

import pytest

from support.mpirunning import mpirun
from support.paths import PROGRAMS

PROGRAM = PROGRAMS / "stripes_against_pyeclib.py"


@pytest.mark.parametrize(("k", "m", "servers"), [(3, 1, 4), (2, 2, 5), (2, 4, 6)])
def test_pyeclib_encodes_and_decodes_a_running_jobs_stripes(tmp_path, k, m, servers):
    result = tmp_path / "result"
    done = mpirun(servers + 2 + 1, PROGRAM, k, m, servers, result)
    assert result.exists(), done
    lines = [line.split(maxsplit=2) for line in result.read_text().splitlines()]
    assert {verdict for _, _, verdict in lines} == {"same"}, lines
    assert {failures for _, failures, _ in lines} == {"0", "1"}, lines
