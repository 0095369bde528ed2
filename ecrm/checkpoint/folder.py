"""The checkpoints of a run on disk, the complete ones among them, and their publication.

A checkpoint is a folder such as `checkpoints/step-00000120/`. No torch is imported, so that `ecrm
launch` can look before starting anything.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecrm.base.epoch_drafts import EpochDrafts, left_in
from ecrm.base.errors import DataError, EcrmError, UsageError
from ecrm.checkpoint import manifest as manifests
from ecrm.checkpoint.disk import Disk
from ecrm.checkpoint.manifest import Manifest, checksums_of

FOLDER = "checkpoints"
BEST = "best"
"""A link in the folder to the checkpoint of the best evaluation."""
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, its manifest, and the chain of checkpoints it adds to.

    `chain` begins with the full checkpoint and ends with this checkpoint.
    """

    path: Path
    manifest: Manifest
    before: tuple[Checkpoint, ...] = ()

    @property
    def chain(self) -> tuple[Checkpoint, ...]:
        return (*self.before, self)

    @property
    def step(self) -> int:
        return self.manifest.step

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """Read the manifests of a checkpoint and of the checkpoints it adds to.

        The sizes of all files are compared with the manifests. Raises DataError if something is
        missing or damaged, UsageError for another format version.
        """
        manifest = _read(path)
        for entry in manifest.files:
            file = path / entry["name"]
            try:
                found = file.stat().st_size
            except OSError as error:
                raise DataError(f"{file}: {error.strerror}") from None
            if found != entry["bytes"]:
                raise DataError(f"{file}: expected {entry['bytes']} bytes, found {found}")
        if manifest.base is None:
            return Checkpoint(path, manifest)
        if manifest.base["step"] >= manifest.step:
            raise DataError(f"{path}: adds to a later checkpoint")
        base = Checkpoint.open(path.with_name(name_of(manifest.base["step"])))
        if base.manifest.checksum != manifest.base["checksum"]:
            raise DataError(f"{path}: adds to another checkpoint than {base.path}")
        return Checkpoint(path, manifest, base.chain)

    def check(self, entry: dict[str, Any]) -> None:
        """Raise DataError unless a file of this checkpoint has the content of its manifest."""
        for _ in self.checking(entry):
            pass

    def checking(self, entry: dict[str, Any]) -> Iterator[None]:
        """As `check`, but yields after every few megabytes."""
        file = self.path / entry["name"]
        found = 0
        try:
            for found in checksums_of(file):
                yield
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from None
        if found != entry["crc32"]:
            raise DataError(
                f"{file}: damaged: CRC-32 {found:08x}, the manifest says {entry['crc32']:08x}"
            )


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:08}"


def find(folder: Path, below: int | None = None) -> tuple[list[Checkpoint], list[str]]:
    """The complete checkpoints in `folder`, newest first, and the reasons against incomplete ones.

    With `below`, only checkpoints of earlier steps.
    """
    whole, refused = [], []
    for step in sorted(_steps(folder), reverse=True):
        if below is None or step < below:
            try:
                whole.append(Checkpoint.open(folder / name_of(step)))
            except EcrmError as error:
                refused.append(f"checkpoint {folder / name_of(step)} is not used: {error}")
    return whole, refused


def locate(given: Path) -> tuple[list[Checkpoint], list[str]]:
    """The complete checkpoints in a user's folder, newest first, and reasons against the rest.

    A user gives a run folder, its folder of checkpoints, or a single checkpoint, which then is the
    only checkpoint returned. Raises UsageError without any checkpoint, DataError without a complete
    one.
    """
    if _STEP.fullmatch(given.resolve().name) and given.is_dir():
        return [Checkpoint.open(given.resolve())], []
    if not given.is_dir():
        raise UsageError(f"{given}: there is no such folder")
    folder = given / FOLDER if (given / FOLDER).is_dir() else given
    whole, refused = find(folder.resolve())
    if not whole and not refused:
        raise UsageError(
            f"{given}: holds no checkpoint; "
            f"name a run folder, or one of its {FOLDER}/step-* folders"
        )
    if not whole:
        raise DataError(f"{given}: no checkpoint is whole: {refused[0]}")
    return whole, refused


class CheckpointFolder:
    """The folder for a run's checkpoints; `path` need not exist yet.

    Only a single rank at a time publishes and prunes. From the first `begin_epoch` on, files of
    earlier epochs cannot be published or pruned, whoever tries (`drafts`).
    """

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path, self.disk = path, disk or Disk()
        self.drafts = EpochDrafts(path)

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch; called by the only rank that publishes in the epoch. Raises OSError."""
        self.disk.make_folder(self.path)
        self.drafts.begin(epoch)

    @property
    def has_epoch(self) -> bool:
        """Whether an epoch has begun in this folder, by whomever."""
        return bool(left_in(self.path))

    def draft(self, step: int) -> Path:
        """The temporary folder of a checkpoint, made if missing."""
        draft = self.drafts.path / f".{name_of(step)}"
        self.disk.make_folder(draft, parents=self.drafts.epoch is None)
        return draft

    def publish(self, manifest: Manifest) -> None:
        """Give the draft, with its files synced, the manifest, and then the final name.

        With the final name the checkpoint is complete.
        """
        disk, draft, final = (
            self.disk,
            self.draft(manifest.step),
            self.path / name_of(manifest.step),
        )
        listed = {entry["name"] for entry in manifest.files}
        for path in sorted(draft.iterdir()):
            if path.name not in listed:
                disk.remove(path)  # left by a failed attempt
        file = disk.create(draft / manifests.NAME)
        disk.write(file, manifest.to_bytes())
        disk.close(file)
        disk.sync_folder(draft)
        self._discard(final)
        disk.rename(draft, final)
        disk.sync_folder(self.path)
        disk.sync_folder(self.path.parent)

    def newest(self) -> int:
        """The step of the newest complete checkpoint, 0 without any."""
        whole, _ = find(self.path)
        return whole[0].step if whole else 0

    def mark_best(self, checkpoint: Path) -> None:
        """Point `best` at a complete checkpoint, in this folder or another run's."""
        link = self.drafts.path / f".{BEST}"
        self.disk.remove(link)
        link.symlink_to(
            checkpoint.name if checkpoint.parent == self.path else checkpoint.absolute()
        )
        self.disk.rename(link, self.path / BEST)
        self.disk.sync_folder(self.path)

    def inherit_best(self, began_from: Checkpoint) -> str:
        """Point `best` at the best checkpoint of the run from which this run begins.

        Nothing changes if that checkpoint is in this very folder, or later than `began_from`.
        Returns a line for the user if the best checkpoint cannot be read and is left behind; else
        "".
        """
        there = began_from.path.parent
        link = there / BEST
        best = link.resolve()
        if not link.is_symlink() or self.path.resolve() in (best.parent, there.resolve()):
            return ""
        try:
            if Checkpoint.open(best).step <= began_from.step:
                self.disk.make_folder(self.path)
                self.mark_best(best)
        except (EcrmError, OSError) as error:
            why = (isinstance(error, OSError) and error.strerror) or error
            return f"{link}, the best checkpoint so far, is left behind: {why}"
        return ""

    @property
    def best(self) -> Path | None:
        """The checkpoint behind `best`, None if missing."""
        best = (self.path / BEST).resolve()
        return best if (best / manifests.NAME).exists() else None

    def prune(self, keep: int) -> None:
        """Remove all files not needed by `best` or by the newest `keep` complete checkpoints.

        Only checkpoints and drafts earlier than the newest complete checkpoint go. Without a
        complete checkpoint nothing is removed.
        """
        whole, _ = find(self.path)
        best = self.best
        kept = [
            checkpoint
            for checkpoint in whole
            if best is not None and checkpoint.path.resolve() == best
        ]
        needed = {link.step for checkpoint in (*whole[:keep], *kept) for link in checkpoint.chain}
        for step in sorted(_steps(self.path), reverse=True):
            if whole and step not in needed and step < whole[0].step:
                self._discard(self.path / name_of(step))
        for draft in sorted(self.drafts.path.glob(".step-*")):
            if whole and draft.name < f".{name_of(whole[0].step)}":
                self.disk.remove_folder(draft)

    def give_up(self, step: int) -> None:
        """Remove a checkpoint no longer being written, unless complete."""
        draft, final = self.drafts.path / f".{name_of(step)}", self.path / name_of(step)
        if draft.is_dir():
            self.disk.remove_folder(draft)
        if not (final / manifests.NAME).exists():
            self._discard(final)

    def tidy(self) -> None:
        """Remove the half-written files of ended runs."""
        for draft in [*self.path.glob(".step-*"), *left_in(self.path)]:
            self.disk.remove_folder(draft)
        for step in list(_steps(self.path)):
            self.give_up(step)

    def discard_after(self, step: int) -> None:
        """Remove the refused checkpoints later than `step`: their steps are done again."""
        for later in sorted(_steps(self.path), reverse=True):
            if later > step:
                self._discard(self.path / name_of(later))

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint, after a rename, so that no half-removed one looks complete."""
        if path.is_dir():
            gone = self.drafts.path / f".{path.name}.gone"
            if gone.exists():  # left by a killed rank
                self.disk.remove_folder(gone)
            self.disk.rename(path, gone)
            self.disk.sync_folder(self.path)
            self.disk.remove_folder(gone)


def _steps(folder: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if match := _STEP.fullmatch(entry.name):
                yield int(match[1])


def _read(path: Path) -> Manifest:
    file = path / manifests.NAME
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: incomplete, it has no {manifests.NAME}") from None
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from None
    manifest = manifests.parse(data, str(file))
    if name_of(manifest.step) != path.name:
        raise DataError(f"{path}: holds step {manifest.step}")
    return manifest
