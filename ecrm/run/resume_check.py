"""Whether the run of a changed script can go on, before its ranks start.

Ranks load torch for seconds, and then refuse. Only the script knows its tables and steps: a process
runs the script up to its training, and checks as the ranks do. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from ecrm.base.errors import DataError, UsageError
from ecrm.checkpoint.folder import locate
from ecrm.run.auto_resume import AUTO_RESUME, check_same, events_of, look
from ecrm.run.spec import VARIABLE, RunSpec

if TYPE_CHECKING:
    from ecrm.run.started import Wanted

SECONDS = 30.0
"""The longest wait for the process; then the ranks start, and check for themselves."""
_KINDS = {"UsageError": UsageError, "DataError": DataError}


def check_resume(spec: RunSpec) -> None:
    """Raise UsageError or DataError if the run of a script cannot go on.

    Nothing is checked without a run to go on from, and no process starts for the same script with
    the same arguments. Any other trouble, such as an error in the script, is left to the ranks.
    """
    auto = spec.resume == AUTO_RESUME
    folder = spec.run_dir if auto else spec.resume
    if folder is None:
        return
    if not auto and not spec.config.kind.rows_in_files:
        locate(folder)
    starts = [event for event in events_of(folder) if event.get("event") == "start"]
    if starts[-1].get("script_sha256") == spec.script.digest if starts else auto:
        return
    environ = {**os.environ, VARIABLE: spec.text}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "ecrm.run.resume_check"],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also the workers of the script's data
            process.wait()
        said.seek(0)
        last = said.read().splitlines()[-1:]
    with contextlib.suppress(ValueError, IndexError, TypeError, KeyError):
        refused = json.loads(last[0])
        raise _KINDS[refused["kind"]](refused["why"])


def _check(wanted: Wanted, spec: RunSpec) -> None:
    """The checks of the ranks, for the first session of a script."""
    from ecrm.placement.initial_values import FileValues
    from ecrm.run.plan import find_starting_point
    from ecrm.run.session_run import merged_config, trained_by

    if any(isinstance(table.initial, FileValues) for table in wanted.tables):
        return  # only the ranks read the files
    config = merged_config(spec, wanted, spec.config.world_size)
    trained, resume = trained_by(wanted, config), spec.resume
    if resume == AUTO_RESUME:
        assert spec.run_dir is not None  # `look` refuses to go on without a folder
        check_same(spec.run_dir, trained.about())
        resume = look(spec.run_dir, resume).resume
    find_starting_point(config, spec.run_dir, resume, spec.kills, spec.init_from, trained)


def _main() -> None:
    from ecrm.run.surveyed import run_to_training

    spec = RunSpec.of_text(os.environ.pop(VARIABLE))

    def ask(wanted: Wanted) -> dict[str, str]:
        try:
            _check(wanted, spec)
        except (UsageError, DataError) as error:
            kind = "DataError" if isinstance(error, DataError) else "UsageError"
            return {"kind": kind, "why": str(error)}
        return {}

    print(json.dumps(run_to_training(spec.script, ask)), flush=True)


if __name__ == "__main__":
    _main()
