"""The mpirun line of a run. Pure: config and facts about the machine in, words out."""

from __future__ import annotations

from collections.abc import Sequence

from ecrm.config import Config
from ecrm.config.script import Script

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Words of --mpirun-args after which the ranks may run elsewhere, so that this machine's cores say
# nothing.
PLACES_RANKS = ("--host", "-H", "--hostfile", "--machinefile", "--oversubscribe", "--map-by")


def thread_environment(config: Config) -> dict[str, str]:
    """Variables that hold every numeric library of a rank to train.threads threads.

    The libraries read them when torch is imported.
    """
    return {name: str(config.train.threads) for name in THREAD_VARIABLES}


def train_command(
    trained: str | Script,
    overrides: Sequence[str],
    run_dir: str | None,
    kills: Sequence[str],
    resume: str | None = None,
    init_from: str | None = None,
) -> list[str]:
    """The words of `ecrm train` after the program name; `trained` is a config or a script."""
    words, arguments = ["train"], []
    if isinstance(trained, Script):
        words += [str(trained.path)]
        words += ["--config", trained.config] if trained.config is not None else []
        arguments = ["--", *trained.arguments] if trained.arguments else []
    else:
        words += [trained]
    for override in overrides:
        words += ["--set", override]
    if run_dir is not None:
        words += ["--run-dir", run_dir]
    for kill in kills:
        words += ["--kill", kill]
    if resume is not None:
        words += ["--resume", resume]
    if init_from is not None:
        words += ["--init-from", init_from]
    return words + arguments


def mpirun_line(
    config: Config,
    command: Sequence[str],
    *,
    mpirun: str,
    cores: int,
    root: bool,
    extra: Sequence[str] = (),
    subnet: str | None = None,
) -> list[str]:
    """The words that start `command` (a program and its arguments) on config.world_size ranks.

    `cores` are this machine's, `root` is whether the user is root, `extra` are words for mpirun,
    last so that they win. With a `subnet`, `command` takes its rank to another host, and ranks talk
    over that.
    """
    line = [mpirun, "--with-ft", "ulfm"]
    placed = any(word.split("=")[0] in PLACES_RANKS for word in extra)
    if subnet is not None or (config.world_size > cores and not placed):
        line.append("--oversubscribe")
    if root:
        line.append("--allow-run-as-root")
    # Binding would pin a rank's numeric threads, and its guard, to one core.
    line += ["--bind-to", "none"]
    # han and cuda deadlock in Agree across hosts (open-mpi/ompi#13915); the other two are what
    # --with-ft excludes by itself, which an option of the same name replaces.
    line += ["--mca", "coll", "^han,cuda,hcoll,portals4"]
    # PMIx's store in shared memory: neither for ranks on other hosts, nor safe from a lock whose
    # holder has died (prterun aborted on one).
    line += ["--pmixmca", "gds", "hash"]
    if subnet is not None:
        line += over_network(subnet)
    for name, value in thread_environment(config).items():
        line += ["-x", f"{name}={value}"]
    return [*line, *extra, "-n", str(config.world_size), *command]


def over_network(subnet: str) -> list[str]:
    """Options of an mpirun that stays on this machine while its ranks are on others.

    No daemon elsewhere, for the daemons of Open MPI 5.0 cannot lose one another; ranks reach this
    one, and each other, by TCP. mpirun takes all ranks for its neighbours, so whatever shares
    memory is left out.
    """
    return [
        *("--prtemca", "ras", "^slurm,pbs", "--prtemca", "plm", "^slurm"),
        *(
            "--pmixmca",
            "ptl_tcp_remote_connections",
            "1",
            "--pmixmca",
            "ptl_tcp_if_include",
            subnet,
        ),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", subnet),
    ]
