"""The variables for starting mpirun, without variables able to change the mpirun line."""

from __future__ import annotations

from collections.abc import Mapping

from ecrm.process.fork_server import OF_MPIRUN

SESSION_BASE = "PRTE_MCA_prte_tmpdir_base"
"""The folder for mpirun's session files: the only variable of mpirun left to the user."""


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
