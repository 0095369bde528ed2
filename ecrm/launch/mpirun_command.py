"""The mpirun line of a run. Pure: config and facts about the machine in, words out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Container, Mapping, Sequence

from ecrm.config import Config
from ecrm.config.script import Script

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

ELSEWHERE = frozenset(("--host", "-H", "--hostfile", "--machinefile"))
"""Words of --mpirun-args with which ranks may run on other machines.

Memory and cores of other machines are unknown to the launcher.
"""
PLACES_RANKS = ELSEWHERE | {"--oversubscribe", "--map-by"}
"""Words of --mpirun-args after which the number of this machine's cores does not matter."""
HASH_SEED = "PYTHONHASHSEED"


def thread_environment(config: Config) -> dict[str, str]:
    """Variables limiting every numeric library of a rank to train.threads threads.

    The libraries read the variables when torch is imported.
    """
    return {name: str(config.train.threads) for name in THREAD_VARIABLES}


def hash_seed(environ: Mapping[str, str]) -> str:
    """The seed of Python's hash() of text for all ranks: a number from `environ`, else 0.

    Without a common seed, `hash(word) % rows` is a different row in each process, and after each
    resume.
    """
    seed = environ.get(HASH_SEED, "")
    return seed if seed.isdecimal() else "0"


def train_command(
    trained: str | Script,
    overrides: Sequence[str],
    run_dir: str | None,
    kills: Sequence[str],
    resume: str | None = None,
    init_from: str | None = None,
    spec: str | None = None,
) -> list[str]:
    """The words of `ecrm train` after the program name; `trained` is a config or a script.

    `spec` is the digest of the launch's `RunSpec`.
    """
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
    if spec is not None:
        words += ["--spec", spec]
    return words + arguments


def mpirun_line(
    config: Config,
    command: Sequence[str],
    *,
    mpirun: str,
    cores: int,
    root: bool,
    extra: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """The words starting `command` (a program and its arguments) on config.world_size ranks.

    `cores` are this machine's, `root` is whether the user is root, `extra` are words for mpirun,
    last; an MCA parameter set in `extra` is left out before. Ranks on this machine alone talk
    through shared memory alone, and no rank listens on the network.
    """
    line = [mpirun, "--with-ft", "ulfm"]
    placed = _names(extra, PLACES_RANKS)
    if config.world_size > cores and not placed:
        line.append("--oversubscribe")
    if root:
        line.append("--allow-run-as-root")
    # Binding would pin a rank's numeric threads, and its guard, to one core.
    line += ["--bind-to", "none"]
    # han and cuda deadlock in Agree across hosts (open-mpi/ompi#13915); --with-ft excludes hcoll
    # and portals4 by itself, but an option of the same name replaces the list of --with-ft.
    parameters = [("--mca", "coll", "^han,cuda,hcoll,portals4")]
    # Not PMIx's store in shared memory: the store does not serve ranks on other hosts, and is not
    # safe from a lock with a dead holder (prterun aborted on such a lock).
    parameters += [("--pmixmca", "gds", "hash")]
    if not _names(extra, ELSEWHERE):
        parameters += ON_THIS_MACHINE
    theirs = {name for word, name in itertools.pairwise(extra) if word.endswith("mca")}
    for parameter in parameters:
        line += parameter if parameter[1] not in theirs else ()
    for name, value in thread_environment(config).items():
        line += ["-x", f"{name}={value}"]
    line += ["-x", f"{HASH_SEED}={hash_seed(environ)}"]
    return [*line, *extra, "-n", str(config.world_size), *command]


ON_ONE_MPIRUN = (("--prtemca", "ras", "^slurm,pbs"), ("--prtemca", "plm", "^slurm"))
"""Options to start all ranks on this machine, ignoring the variables of a batch system."""

ON_THIS_MACHINE = (*ON_ONE_MPIRUN, ("--mca", "pml", "ob1"), ("--mca", "btl", "self,sm"))


def _names(words: Sequence[str], options: Container[str]) -> bool:
    """Whether a word of `words` is among `options`, with or without =VALUE."""
    return any(word.split("=")[0] in options for word in words)
