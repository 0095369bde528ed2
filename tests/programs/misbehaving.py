"""The `ecrm` command, with one rank that in step 30 ends itself in a way that MPI does not report, or flips a bit of a row.

Arguments: HOW, then those of `ecrm`. As `ecrm launch` it starts its ranks as this same program.
"""

import ctypes
import os
import resource
import sys

how, arguments = sys.argv[1], sys.argv[2:]


def flip_a_bit(engine: "Engine") -> None:
    shard = next(iter(engine.hosted.values())).store
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


if arguments[0] == "launch":
    import ecrm.launch.run as run

    mpirun_line = run.mpirun_line

    def line(config, words, **kwargs):
        return mpirun_line(config, [words[0], __file__, how, *words[3:]], **kwargs)

    run.mpirun_line = line
elif os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    from ecrm.engine.engine import Engine

    if how == "before the first step":
        from ecrm.train import job

        job.build_engine = lambda *args: os._exit(1)
    enter = Engine.enter

    def enter_and_end(self: Engine, phase: str) -> None:
        if self.step == 30 and phase == "backward":
            flip_a_bit(self) if how == "flip a bit" else end()
        enter(self, phase)

    Engine.enter = enter_and_end

from ecrm.cli import main  # noqa: E402 - after the changes above

sys.exit(main(arguments))
