"""The `ecrm` command, with one rank that misbehaves.

It does what MPI does not report, or what looks like a failure; it finds garbage or makes it; or it
was started with another config (`set KEY=VALUE KEY=VALUE`).

Arguments: HOW or HOW:RANK (rank 1), then those of `ecrm`. As `ecrm launch` it starts its ranks as
this same program, and through noting.py with the variable ECRM_TEST_CODES as FOLDER, if there is
one.
"""

import ctypes
import os
import resource
import signal
import sys
import time

(how, _, rank), arguments = sys.argv[1].partition(":"), sys.argv[2:]
rank = rank or "1"


def flip_a_bit(engine: "Engine") -> None:
    shard = next(iter(engine.state.hosted.values())).store
    row = int(shard._touched.nonzero()[0])
    shard.weights[row, 0] = -shard.weights[row, 0]


def end() -> None:
    if how in ("exit 0", "exit 3"):
        os._exit(int(how[-1]))
    if how == "throw":
        raise RuntimeError("thrown on purpose")
    if how == "segfault":
        ctypes.string_at(0)
    if how == "out of memory":
        import torch

        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used, used))
        torch.ones(1 << 30)
    if how == "ask mpirun":
        os.kill(os.getsid(0), signal.SIGTERM)
        time.sleep(3.0)
    if how.startswith("compute"):
        until = time.monotonic() + float(how.split()[1])
        while time.monotonic() < until:
            pass
    if how == "disk full":
        written = os.path.getsize(
            os.path.join(arguments[arguments.index("--run-dir") + 1], "events.jsonl")
        )
        resource.setrlimit(resource.RLIMIT_FSIZE, (written, written))


if how.startswith("no room for ") and arguments[0] == "train":  # on any rank
    from ecrm.checkpoint.disk import Disk

    write = Disk.write

    def write_or_fail(self: Disk, file: object, data: object) -> None:
        if how.removeprefix("no room for ") in file.name:
            raise OSError(28, "No space left on device")
        write(self, file, data)

    Disk.write = write_or_fail
if arguments[0] == "launch":
    import ecrm.launch.launcher as run

    os.environ["ECRM_TEST_LAUNCH"] = str(os.getpid())
    mpirun_line, noting = run.mpirun_line, []
    if "ECRM_TEST_CODES" in os.environ:
        noting = [
            sys.executable,
            os.path.join(os.path.dirname(__file__), "noting.py"),
            os.environ["ECRM_TEST_CODES"],
        ]

    def line(config, words, **kwargs):
        return mpirun_line(config, [*noting, words[0], __file__, sys.argv[1], *words[3:]], **kwargs)

    run.mpirun_line = line
elif how == "bad disk":
    if os.environ["OMPI_COMM_WORLD_RANK"] == "4":  # a trainer
        os.environ["ECRM_TEST_HOW"] = how  # a rank with a variable of its own is forked apart
        from ecrm.base.errors import DataError
        from ecrm.data.dataset import CriteoDataset

        read = CriteoDataset._read

        def read_or_fail(self: CriteoDataset, pieces: list[slice]) -> object:
            if pieces[0].start >= 3000:
                error = DataError("garbage")
                error.rows = (pieces[0].start, pieces[0].stop)
                raise error
            return read(self, pieces)

        CriteoDataset._read = read_or_fail
elif how.startswith("set "):
    if os.environ["OMPI_COMM_WORLD_RANK"] == rank:
        os.environ["ECRM_TEST_HOW"] = how  # forked apart, with arguments of its own
        at = arguments.index("--spec")
        del arguments[at : at + 2]  # the config that `ecrm launch` has settled for all ranks
        arguments += [word for one in how.split()[1:] for word in ("--set", one)]
elif os.environ["OMPI_COMM_WORLD_RANK"] == rank:
    os.environ["ECRM_TEST_HOW"] = how
    from ecrm.engine.engine import Engine

    if how == "before the first step":
        from ecrm.run import session_run

        session_run._engine = lambda *args: os._exit(1)
    if how == "asked before the first step":
        from ecrm.run import session_run

        build_engine = session_run._engine

        def asked_first(*args: object) -> object:
            os.kill(os.getpid(), signal.SIGINT)
            # the thread that waits for signals has it by then; one that comes later may find the
            # first step begun
            time.sleep(0.5)
            return build_engine(*args)

        session_run._engine = asked_first
    # by SIGTERM to `ecrm launch`, which arrives while the phase goes on
    if how.startswith("asked in "):
        from ecrm.run.build_rank import Meters

        enter_phase, asked = Meters.phase, []

        def ask(self: Meters, step: int, phase: str) -> None:
            if phase == how.split()[-1] and not asked:
                asked.append(step)
                os.kill(int(os.environ["ECRM_TEST_LAUNCH"]), signal.SIGTERM)
                time.sleep(1.0)
            enter_phase(self, step, phase)

        Meters.phase = ask
    if how == "at exit":
        from ecrm.transport.mpi import MpiTransport

        MpiTransport.close = lambda self: os._exit(5)
    if how == "no stopped.json":
        from ecrm.run.run_folder import RunFolder

        draft = RunFolder.draft_stopped

        def draft_on_a_full_disk(self: RunFolder, fields: dict) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            draft(self, fields)

        RunFolder.draft_stopped = draft_on_a_full_disk
    if how == "before it tells of a failure":
        from ecrm.run.run_folder import RunFolder

        event = RunFolder.event
        RunFolder.event = lambda self, told: (
            os.kill(os.getpid(), signal.SIGKILL) if told.name == "failure" else event(self, told)
        )
    enter = Engine.enter

    def enter_and_end(self: Engine, phase: str) -> None:
        if self.step == 30 and phase == "backward":
            flip_a_bit(self) if how == "flip a bit" else end()
        enter(self, phase)

    Engine.enter = enter_and_end

from ecrm.cli.commands import main  # noqa: E402 - after the changes above

sys.exit(main(arguments))
