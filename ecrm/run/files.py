"""Every file left by ECRM: its name, format and content, its writer and time of writing.

docs/reference/files.md is made from this module. Tests compare finished run folders with the
module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ecrm.base.fields import Field, problems
from ecrm.engine.events import (
    RESTORED,
    EndedEarly,
    Failure,
    Rebuilt,
    Resumed,
    SlotFailed,
    Start,
    fields_of,
)

REPORTER = "the reporting rank"
"""The lowest rank with a dense replica: `View.reporter`."""


@dataclass(frozen=True)
class File:
    """Files of one kind. `written` names the writer and the time of writing.

    A `*` in `name` stands for any text without a slash.
    """

    name: str
    format: str
    content: str
    written: str


CHECKPOINT = (
    File(
        "manifest.json",
        "JSON",
        "step, kind, what the model depends on, and name, size and CRC-32 of every other file",
        f"{REPORTER}, last: with it the checkpoint is complete",
    ),
    File(
        "rows-rank*-*-*.bin",
        "frames of row numbers and records, see `ecrm/checkpoint/row_file.py`",
        "rows and optimizer state; the numbers are rank, attempt and row space",
        "every rank that holds a shard",
    ),
    File(
        "dense.bin",
        "arrays, one after the other",
        "state of the dense parts; the manifest has types and shapes",
        REPORTER,
    ),
)

MAPPED = (
    File(
        "manifest.json",
        "JSON",
        "number of servers, and what the model depends on",
        "the lowest rank, before the first step",
    ),
    File("lock", "empty", "held by every rank until it dies", "every rank at its start"),
    File(
        "shard*-space*.rows",
        "memory-mapped arrays",
        "rows and optimizer state of a shard",
        "the rank that holds the shard, at each update",
    ),
    File(
        "shard*-space*.journal*",
        "rows as they were",
        "what takes the rows back to each of the last two commits",
        "the same rank, before each update",
    ),
    File(
        "shard*-space*.words",
        "64-bit integers",
        "which commit rows and journals stand for",
        "the same rank, at each step",
    ),
    File(
        "rank*.dense*",
        "arrays of NumPy",
        "state of the dense parts at one of the last two commits",
        "ranks that hold the dense model, at each commit",
    ),
    File(
        "rank*.words",
        "64-bit integers",
        "which commits these are of",
        "the same ranks, at each commit",
    ),
)

RUN = (
    File(
        "events.jsonl",
        "one JSON object per line",
        "what happened: [events](events.md)",
        f"{REPORTER}, as it happens; a rank that is about to be killed on schedule says so itself",
    ),
    File(
        "ranks.json",
        "JSON",
        "process, host and roles of every rank, and whether it lives",
        f"{REPORTER}, before the first step and whenever roles move",
    ),
    File(
        "summary.json",
        "JSON",
        "the result: [fields](#summaryjson)",
        f"{REPORTER}, at the end; only a complete run has it",
    ),
    File(
        "stopped.json",
        "JSON",
        "how far the run came: [fields](#stoppedjson)",
        f"{REPORTER}, in place of summary.json, when the run was asked to stop",
    ),
    File(
        "rejected.json",
        "JSON",
        "the fields of summary.json, with `completed` false",
        f"{REPORTER}, in place of summary.json, when the check of parity at the end fails",
    ),
    File(
        "failure.json",
        "JSON",
        "why the run could not go on: `message`, `exit_code`, `launch`",
        "the rank that says why, before all ranks end",
    ),
    File(
        "lock",
        "JSON",
        "host, process and start of the run that has the folder; ranks hold it until they die",
        "the rank that takes the folder, at the start",
    ),
    File(
        "told-*",
        "two numbers",
        "the step before which the rank has called a script's functions for `on_commit`, and the "
        "step before which these want training to end, or -1",
        f"{REPORTER}, with each committed step of a script",
    ),
    File(
        "trace.json",
        "trace of Chrome, for ui.perfetto.dev",
        "with `--profile`: every phase of the last steps on every rank",
        f"{REPORTER}, after the last step",
    ),
    File(
        "checkpoints/step-*/*",
        "a [checkpoint](#a-checkpoint)",
        "the model after that step",
        "see there; at the end with `checkpoint.at_end`, and every so often if asked for",
    ),
    File(
        "checkpoints/best",
        "symbolic link",
        "leads to the checkpoint of the best evaluation",
        f"{REPORTER}, with `checkpoint.keep_best`",
    ),
    File(
        "mapped/*",
        "[mapped files](#mapped-files)",
        'with `protection.name = "mapped"`: the state of the run',
        "see there; with `mapped.path`, `mapped` is a link to that folder",
    ),
    File(
        "session-*/*",
        "a run folder, without `failure.json`",
        "the second session of a script, the third and so on",
        "as in the folder of a run",
    ),
    File(
        "report.html",
        "HTML, without other files",
        "the run as a page",
        "`ecrm report`, when typed; replaced each time",
    ),
    File(
        "hooks.log",
        "text",
        "with `hooks.on_failure` or `hooks.logger`: output and exit code of each command",
        "`ecrm launch`, as commands run",
    ),
    File(
        "tensorboard/events.out.tfevents.*",
        "TensorBoard",
        "with `train.tensorboard`: scalars of progress and evaluations",
        "`ecrm launch`, as events come",
    ),
)

DATASET = (
    File("manifest.json", "JSON", "rows, tables, sources, and size of every other file", "last"),
    File("labels.bin", "uint8 [N]", "clicks of N samples", "as the text is read"),
    File("dense.bin", "float32 [N, 13]", "ln(max(x, -2) + 3) of the integer features", "the same"),
    File("sparse.bin", "int32 [N, 26]", "row of each table", "the same"),
    File("malformed.txt", "text", "which lines were skipped, where there were any", "the same"),
)

TABLE = (
    File(
        "manifest.json",
        "JSON",
        "schema, rows, tables, missing values, sources, size and SHA-256 of every other file",
        "last",
    ),
    File("labels.bin", "float32 [N]", "labels of N rows", "as the files are read"),
    File("dense.bin", "float32 [N, n]", "n dense columns", "the same"),
    File("ids.bin", "int32 [N, c]", "rows of tables for c categorical columns", "the same"),
    File("feature-*-ends.bin", "int64 [N]", "ends of the lists in the next file", "the same"),
    File("feature-*-ids.bin", "int32", "rows of a table for lists of ids", "the same"),
    File("feature-*-weights.bin", "float32", "the weights of these ids", "the same"),
    File(
        "vocabulary-*.jsonl", "a JSON text per line", "the ids of rows 1, 2 and so on", "at the end"
    ),
    File(
        "order.bin",
        "int64 [N]",
        "numbers of the rows, training rows first, where a time or split column changes the order",
        "at the end",
    ),
    File(
        "malformed.txt", "text", "malformed rows that were skipped, if any", "as the files are read"
    ),
)

DRILL = (
    File("undisturbed/*", "a [run folder](#a-run-folder)", "the run without kills", "first"),
    File("disturbed/*", "a [run folder](#a-run-folder)", "the run with kills", "second"),
    File("drill.json", "JSON", "every number of the report, and the config", "at the end"),
    File("drill.html", "HTML, without other files", "the report as a page", "at the end"),
    File("timeline.svg", "SVG", "both runs over time", "at the end"),
)

EXPORT = (
    File(
        "FILE",
        "safetensors",
        "all tables and dense parts under the names of TorchRec's DLRM",
        "appears under its name when it is complete",
    ),
    File(
        "FILE",
        "a file of torch.save, with `--format torchrec`",
        "the same as a state_dict",
        "the same",
    ),
)

BYTES = {
    "data": Field("integer", "rows and optimizer state", "bytes"),
    "parity": Field("integer", "parity, copies or whatever the protection keeps", "bytes"),
    "undo": Field("integer", "undo logs, at most", "bytes"),
    "dense": Field("integer", "dense parts and their optimizer state", "bytes"),
}
_TOLD = fields_of(Failure) | fields_of(Rebuilt) | fields_of(Resumed)
FAILURE = {
    **{name: _TOLD[name] for name in ("ranks", "step", "phase")},
    "stall_seconds": replace(_TOLD["stall_seconds"], null=True),
    **{name: _TOLD[name] for name in ("recovery_seconds", "redone_steps")},
    "rebuild_seconds": replace(_TOLD["rebuild_seconds"], null=True),
    **{name: _TOLD[name] for name in ("rebuilt_bytes", "on_demand_rows", "shards")},
    "slots": Field("list", "slots that were lost"),
}
"""A failure in summary.json: the fields of the events of the failure. None is not over yet."""
KEPT = {
    "checkpoint_step": Field("integer", "step of the newest checkpoint", null=True),
    "checkpoint_failed": Field("text", "why the last one was not written", null=True),
}
LAUNCH = {"launch": Field("text", "what `ecrm launch` calls this start of the run", null=True)}
FAILURES = {
    "failures": Field("list", "failures that were survived", parts=FAILURE),
    "interruptions": Field("integer", "recoveries in which no rank had died"),
    "failures_left": Field("integer", "failures that could still be survived at once"),
    "steps_skipped": Field(
        "integer",
        "steps that the `grad_scaler` of a script had skipped",
        "steps",
        optional=True,
    ),
    "slot_faults": Field(
        "list",
        "ranks that left or died while the script's own code ran",
        optional=True,
        parts=fields_of(SlotFailed),
    ),
}

SUMMARY: Mapping[str, Field] = {
    "completed": Field("true or false", "whether the result is right; false in rejected.json"),
    "model_sha256": Field(
        "text", "SHA-256 of all tables and dense parts: equal models, equal sums"
    ),
    "model_digest": Field(
        "text",
        "SHA-256 of `table_sums` and `dense_sha256`: as `model_sha256`, and added up by all ranks; "
        "a later version will have this digest alone",
    ),
    "tables": Field("object", "SHA-256 of each table"),
    "table_sums": Field("object", "sums of the hashes of each table's rows, as of `row_digest`"),
    "dense_sha256": Field("text", "SHA-256 of the dense parts and their optimizer state"),
    "steps": Field("integer", "steps trained", "steps"),
    "samples": Field("integer", "samples of these steps", "samples", optional=True),
    "training_seconds": Field("number", "from the first step to the last", "seconds"),
    "samples_per_second": Field("number", "over that time", "samples/s", optional=True),
    "steps_per_second": Field("number", "the same in steps", "steps/s", optional=True),
    "step_seconds": Field(
        "object",
        "time of a step on the reporting rank",
        parts={
            "p50": Field("number", "median", "seconds", null=True),
            "p99": Field("number", "99th percentile", "seconds", null=True),
            "max": Field("number", "longest", "seconds", null=True),
        },
    ),
    "eval_*": Field(
        "number",
        "by name, the values of the last `session.report`; of a config's run `eval_auc`, "
        "`eval_logloss` and `eval_samples`, of the held-out samples",
        null=True,
        optional=True,
    ),
    "protection": Field(
        "object",
        "the protection at the end",
        parts={
            "name": Field("text", "its name"),
            "k": Field("integer", "data rows per stripe"),
            "m": Field("integer", "parity rows per stripe"),
            "exact": Field("true or false", "whether it promises the model of an undisturbed run"),
        },
    ),
    **FAILURES,
    "restored": Field("list", "with `stateless`: what came back of lost shards", parts=RESTORED),
    "parity": Field(
        "object",
        "with `protection.verify_parity_at_end`: the check at the end",
        null=True,
        parts={
            "stripes": Field("integer", "stripes compared", "stripes"),
            "mismatches": Field("integer", "stripes that were wrong", "stripes"),
        },
    ),
    "scrub": Field(
        "object",
        "with scrubbing: what it did",
        null=True,
        parts={
            "rows_checked": Field("integer", "rows compared, data and parity", "rows"),
            "passes": Field("integer", "times that all rows were compared"),
            "corruptions": Field("integer", "stripes that were wrong", "stripes"),
            "repaired": Field("integer", "of these, put right", "stripes"),
            "exact": Field("integer", "of these, no step had used the wrong bits", "stripes"),
        },
    ),
    "memory_bytes": Field("object", "memory of all ranks, counted", parts=BYTES),
    "memory_bytes_per_rank": Field(
        "list",
        "memory of each rank",
        parts={
            "rank": Field("integer", "the rank"),
            "shards": Field("integer", "shards that it holds"),
            **BYTES,
            "resident": Field(
                "integer", "anonymous memory after the last step, with shared libraries", "bytes"
            ),
            "resident_peak": Field("integer", "most resident memory, with libraries", "bytes"),
            "unused_spare": Field("true or false", "whether it had no role at the end"),
        },
    ),
    "traffic_bytes_per_rank": Field(
        "list",
        "what each rank sent and wrote",
        parts={
            "rank": Field("integer", "the rank"),
            "sent": Field("object", "bytes for other ranks, by phase", "bytes"),
            "shared": Field("integer", "of these, through shared memory", "bytes"),
            "written": Field("integer", "bytes to checkpoints or mapped files", "bytes"),
            "kernels": Field("object", "backend that each kernel ran on"),
        },
    ),
    "kernels_ran": Field("object", "backend that each kernel ran on, over all ranks"),
    "sessions": Field(
        "integer",
        "of a script: the number of its sessions, in the summary of the last session",
        null=True,
        optional=True,
    ),
    "ended_early": Field(
        "object",
        "why training ended before the last step",
        null=True,
        parts=fields_of(EndedEarly),
    ),
    "lives": Field(
        "list",
        "every start of the run",
        parts={
            "began": Field("number", "time of the start, since the epoch", "seconds"),
            "from_step": Field("integer", "step that it went on from"),
            "seen_step": Field("integer", "last step in its events"),
            "failures": Field("integer", "failures that it survived"),
            "ended": Field("text", "`complete`, `stopped`, `failed` or `killed`"),
        },
    ),
    **KEPT,
    **{name: kept for name, kept in fields_of(Start).items() if name != "failures_left"},
    **LAUNCH,
}

STOPPED: Mapping[str, Field] = {
    "steps": Field("integer", "steps trained", "steps"),
    "steps_wanted": Field("integer", "steps that the config asks for", "steps"),
    "samples": Field("integer", "samples of these steps", "samples", optional=True),
    "signal": Field("text", "the signal that asked"),
    **FAILURES,
    "seconds": Field("number", "from the first step to the stop", "seconds"),
    **KEPT,
    **LAUNCH,
}


def undescribed(folder: Path) -> list[str]:
    """The files in a run folder not described by RUN, CHECKPOINT and MAPPED.

    Drafts do not count.
    """
    known = [entry.name for entry in RUN if not entry.name.endswith("/*")]
    known += [f"checkpoints/step-*/{entry.name}" for entry in CHECKPOINT]
    known += [f"mapped/{entry.name}" for entry in MAPPED]
    return [name for name in _files(folder) if not any(_matches(name, of) for of in known)]


def check_summary(summary: Mapping[str, Any], known: Mapping[str, Field] = SUMMARY) -> None:
    """Raise ValueError unless summary.json, or stopped.json, matches the `known` fields."""
    named = {name: known["eval_*"] for name in summary if fnmatchcase(name, "eval_*")}
    if wrong := problems({**known, **named}, summary):
        raise ValueError("; ".join(wrong))


def _files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if not path.is_dir() and not any(part.startswith(".") for part in parts):
            yield "/".join(parts)


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("/"), pattern.split("/")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))
