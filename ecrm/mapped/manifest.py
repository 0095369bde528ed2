"""What mapped files belong to: the model and data that their bits depend on, and how many shards they are. Light: no torch."""

from __future__ import annotations

import fcntl
import json
import time
from io import FileIO
from pathlib import Path
from typing import Any

from ecrm.checkpoint.disk import Disk
from ecrm.checkpoint.fits import KEYS, identity
from ecrm.config.schema import Config
from ecrm.errors import DataError, UsageError
from ecrm.mapped.files import open_file
from ecrm.mapped.names import read_words

FOLDER = "mapped"
MANIFEST = "manifest.json"
LOCK = "lock"
VERSION = 2
HOLD_SECONDS = 5.0


def folder_of(config: Config, steps: int, run_dir: Path | None, resume: Path | None) -> Path:
    """Where the files are, or will be. Raises UsageError, with what to type, where they cannot be used.

    `resume` is the folder of a run, or that of the files, to go on from.
    """
    if resume is not None:
        folder = next((path for path in (resume, resume / FOLDER) if (path / MANIFEST).exists()), None)
        if folder is None:
            raise UsageError(
                f"--resume {resume}: holds no mapped files; name the run folder or mapped.path of a run with protection.name=mapped, "
                "or set protection.name to another to go on from a checkpoint"
            )
        _check_fit(folder, config)
        _check_files(folder, steps)
        return folder
    if not config.mapped.path and run_dir is None:
        raise UsageError("protection.name is mapped, which needs a place for its files: type --run-dir DIR or set mapped.path")
    folder = Path(config.mapped.path) if config.mapped.path else run_dir / FOLDER
    if (folder / MANIFEST).exists():
        raise UsageError(f"{folder}: holds the files of a run: type --resume {folder} to go on with it, or name another folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: not an empty folder: name one that is new or empty")
    return folder


def make_folder(folder: Path, config: Config, first: bool) -> None:
    """Make the folder; the `first` rank says in it, for good, what its files will belong to. Raises OSError."""
    disk = Disk()
    disk.make_folder(folder)
    if not first:
        return
    new = folder / f".{MANIFEST}"
    file = disk.create(new)
    disk.write(file, json.dumps(_about(config), indent=1).encode())
    disk.close(file)
    disk.rename(new, folder / MANIFEST)
    disk.sync_folder(folder)
    disk.sync_folder(folder.parent)


def leave_link(run_dir: Path, folder: Path) -> None:
    """Make a run folder lead to the files, wherever they are, so that --resume finds them there. Raises OSError."""
    link = run_dir / FOLDER
    if link.absolute() != folder.absolute() and not link.is_symlink():
        link.symlink_to(folder.absolute())


def hold(folder: Path) -> FileIO:
    """Mark the files as in use for as long as what is returned is kept, and the process lives."""
    file = open_file(folder / LOCK)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _check_that_nobody_holds(folder: Path) -> None:
    """Raise UsageError where a run is alive that uses the files.

    Tries for HOLD_SECONDS: the system may take that long to let go of the files of a process that was killed, and other ranks that
    start now look at the same time.
    """
    deadline = time.monotonic() + HOLD_SECONDS
    with open_file(folder / LOCK) as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(f"{folder}: in use by a run that is still alive: wait for its end, or kill its ranks") from None
                time.sleep(0.01)


def _check_files(folder: Path, steps: int) -> None:
    """Raise UsageError where a run is alive that uses the files, or has gone beyond `steps`; DataError where one is missing or short."""
    _check_that_nobody_holds(folder)
    for path in sorted(folder.glob("shard*.words")):
        try:
            words = read_words(path)
            rows = path.with_suffix(".rows").stat().st_size
            journals = [path.with_suffix(f".journal{slot}").stat().st_size for slot in (0, 1)]
        except (OSError, ValueError) as error:
            raise DataError(f"{path.stem} in {folder} cannot be used: {error}") from None
        if rows < words["bytes"] or any(size < words[f"length{slot}"] for slot, size in enumerate(journals)):
            raise DataError(f"{path.stem} in {folder} cannot be used: its files are shorter than they were")
        if words["committed"] > steps:
            raise UsageError(
                f"{folder} is at step {words['committed']}, this config trains {steps}: set train.steps={words['committed']} or more"
            )


def _about(config: Config) -> dict[str, Any]:
    return {"version": VERSION, "servers": config.cluster.servers, "identity": identity(config)}


def _check_fit(folder: Path, config: Config) -> None:
    try:
        said = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / MANIFEST}: cannot be read: {error}") from None
    mine = json.loads(json.dumps(_about(config)))
    if said.get("version") != VERSION:
        raise UsageError(f"{folder}: written in format {said.get('version')}, this program has {VERSION}")
    if said.get("servers") != mine["servers"]:
        raise UsageError(f"{folder}: files of {said.get('servers')} servers: set cluster.servers={said.get('servers')}")
    theirs, ours = said.get("identity", {}), mine["identity"]
    for name in (*KEYS, "tables", "data"):
        if theirs.get(name) != ours[name]:
            what = f"{name}={json.dumps(theirs.get(name))}" if name in KEYS else f"other {name}"
            raise UsageError(f"{folder}: made with {what}: set it as it was, or start without --resume")
