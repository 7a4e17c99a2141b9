"""A folder of checkpoints: their names, their order, the lock on it, and what is deleted when.

A finished checkpoint is a folder `step-0000000120`, renamed into place whole. Names that begin with a dot are
never checkpoints: `.saving-…` is being written, `.deleted-…` is being deleted, `.lock` is the lock.
`step-0000000120~1` exists for the moment in which a step is saved again: it is as good as the name without
`~1`, which it then takes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import math
import os
import re
import shutil
import socket
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hotloop.errors import CheckpointError
from hotloop.loop.checkpoint.manifest import MANIFEST, Manifest, check_sizes, parse_manifest
from hotloop.loop.checkpoint.stream import sync_folder

__all__ = [
    "Entry",
    "FolderLock",
    "list_checkpoints",
    "list_entries",
    "newest",
    "read_manifest",
    "resolve",
    "step_of",
]

_NAME = re.compile(r"step-(\d{10,})(?:~(\d+))?")
_SAVING, _DELETED, _LOCK = ".saving-", ".deleted-", ".lock"
_counter = itertools.count()
_no_locks = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Entry:
    """One checkpoint in a folder: its path and step, and its manifest or what is wrong with it."""

    path: Path
    step: int
    manifest: Manifest | None
    fault: str

    @property
    def number(self) -> float:
        """Its place in the order of saving; one whose manifest cannot be read might be the newest."""
        return math.inf if self.manifest is None else self.manifest.number


def resolve(folder: str | os.PathLike[str]) -> Path:
    """`folder` as an absolute path with `~` expanded; symlinks are kept."""
    return Path(os.path.abspath(Path(folder).expanduser()))


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name says; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def read_manifest(path: Path) -> tuple[int, Manifest]:
    """An open handle on the checkpoint folder `path`, and its manifest, with all sizes checked.

    The caller closes the handle. Files opened through it are those of this checkpoint, even if its name is
    given to another one meanwhile.

    Raises:
        CheckpointError: the manifest or a file is missing, truncated, altered or foreign.
        FileNotFoundError: there is no such folder.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            data = _read_all(handle, MANIFEST)
        except FileNotFoundError:
            raise CheckpointError(f"{path / MANIFEST} is missing") from None
        manifest = parse_manifest(data, path / MANIFEST)
        check_sizes(manifest, handle, path)
    except BaseException:
        os.close(handle)
        raise
    return handle, manifest


def list_entries(folder: Path) -> list[Entry]:
    """All checkpoints in `folder`, whole or not, in the order in which they were saved, newest last."""
    found = []
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    for path in paths:
        step = step_of(path)
        if step is None:
            continue
        try:
            handle, manifest = read_manifest(path)
        except FileNotFoundError:
            continue  # deleted by its owner since it was listed
        except NotADirectoryError:
            found.append(Entry(path, step, None, f"{path} is a file, not a checkpoint's folder"))
        except CheckpointError as fault:
            found.append(Entry(path, step, None, str(fault)))
        except OSError as fault:
            found.append(Entry(path, step, None, f"{path} cannot be read: {fault.strerror}"))
        else:
            os.close(handle)
            found.append(Entry(path, step, manifest, ""))
    return sorted(found, key=lambda entry: (entry.number, entry.step, entry.path.name))


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in `folder` whose files are all there in full length, oldest first.

    Checksums are compared only when a checkpoint is loaded. A missing folder has none.
    """
    return [entry.path for entry in list_entries(resolve(folder)) if entry.manifest is not None]


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` that was saved last (whatever its step); None if there is none."""
    paths = list_checkpoints(folder)
    return paths[-1] if paths else None


class FolderLock:
    """The right to write into a folder, held for one save.

    Other processes are kept out by a record lock on `.lock`: the kernel drops it when its holder dies, and
    forked children do not inherit it. Other threads of this process wait for their turn. On a file system
    without locks only the latter holds.

    Raises:
        CheckpointError: another process is saving there, or the folder cannot be written to.
    """

    _turns: dict[tuple[int, int], threading.Lock] = {}  # noqa: RUF012 - shared by all locks on purpose

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            _make_folder(folder)
            status = folder.stat()
            self._turn = self._turns.setdefault((status.st_dev, status.st_ino), threading.Lock())
            self._turn.acquire()
            try:
                self._handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._lock()
            except BaseException:
                self._turn.release()
                raise
        except OSError as fault:
            raise CheckpointError(
                f"cannot save into {folder}: {fault.strerror or fault} ({fault.filename or folder}); "
                "make it writable or choose another folder"
            ) from fault

    def release(self) -> None:
        """Let others write."""
        os.close(self._handle)
        self._turn.release()

    def new_folder(self, step: int) -> Path:
        """An empty hidden folder to write the checkpoint of `step` in."""
        path = self.folder / f"{_SAVING}{_name(step)}-{os.getpid()}-{next(_counter)}"
        path.mkdir()
        return path

    def clean(self) -> None:
        """Delete what a killed process left half written or deleted; end what it left half renamed."""
        if not self._locked:
            return  # without a lock, what looks left over may be another process's work
        for path in list(self.folder.iterdir()):
            if path.name.startswith((_SAVING, _DELETED)):
                _delete_tree(path)
        for entry in list_entries(self.folder):
            plain = self.folder / _name(entry.step)
            if entry.path != plain and entry.manifest is not None:
                self._take_name(entry.path, plain)

    def publish(self, made: Path, step: int) -> Path:
        """Give the finished folder `made` its name; an old one of that step stays until it is in place."""
        plain = self.folder / _name(step)
        if not os.path.lexists(plain):
            os.rename(made, plain)
            sync_folder(self.folder)
            return plain
        number = next(n for n in itertools.count(1) if not os.path.lexists(f"{plain}~{n}"))
        beside = Path(f"{plain}~{number}")
        os.rename(made, beside)
        sync_folder(self.folder)
        self._take_name(beside, plain)
        return plain

    def delete(self, path: Path) -> None:
        """Delete a checkpoint; killed halfway, nothing is left that looks like one."""
        hidden = self.folder / f"{_DELETED}{path.name}-{os.getpid()}-{next(_counter)}"
        os.rename(path, hidden)
        sync_folder(self.folder)
        _delete_tree(hidden)

    def prune(self, saved: Path, keep: int) -> list[Path]:
        """Delete all but the newest `keep` whole checkpoints; returns the paths deleted.

        `saved`, which has just been made durable, is the newest of them. Those of a later step (the run was
        started again from an earlier one) are neither counted nor deleted.
        """
        step = step_of(saved) or 0
        whole = 0
        deleted = []
        entries = list_entries(self.folder)[::-1]
        # Damaged ones last: they go once enough whole ones are there.
        for entry in sorted(entries, key=lambda entry: entry.manifest is None):
            if entry.path != saved and entry.step > step:
                continue
            if entry.path != saved and whole >= keep:
                self.delete(entry.path)
                deleted.append(entry.path)
            elif entry.manifest is not None:
                whole += 1
        return deleted

    def _take_name(self, beside: Path, plain: Path) -> None:
        if os.path.lexists(plain):
            self.delete(plain)
        os.rename(beside, plain)
        sync_folder(self.folder)

    def _lock(self) -> None:
        self._locked = True
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            if fault.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.pread(self._handle, 200, 0).decode(errors="replace").strip() or "another process"
                os.close(self._handle)
                raise CheckpointError(
                    f"{self.folder} is being written by {holder}; two runs must not save into one folder: "
                    "end the other run or choose another folder"
                ) from None
            if fault.errno not in _no_locks:
                os.close(self._handle)
                raise
            self._locked = False
        now = datetime.now(UTC).isoformat(timespec="seconds")
        own = f"process {os.getpid()} on {socket.gethostname()} (since {now})\n".encode()
        # Only a help for the reader of an error: a full disk must not fail here.
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, own, 0)


def _name(step: int) -> str:
    return f"step-{step:010d}"


def _make_folder(folder: Path) -> None:
    """Create the folder and its missing parents, each durable in its own parent."""
    missing = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            sync_folder(path.parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder", str(folder))


def _delete_tree(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _read_all(handle: int, name: str) -> bytes:
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=handle)
    with os.fdopen(file, "rb") as stream:
        return stream.read()


# A forked child has none of the threads that could be holding a turn.
os.register_at_fork(after_in_child=FolderLock._turns.clear)
