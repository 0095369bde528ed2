"""The variables for starting mpirun, without variables able to change the mpirun line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ecrm.kernels.native import LIBRARY
from ecrm.process.fork_server import OF_MPIRUN

SESSION_BASE = "PRTE_MCA_prte_tmpdir_base"
"""The folder for mpirun's session files: the only variable of mpirun left to the user."""


PRELOAD = "LD_PRELOAD"


def on_loopback(environ: Mapping[str, str], library: Path = LIBRARY) -> dict[str, str]:
    """The variable with which an mpirun listens on the loopback alone (kernels/links/loopback.h).

    PRRTE 3.0 listens on all addresses, and a connection that says nothing holds mpirun up. The
    ranks get `LD_PRELOAD` as it is in `environ`. Empty for a library whose path has a space or a
    colon: LD_PRELOAD knows no such paths.
    """
    if any(letter in str(library) for letter in " :"):
        return {}
    return {PRELOAD: ":".join(filter(None, (str(library), environ.get(PRELOAD))))}


def mpirun_environment(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """`environ` without the variables of Open MPI, and a line naming the removed variables, if any.

    A cluster's module sets such variables for another Open MPI (OMPI_MCA_pml=ucx, OPAL_PREFIX), and
    an mpirun or a batch step around this process for its own ranks (PMIX_RANK).
    """
    ignored = sorted(
        name for name in environ if name.startswith(OF_MPIRUN) and name != SESSION_BASE
    )
    left = {name: value for name, value in environ.items() if name not in ignored}
    if not ignored:
        return left, []
    return left, [
        f"{', '.join(ignored)}: set in the environment, and not handed on to mpirun; a parameter "
        'of Open MPI goes into --mpirun-args="--mca NAME VALUE"'
    ]
