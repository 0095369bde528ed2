"""The folder of mapped files, and its manifest: model, data, number of shards. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from io import FileIO
from pathlib import Path
from typing import Any

from ecrm.base.errors import DataError, EcrmError, UsageError
from ecrm.checkpoint.compatibility import check_steps
from ecrm.checkpoint.disk import Disk
from ecrm.checkpoint.folder import locate
from ecrm.checkpoint.manifest import as_a_run_writes
from ecrm.checkpoint.trained import Trained
from ecrm.config.schema import Config
from ecrm.protection.kinds import WITH_PARITY
from ecrm.protection.mapped_files.file_access import open_file, read_words

FOLDER = "mapped"
MANIFEST = "manifest.json"
LOCK = "lock"
VERSION = 2
HOLD_SECONDS = 5.0


def folder_to_go_on(config: Config, trained: Trained, steps: int, resume: Path) -> Path:
    """The folder of mapped files to go on with, given by `resume`: the folder, or its run folder.

    Raises UsageError, with advice, if files are missing or belong to another training, and further
    UsageErrors and DataErrors as `read_about` and `_check_files` do.
    """
    folder = files_at(resume)
    if folder is None:
        ways_out = []
        with contextlib.suppress(EcrmError):
            ways_out = [WITH_PARITY] if locate(resume)[0] else []
        raise UsageError(
            f"--resume {resume}: holds no mapped files; "
            "name the run folder or mapped.path of a run with protection.name=mapped",
            *ways_out,
        )
    _check_fit(folder, config, trained)
    _check_files(folder, steps, of_script="data" not in trained.identity())
    return folder


def new_folder(config: Config, run_dir: Path | None) -> Path:
    """The folder for the files of a run that begins.

    Raises UsageError, with advice, if the folder is not given, or not new or empty.
    """
    if config.mapped.path:
        folder = Path(config.mapped.path)
    elif run_dir is not None:
        folder = run_dir / FOLDER
    else:
        raise UsageError(
            "protection.name is mapped, which needs a place for its files: "
            "type --run-dir DIR or set mapped.path"
        )
    if (folder / MANIFEST).exists():
        raise UsageError(
            f"{folder}: holds the files of a run: "
            f"type --resume {folder} to go on with it, or name another folder"
        )
    if folder.exists() and (
        not folder.is_dir() or any(file.name != f".{MANIFEST}" for file in folder.iterdir())
    ):
        raise UsageError(f"{folder}: not an empty folder: name one that is new or empty")
    return folder


def files_at(given: Path) -> Path | None:
    """The folder of mapped files given by a user, directly or by the run folder, or None."""
    return next((path for path in (given, given / FOLDER) if (path / MANIFEST).exists()), None)


def make_folder(folder: Path, servers: int, identity: dict[str, Any], first: bool) -> None:
    """Make the folder; the `first` rank writes the manifest, which never changes.

    Raises OSError.
    """
    disk = Disk()
    disk.make_folder(folder)
    if not first:
        return
    about = {"version": VERSION, "servers": servers, "identity": identity}
    new = folder / f".{MANIFEST}"
    file = disk.create(new)
    disk.write(file, json.dumps(about, indent=1).encode())
    disk.close(file)
    disk.rename(new, folder / MANIFEST)
    disk.sync_folder(folder)
    disk.sync_folder(folder.parent)


def leave_link(run_dir: Path, folder: Path) -> None:
    """Link the files into the run folder, so that --resume finds the files by the run folder.

    Raises OSError.
    """
    link = run_dir / FOLDER
    if link.absolute() != folder.absolute() and not link.is_symlink():
        link.symlink_to(folder.absolute())


def hold(folder: Path) -> FileIO:
    """Mark the files as in use, until the returned file is closed or the process dies."""
    file = open_file(folder / LOCK)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _check_that_nobody_holds(folder: Path) -> None:
    """Raise UsageError if a live run uses the files.

    Tries for HOLD_SECONDS: the system may take as long to release the files of a killed process,
    and further starting ranks look at the same time.
    """
    deadline = time.monotonic() + HOLD_SECONDS
    with open_file(folder / LOCK) as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"{folder}: in use by a run that is still alive: "
                        "wait for its end, or kill its ranks"
                    ) from None
                time.sleep(0.01)


def _check_files(folder: Path, steps: int, of_script: bool = False) -> None:
    """Check that the files can be used by a run of `steps` steps.

    Raises UsageError if a live run uses the files or the files are beyond `steps`, DataError if a
    file is missing or short.
    """
    _check_that_nobody_holds(folder)
    for path in sorted(folder.glob("shard*.words")):
        try:
            words = read_words(path)
            rows = path.with_suffix(".rows").stat().st_size
            journals = [path.with_suffix(f".journal{slot}").stat().st_size for slot in (0, 1)]
        except (OSError, ValueError) as error:
            raise DataError(f"{path.stem} in {folder} cannot be used: {error}") from None
        if rows < words["bytes"] or any(
            size < words[f"length{slot}"] for slot, size in enumerate(journals)
        ):
            raise DataError(
                f"{path.stem} in {folder} cannot be used: its files are shorter than they were"
            )
        check_steps(folder, words["committed"], steps, of_script)


def read_about(folder: Path) -> dict[str, Any]:
    """The manifest of the files in a folder: {"version", "servers", "identity"}.

    Raises DataError for a damaged file and UsageError for another version.
    """
    try:
        said = json.loads((folder / MANIFEST).read_text())
        if said["version"] == VERSION:
            return {name: said[name] for name in ("version", "servers", "identity")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST}: cannot be read: {error}") from None
    raise UsageError(f"{folder}: written in format {said['version']}, this program has {VERSION}")


def _check_fit(folder: Path, config: Config, trained: Trained) -> None:
    said = read_about(folder)
    if said["servers"] != config.cluster.servers:
        raise UsageError(
            f"{folder}: files of {said['servers']} servers", {"cluster.servers": said["servers"]}
        )
    with as_a_run_writes(folder):
        trained.check_identity(folder, said["identity"])
        trained.check_data(folder, said["identity"])
