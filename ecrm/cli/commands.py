"""The `ecrm` command.

Heavy modules are imported only when a subcommand runs, so --help and errors are instant.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import io
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ecrm import __version__
from ecrm.base.errors import BROKEN_PIPE_EXIT_CODE, STOPPED_EXIT_CODE, EcrmError, UsageError
from ecrm.base.log import print_from
from ecrm.base.paths import typed_path, typed_path_text
from ecrm.base.requirements import require_torchrec
from ecrm.cli.drill import add_parser as add_drill
from ecrm.cli.export import add_parser as add_export
from ecrm.cli.join import add_parser as add_join
from ecrm.cli.plan import add_parser as add_plan
from ecrm.cli.report import add_parser as add_report
from ecrm.cli.status import add_parser as add_status
from ecrm.config import effective, load_config, reference
from ecrm.config.faults import PHASES
from ecrm.config.script import Script, is_script
from ecrm.launch.mpirun_command import HASH_SEED, hash_seed
from ecrm.process.preflight import preflight_ulfm, say_once

if TYPE_CHECKING:
    from ecrm.launch.several_hosts import RemoteHosts


SHORTS = (
    (("--servers",), "cluster.servers", "N", "ranks that hold rows"),
    (("--trainers",), "cluster.trainers", "N", "ranks that run slots"),
    (("--spares",), "cluster.spares", "N", "ranks that wait"),
    (("--protection",), "protection.name", "NAME", "what protects rows"),
    (("-k",), "protection.k", "N", "data rows per stripe"),
    (("-m",), "protection.m", "N", "parity rows per stripe"),
)
"""Options short for a config key: words, key, name of the value, meaning."""
RUN_SCRIPTS = ("train", "launch", "drill", "plan")
"""Commands with a script as argument; the script's own arguments come after `--`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. An EcrmError and a full disk become a line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale may have no letter for a folder's name
            stream.reconfigure(errors="backslashreplace")
    words, of_script = _split(sys.argv[1:] if argv is None else argv)
    if argv is None and words[:1] == ["train"]:
        _hash_alike()
    try:
        print_from(os.environ)
        args = make_parser().parse_args(words)
        args.arguments = of_script
        code = args.run(args)
        sys.stdout.flush()
        return code or 0
    except EcrmError as error:
        if not error.told:
            say_once(f"ecrm: error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return STOPPED_EXIT_CODE
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE_EXIT_CODE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _drop_output()
        file = f"{error.filename}: " if error.filename else ""
        say_once(f"ecrm: error: {file}the output cannot be written: {error.strerror}")
        return EcrmError.exit_code


def _drop_output() -> None:
    """Let go of the output that nobody takes: Python's flush at exit must not raise again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _split(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words for ecrm, and the words after `--` for the script."""
    if words[:1] and words[0] in RUN_SCRIPTS and "--" in words:
        at = list(words).index("--")
        return [*words[:at]], tuple(words[at + 1 :])
    return [*words], ()


def _hash_alike() -> None:
    """Restart this process with the seed of hash() common to all ranks, if its seed differs.

    `ecrm launch` gives the seed to ranks. A line of mpirun typed by hand may not.
    """
    if os.environ.get(HASH_SEED, "") != (seed := hash_seed(os.environ)):
        environ = {**os.environ, HASH_SEED: seed}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="ecrm",
        description="Train recommendation models whose embedding tables survive killed ranks.",
    )
    parser.add_argument("--version", action="version", version=f"ecrm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_data(commands)

    train = commands.add_parser(
        "train",
        help="train as one rank; mpirun --with-ft ulfm starts it",
        usage=_usage("train"),
    )
    _add_run_options(train)
    _add_script(train)
    _add_resume(train)
    train.add_argument(
        "--spec",
        metavar="DIGEST",
        help="the run settled by `ecrm launch`, which writes this option: the words of the line "
        "are not settled again",
    )
    train.set_defaults(run=_train)

    launch = commands.add_parser(
        "launch",
        help="train: print the mpirun line of a run, then run it",
        usage=_usage("launch"),
    )
    _add_run_options(launch)
    _add_script(launch)
    _add_resume(launch)
    launch.add_argument(
        "--mpirun-args",
        action="append",
        default=[],
        metavar="WORDS",
        help='more options for mpirun, such as --mpirun-args="--hostfile hosts"; repeatable',
    )
    _add_hosts(launch)
    launch.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the mpirun line and the memory that ranks need, "
        "start nothing",
    )
    launch.add_argument(
        "--plain",
        action="store_true",
        help="print lines alone, without the screen that a terminal gets",
    )
    launch.set_defaults(run=_launch)

    add_plan(
        commands,
        _add_script,
        _usage("plan", "--servers N --memory GB --network GBIT --mtbf HOURS "),
        _trained,
    )
    add_status(commands)
    add_join(commands)
    add_report(commands)
    add_drill(commands, _add_drill_options, _usage("drill"), _trained)

    if importlib.util.find_spec("ecrm.testing") is not None:  # a part for developers
        from ecrm.testing.simulate.command import add_parser as add_simulate

        add_simulate(commands)

    add_export(commands)

    config = commands.add_parser(
        "config", help="print all config keys, or the values of one config"
    )
    config.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="TOML file or name of a shipped config; without it, print all keys with their meaning",
    )
    _add_set(config)
    config.set_defaults(run=_config)

    doctor = commands.add_parser(
        "doctor", help="print what this machine has and whether training can run here"
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _usage(command: str, required: str = "") -> str:
    return (
        f"ecrm {command} CONFIG {required}[options]\n"
        f"       ecrm {command} SCRIPT.py {required}[options] [-- arguments of the script]"
    )


def _add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    if importlib.util.find_spec("ecrm.cli.data") is not None:
        from ecrm.cli.data import add_parsers

        add_parsers(commands)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="TOML file or name of a shipped config",
    )
    _add_set(parser)
    for options, key, metavar, what in SHORTS:
        parser.add_argument(
            *options,
            dest="set",
            action="append",
            type=f"{key}={{}}".format,
            metavar=metavar,
            help=f"{what}; short for --set {key}={metavar}",
        )
    parser.add_argument(
        "--scrub-rows-per-step",
        dest="set",
        action="append",
        default=[],
        type="protection.scrub_rows_per_step={}".format,
        metavar="N",
        help="look for silent corruption; short for --set protection.scrub_rows_per_step=N",
    )
    parser.add_argument(
        "--profile",
        action="append_const",
        dest="set",
        const="train.profile=true",
        help="print the time of each phase of a step and write trace.json; "
        "short for --set train.profile=true",
    )
    parser.add_argument(
        "--check-determinism",
        dest="set",
        action="append",
        type="train.check_determinism={}".format,
        metavar="N",
        help="compute each slot of the first N steps twice, and end where a bit "
        "differs; short for --set train.check_determinism=N",
    )
    parser.add_argument(
        "--run-dir",
        type=typed_path,
        metavar="DIR",
        help="run folder, new or empty unless with --resume auto; without this option "
        "`ecrm launch` and `ecrm drill` make one in runs/, and `ecrm train` writes nothing",
    )
    parser.add_argument(
        "--kill",
        action="append",
        default=[],
        metavar="RANK@STEP[:PHASE]",
        help="kill this rank when this phase of this step begins; repeatable. "
        "The rank sends itself SIGKILL; under `ecrm drill` it waits for one from outside. "
        f"PHASE is one of {', '.join(PHASES)}; by default input",
    )


def _add_drill_options(parser: argparse.ArgumentParser) -> None:
    _add_run_options(parser)
    _add_script(parser)


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        dest="file",
        type=typed_path_text,
        metavar="FILE",
        help="with SCRIPT.py, a training script of your own in the place of CONFIG: TOML file with "
        "[cluster], [protection] and other sections that a script does not decide",
    )


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        type=typed_path,
        metavar="DIR|auto",
        help="auto: start the run in --run-dir, continue it there, "
        "or do nothing if it is complete. "
        "DIR: continue from a checkpoint, or from the newest one of a run folder. Cluster, "
        "protection, learning rates and steps may change, and so may data of the same tables. "
        "With protection.name=mapped, continue from the last commit in the mapped files",
    )
    parser.add_argument(
        "--init-from",
        type=typed_path,
        metavar="DIR",
        help="begin at step 0 with the weights of a checkpoint, or of the newest one of a run "
        "folder. Tables and model must be the same. Optimizer state starts anew",
    )


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts",
        type=typed_path,
        metavar="FILE",
        help="run the ranks on the hosts in FILE, and survive the loss of hosts. "
        "One host per line: NAME [slots=N] [address=ADDRESS]",
    )
    parser.add_argument(
        "--starter",
        metavar="TEMPLATE",
        help="with --hosts: how to run a command on a host; by default ssh. Write {host} or "
        "{address} where the host belongs, such as 'ip netns exec {host}'. {command} stands for "
        "the command, quoted for a shell; without it the command comes at the end",
    )
    parser.add_argument(
        "--interface",
        metavar="NAME",
        help="with --hosts: this machine's network interface to the hosts, or the subnet of all "
        "hosts, such as 10.244.0.0/16; by default the one in which the hosts are",
    )
    parser.add_argument(
        "--keep-alive",
        type=float,
        metavar="SECONDS",
        help="with --hosts: a host that is silent for this long is given up; by then it has killed "
        "its ranks; by default 2",
    )


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="set one config value; repeatable",
    )


def _train(args: argparse.Namespace) -> int:
    from ecrm.launch.mpirun_command import thread_environment, train_command
    from ecrm.process.guard import guard, hold_signals
    from ecrm.run.auto_resume import complete_in_words
    from ecrm.run.reading import launch_id
    from ecrm.run.spec import handed_over, settle

    hold_signals()
    trained = _trained(args)
    if args.spec is None:
        settled = settle(trained, args.set, args.run_dir, args.kill, args.resume, args.init_from)
        spec = settled.spec
        if settled.complete:
            say_once(complete_in_words(args.run_dir))
            return 0
    else:
        spec = handed_over(args.spec)
    config, cluster = spec.config, spec.config.cluster
    paths = (args.run_dir, args.resume, args.init_from)
    run_dir, *others = (None if path is None else str(path) for path in paths)
    typed = train_command(trained, args.set, run_dir, args.kill, *others)
    preflight_ulfm(config, shlex.join(typed[1:]))
    if config.train.tensorboard and launch_id() is None:
        say_once("ecrm: warning: train.tensorboard: without `ecrm launch` no scalars are written")
    os.environ.update(thread_environment(config))  # before torch is imported
    # before threads and MPI exist
    guarded = guard(
        cluster.hang_seconds,
        cluster.start_seconds,
        cluster.stuck_seconds,
        cluster.gpu_hang_seconds,
        () if "cuda" in (config.storage.device, config.train.device) else _modules(spec.script),
        alike=spec.text,
    )
    from ecrm.process.stop_signals import StopSignals

    stop = StopSignals(guarded.guard, guarded.tether)
    from ecrm.run.run_script import run_script

    return run_script(spec, guarded, stop)


def _modules(script: Script) -> list[str]:
    """The modules to import once for all ranks of a host; none may start CUDA or MPI."""
    return [
        "ecrm.run.run_script",
        "ecrm.recipes.train" if script.follows_config else "ecrm.session.session",
        # torchrec's apply_optimizer_in_backward imports it when called: 0.6 s and 90 MB
        "torch.distributed.optim",
    ]


def _trained(args: argparse.Namespace) -> str | Script:
    """The config or script typed by the user. Raises UsageError."""
    name: str = typed_path_text(args.config)
    if is_script(name):
        script = Script(Path(name), args.file, args.arguments)
        script.check()
        require_torchrec()
        return script
    if args.file is not None:
        raise UsageError(f"--config {args.file}: goes with a script, and {name} is a config itself")
    if args.arguments:
        raise UsageError(
            f"{shlex.join(args.arguments)}: arguments after -- go to a script, "
            f"and {name} is a config"
        )
    return name


def _launch(args: argparse.Namespace) -> int:
    from ecrm.launch.launcher import launch

    words = []
    for option in args.mpirun_args:
        try:
            words += shlex.split(option)
        except ValueError as error:
            raise UsageError(
                f"--mpirun-args {option}: {str(error).lower()}; quote words as in a shell"
            ) from None
    return launch(
        _trained(args),
        args.set,
        args.run_dir,
        args.kill,
        words,
        args.dry_run,
        _elsewhere(args),
        args.resume,
        args.init_from,
        args.plain,
    )


def _elsewhere(args: argparse.Namespace) -> RemoteHosts | None:
    from ecrm.launch.several_hosts import RemoteHosts

    names = ("starter", "interface", "keep_alive")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.hosts is not None:
        return RemoteHosts(args.hosts, **given)
    if given:
        raise UsageError(
            f"--{next(iter(given)).replace('_', '-')} goes with --hosts FILE, which is missing"
        )
    return None


def _config(args: argparse.Namespace) -> int:
    print(
        reference() if args.config is None else effective(load_config(args.config, args.set)),
        end="",
    )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from ecrm.launch.doctor import doctor

    return doctor()
