"""`ecrm launch`: check everything, print and run the mpirun line, judge by the run's files."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ecrm.base.console import Waiting
from ecrm.base.errors import (
    STOPPED_EXIT_CODE,
    DataError,
    EcrmError,
    NotKept,
    ScriptFailed,
    UsageError,
)
from ecrm.config.script import SUFFIX, Script
from ecrm.launch.environment import mpirun_environment, on_loopback
from ecrm.launch.gpu_memory import free_on_gpus
from ecrm.launch.machine import find_mpirun, physical_cores, require_fault_tolerance
from ecrm.launch.memory_needs import check_memory, check_room, in_words
from ecrm.launch.mpirun_command import (
    ELSEWHERE,
    HASH_SEED,
    hash_seed,
    mpirun_line,
    thread_environment,
    train_command,
)
from ecrm.launch.rejoin import rejoining
from ecrm.launch.scalars import require_tensorboard
from ecrm.launch.several_hosts import RemoteHosts
from ecrm.launch.supervise import MpirunEnding, supervise
from ecrm.launch.watch import watch_of
from ecrm.process.linux import memory_bytes
from ecrm.run.auto_resume import AUTO_RESUME, complete_in_words, look
from ecrm.run.reading import read_own
from ecrm.run.resume_check import check_resume
from ecrm.run.run_lock import is_empty, make_run_dir, remove_empty
from ecrm.run.session_folders import last_summary, session_folders
from ecrm.run.spec import VARIABLE, settle


class RunFailed(EcrmError):
    """A started run did not complete; ends the program with the given `exit_code`.

    `told` is whether a rank has printed the reason, on this program's stderr.
    """

    def __init__(self, message: str, exit_code: int, told: bool = False) -> None:
        super().__init__(message)
        self.exit_code, self.told = exit_code, told


def launch(
    trained: str | Script,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    kills: Sequence[str] = (),
    mpirun_args: Sequence[str] = (),
    dry_run: bool = False,
    elsewhere: RemoteHosts | None = None,
    resume: Path | None = None,
    init_from: Path | None = None,
    plain: bool = False,
) -> int:
    """Run a config or a script under mpirun; return 0 if the run completed, else raise EcrmError.

    `resume` is a run folder, a checkpoint or a folder of mapped files to go on from, or
    AUTO_RESUME, `init_from` a run folder or a checkpoint with the weights of step 0. With
    `elsewhere`, the ranks run on the given hosts and not on this machine. Nothing is written or
    started before all checks have passed; with `dry_run` nothing is at all. Tables and steps of a
    script are known to its ranks alone: the ranks make the checks in need of such facts. `plain`:
    lines alone, also on a terminal.
    """
    resume, init_from = _absolute(resume), _absolute(init_from)
    folder = (run_dir if run_dir is not None else fresh_run_dir(trained)).absolute()
    settled = settle(trained, overrides, run_dir, kills, resume, init_from, folder)
    spec, start, script = settled.spec, settled.start, isinstance(trained, Script)
    config = spec.config
    if config.train.tensorboard:
        require_tensorboard()
    if settled.complete:
        assert run_dir is not None  # --resume auto takes no other folder
        print(complete_in_words(run_dir), flush=True)
        return 0
    if elsewhere is not None and mpirun_args:
        raise UsageError("--mpirun-args with --hosts: no mpirun runs; leave --mpirun-args out")
    if script:
        with Waiting(_print) as waiting:
            waiting("the changed script is checked")
            check_resume(spec)
    hosts = elsewhere.plan(config.world_size) if elsewhere is not None else None
    somewhere = hosts is not None or ELSEWHERE.intersection(mpirun_args)
    available = None if script or somewhere else memory_bytes()[1]
    gpus: Sequence[int] = ()
    if available is not None:  # all ranks are on this machine, and the needs are known
        gpus = free_on_gpus(config)
        warnings = [check_memory(config, start.steps, available, gpus)]
        if start.mapped is not None:
            warnings.append(check_room(config, start.steps, start.mapped))
        for warning in filter(None, warnings):
            print(f"# warning: {warning}")
    if config.cluster.rejoin:
        check_rejoin(hosts is not None)
    command = [
        sys.executable,
        "-m",
        "ecrm",
        *train_command(
            trained,
            overrides,
            str(folder),
            kills,
            None if resume is None else str(resume),
            None if init_from is None else str(init_from),
            None if dry_run else spec.digest,
        ),
    ]
    if hosts is not None:
        line = hosts.command(command, folder)
    else:
        mpirun = find_mpirun()
        require_fault_tolerance(mpirun)
        line = mpirun_line(
            config,
            command,
            mpirun=str(mpirun),
            cores=physical_cores(),
            root=os.geteuid() == 0,
            extra=mpirun_args,
        )
    for ignored in mpirun_environment(os.environ)[1]:
        print(f"# {ignored}")
    if hosts is None and not somewhere and not on_loopback(os.environ):
        print(
            "# warning: mpirun listens on all addresses: the path of ecrm has a space or a colon; "
            "install ecrm in a different folder"
        )
    for placed in hosts.in_words() if hosts is not None else ():
        print(f"# {placed}")
    if hosts is not None and config.cluster.failure_domain != "host":
        print(
            "# warning: the loss of a host may end the run: nothing keeps the units of a stripe on "
            "different hosts; set cluster.failure_domain=host"
        )
    print(shlex.join(line), flush=True)
    if dry_run:
        if script:
            print(
                "# the memory that its tables need is checked by its ranks as they start; what its "
                "dataset and the workers of its data take comes on top"
            )
            return 0
        names = None if hosts is None else [host.name for host in hosts.placed]
        for told in (*start.changed, *in_words(config, start.steps, names, available, gpus)):
            print(f"# {told}")
        return 0
    if hosts is not None:
        waiting = Waiting(_print)
        waiting("the hosts are tried")
        try:
            hosts.try_hosts()
        finally:
            waiting.over()
    try:
        make_run_dir(folder)
    except OSError as error:
        raise UsageError(
            f"cannot make the run folder {folder}: {error.strerror}; name another with --run-dir"
        ) from None
    watch = watch_of(
        folder, start.steps, config.world_size, config.train.tensorboard, config.hooks, plain
    )
    stop_seconds, name = config.cluster.stop_seconds, secrets.token_hex(8)
    with hosts.head() if hosts is not None else contextlib.nullcontext({}) as links:
        variables = {VARIABLE: spec.text, **links}
        if hosts is not None:  # mpirun gets these on its line
            variables |= {**thread_environment(config), HASH_SEED: hash_seed(os.environ)}
            variables |= hosts.reached_by()
        elif not somewhere:
            variables |= on_loopback(os.environ)
        rejoins = (
            rejoining(folder, hosts.placed, hosts.starter, name, watch.show)
            if hosts is not None and config.cluster.rejoin
            else contextlib.nullcontext()
        )
        with rejoins:
            ending = supervise(line, folder, stop_seconds, name, watch, not somewhere, variables)
    if resume == AUTO_RESUME and ending.exit_code == 0 and look(folder, resume).complete:
        return 0
    try:
        judge(folder, ending, hosts is not None)
    except RunFailed as error:
        if error.told and folder.exists():
            print(f"what there is of the run is in {folder}", flush=True)
        raise
    return 0


def _print(line: str) -> None:
    print(line, flush=True)


def check_rejoin(over_hosts: bool) -> None:
    """Raise UsageError if lost hosts cannot come back in a run, as cluster.rejoin wants."""
    if not over_hosts:
        raise UsageError(
            "cluster.rejoin brings lost hosts back, and the run has no --hosts",
            otherwise="leave the key out, or type --hosts FILE",
        )


def _absolute(path: Path | None) -> Path | None:
    return path if path is None or path == AUTO_RESUME else path.absolute()


def fresh_run_dir(trained: str | Script) -> Path:
    """runs/NAME-TIMESTAMP, with a number appended if the name is taken."""
    name = trained.path.name if isinstance(trained, Script) else Path(trained).name
    name = name.removesuffix(".toml").removesuffix(SUFFIX)
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = stem, 1
    while folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")
    return folder


def judge(folder: Path, ending: MpirunEnding, over_hosts: bool = False) -> None:
    """Raise RunFailed unless the run left its completion marker, with the model kept.

    mpirun's exit code proves nothing either way.

    With `over_hosts` a rank's line with the reason may be lost with the connection to the rank's
    host, and the error gives the reason (again). The error of a run stopped on request counts as
    `told`, since the run has reported the stop.
    """
    sessions = session_folders(folder)
    summaries = [read_own(each / "summary.json", ending.launch) for each in sessions]
    # a session that was to end for the next session may have been stopped itself
    stops = [(each, read_own(each / "stopped.json", ending.launch)) for each in sessions]
    stopped_in, stopped = next(((each, said) for each, said in stops[::-1] if said), stops[-1])
    for said in (*summaries, stopped):
        if why := said.get("checkpoint_failed"):
            raise RunFailed(
                f"the model is not kept: no checkpoint of the last step: {why}",
                NotKept.exit_code,
            )
    if last_summary(summaries).get("completed") is True:
        return
    failure = read_own(folder / "failure.json", ending.launch)
    left = os.path.isdir(folder)
    with contextlib.suppress(OSError):  # removed meanwhile, or a mount point
        if is_empty(folder):
            remove_empty(folder)
            left = False
    where = f"; see {folder}" if left else ""
    if failure:
        code = int(failure.get("exit_code") or 1)
        if over_hosts:
            raise RunFailed(f"the run did not complete{where}: {failure.get('message')}", code)
        raise RunFailed(
            f"the run did not complete; why is in {folder / 'failure.json'}", code, told=True
        )
    if stopped:
        raise RunFailed(
            f"the run has stopped when asked to; see {stopped_in / 'stopped.json'}",
            STOPPED_EXIT_CODE,
            told=True,
        )
    if ending.stopped_by is not None:
        raise RunFailed(
            f"stopped by {ending.stopped_by.name} before the run was complete{where}",
            STOPPED_EXIT_CODE,
        )
    if ending.gave_up:
        raise RunFailed(f"the run did not complete: {ending.gave_up}{where}", 1)
    code = ending.exit_code
    who = "the watcher of the hosts" if over_hosts else "mpirun"
    how = f"{who} died of {_signal_name(-code)}" if code < 0 else f"{who} ended with {code}"
    # an error of all ranks ended with this code, and the first rank has given the reason
    told = code in (UsageError.exit_code, DataError.exit_code, ScriptFailed.exit_code)
    raise RunFailed(f"the run did not complete ({how}){where}", code if 0 < code < 126 else 1, told)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
