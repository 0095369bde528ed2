"""Lines printed at the start and at the end of a run."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ecrm import __version__
from ecrm.base.console import say
from ecrm.base.errors import NotKept
from ecrm.base.version_set import name_of as name_of_versions
from ecrm.base.version_set import version_set
from ecrm.base.wording import counted
from ecrm.checkpoint.folder import name_of
from ecrm.config.faults import Kill, unfired
from ecrm.config.schema import Config
from ecrm.engine.failures import Failure
from ecrm.kernels import native
from ecrm.process.device import gpu_memory
from ecrm.protection.base import Protection, VerifyReport
from ecrm.run.build_rank import Rank
from ecrm.run.claim import RunContext
from ecrm.run.connect import Cluster
from ecrm.run.run_folder import RunFolder

MB = 1e6


def start_fields(
    run: RunContext, cluster: Cluster, rank: Rank, own: dict[str, Any]
) -> dict[str, Any]:
    """Fields of both the event `start` and the summary; `set_up_seconds` end here.

    `own` are fields specific to the kind of training.
    """
    config, start, versions = run.config, run.start, version_set()
    fields: dict[str, Any] = {
        "version": __version__,
        "kernels": native.instruction_set(),
        "versions": versions,
        "version_set": name_of_versions(versions),
        **own,
        "world_size": config.world_size,
        "oversubscribed": cluster.cores.manner,
        "shares_memory_with": cluster.memory_readers,
        "config": config.to_dict(),
        "kills": [str(kill) for kill in run.spec.kills],
    }
    if (gpu := gpu_memory(config)) is not None:
        fields["gpu"] = gpu
    if run.folder.path is not None:
        fields["run"] = run.trained.about()
    if run.folder.earlier:
        fields["before"] = run.ended_before
    if run.resume is not None:
        fields["resumed"] = {
            "from": str(run.resume),
            "step": rank.engine.step,
            "changed": start.changed,
            "data_began": start.data_began,
        }
    if start.begins_with is not None:
        fields["init_from"] = str(start.begins_with.path)
    fields["set_up_seconds"] = time.monotonic() - rank.began
    return fields


def start_in_words(
    config: Config, protection: Protection, fields: dict[str, Any], steps: str, own: str
) -> str:
    """The first line of a run; `fields` are the result of `start_fields`.

    `steps` describes the training in words, `own` has words specific to the kind of run.
    """
    resumed = f"from step {fields['resumed']['step']}, " if "resumed" in fields else ""
    begins = f"with the weights of {fields['init_from']}, " if "init_from" in fields else ""
    return (
        f"{resumed}{begins}{config.ranks_in_words}, {protection.in_words}, "
        f"{counted(config.slots, 'slot')}, {steps}; "
        f"{own}kernels {fields['kernels']}, versions {fields['version_set']}"
        f"{_gpu_in_words(fields.get('gpu'))}"
    )


def _gpu_in_words(gpu: Mapping[str, Any] | None) -> str:
    if gpu is None:
        return ""
    if "bytes" not in gpu:
        return f", GPU {gpu['name']}"
    return f", GPU {gpu['name']}: {gpu['taken'] / MB:,.0f} of {gpu['bytes'] / MB:,.0f} MB taken"


def print_result(
    summary: dict[str, Any],
    protection: Protection,
    folder: RunFolder,
    pace: str,
) -> None:
    """Print the end of a run in a few lines.

    `pace` is the speed of the steps, with any further remark about the steps.
    """
    print(
        f"finished {counted(summary['steps'], 'step')} at {pace}, "
        f"{counted(len(summary['failures']), 'failure')} survived"
    )
    if summary["parity"] is not None and protection.redundancy:
        print(protection.verified_in_words(VerifyReport(**summary["parity"])))
    if summary["scrub"] is not None:
        print(_scrubbed(summary["scrub"]))
    print(f"model_sha256 {summary['model_sha256']}")
    print(f"model_digest {summary['model_digest']}")
    if folder.path is not None and folder.is_complete:
        print(f"results in {folder.path}")
    sys.stdout.flush()


def warn_of_unfired(kills: Sequence[Kill], failures: Sequence[Failure]) -> None:
    """Print a line for each scheduled kill missing from a run with these failures."""
    died_in = {rank: failure.step for failure in failures for rank in failure.ranks}
    for kill, why in unfired(kills, died_in).items():
        say(f"ecrm: warning: --kill {kill} never happened: {why}")


def _scrubbed(scrub: dict[str, int]) -> str:
    """The result of scrubbing in one line."""
    text = (
        f"scrub: {counted(scrub['rows_checked'], 'row')} checked, "
        f"{counted(scrub['passes'], 'time')} round; "
    )
    if not scrub["corruptions"]:
        return text + "no corruption"
    text += f"{counted(scrub['corruptions'], 'corruption')}, {scrub['repaired']} repaired"
    if scrub["exact"] < scrub["corruptions"]:
        text += (
            f", only {scrub['exact']} of them before anything used it: the model may not be that "
            "of an undisturbed run"
        )
    return text


def tell_end(
    run: RunContext, rank: Rank, summary: dict[str, Any] | None, unkept: str, pace: str
) -> None:
    """Report a finished run. Raises NotKept, on every rank, with the reason if a model is `unkept`.

    `summary` is the summary on the reporter, `None` elsewhere; `pace` as in `print_result`.
    """
    engine = rank.engine
    if summary is not None:
        print_result(summary, engine.state.protection, run.folder, pace)
    if engine.rank == engine.view.reporter:
        warn_of_unfired(run.spec.kills, engine.state.failures.failures)
    if unkept:
        raise NotKept(
            f"the model of step {engine.step} is not kept: no checkpoint of it: {unkept}"
        ).on_all_ranks(engine.view.reporter)
    if engine.rank == engine.view.reporter:
        say_kept(run)


def say_kept(run: RunContext) -> None:
    """Print the place of the model, and the command to export the model as one file."""
    run_dir, own = run.folder.path, run.durable.own
    if run_dir is None or own is None:
        say("nothing of this run is kept: there was no --run-dir")
    elif step := own.newest():
        say(
            f"model of step {step} in {own.path / name_of(step)}; as one file: "
            f"ecrm export {shlex.quote(str(run_dir))} --output model.safetensors"
        )
