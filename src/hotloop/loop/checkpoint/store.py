"""Saving beside training: copies are taken at once, a thread writes them, faults come back to the caller."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

from hotloop.errors import CheckpointError, SettingError
from hotloop.loop.checkpoint import reader, writer
from hotloop.loop.checkpoint.folder import FolderLock, resolve
from hotloop.loop.checkpoint.manifest import FORMAT_VERSION, MANIFEST
from hotloop.loop.checkpoint.snapshot import Snapshot

__all__ = ["Checkpoints"]


class Checkpoints:
    """Saves snapshots into folders, one at a time and by default in the background, and loads them.

    At most one save is in flight: a save that is asked for meanwhile first waits for it, so nothing is
    skipped and no more than one copy of the state is held in host memory. What fails in the background is
    raised by the next `save` or `wait`; if there is none, it is printed at exit. A save in flight is finished
    before the interpreter ends.

    Attributes:
        last: path of the checkpoint that this object made durable last; None before the first.
    """

    def __init__(self) -> None:
        self.last: Path | None = None
        self._saving: _Saving | None = None

    def save(
        self,
        folder: str | os.PathLike[str],
        snapshot: Snapshot,
        *,
        keep: int | None = 1,
        wait: bool = False,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Save `snapshot` as `folder/step-<10 digits>`, atomically; a checkpoint of that step is replaced.

        When this returns, every tensor has been copied, or its copy is queued on the accelerator's current
        stream before whatever is issued next: all may be changed. Call it on the stream that updates them.

        Args:
            folder: made if missing; `~` is expanded. One run at a time may save there. A path that is itself a
                checkpoint stands for the folder that it lies in.
            snapshot: what to save.
            keep: how many checkpoints to leave in the folder, the new one included; older ones are deleted
                once the new one is durable. None keeps all. Those of a later step than this one are never
                deleted.
            wait: return only when the checkpoint is durable.
            first: what has to be done before there is a checkpoint that follows it; called where it is written.
                What it raises is the save's fault.

        Raises:
            SettingError: keep is less than 1.
            CheckpointError: the save before this one failed (this one is then not begun), something in the
                snapshot cannot be stored, the folder cannot be written to, another process is saving there,
                or there is not enough room. With `wait`, also what fails in writing.
        """
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise SettingError(
                f"keep={keep!r}: give how many checkpoints to keep, at least 1, or None for all"
            )
        self.wait()
        target = resolve(folder)
        if (target / MANIFEST).exists():
            # What was loaded from one checkpoint by its own path goes on in the folder that it lies in.
            target = target.parent
        lock = FolderLock(target)
        try:
            held = writer.hold(snapshot, clone=not wait)
            held.meta = {**_circumstances(), **held.meta}
            writer.check_space(target, held.copies.size_bytes)
            saving = _Saving(self, lock, held, keep, first)
        except BaseException:
            lock.release()
            raise
        if wait:
            saving.run()
            saving.raise_fault()
            return
        self._saving = saving
        saving.start()

    def load(self, folder: str | os.PathLike[str]) -> Snapshot | None:
        """The newest whole checkpoint in `folder` (or the one that `folder` is); None if there is none.

        Waits for a save in flight first. "Newest" is the one saved last. Every byte is checked. If the newest
        is damaged and an older one is whole, that one is loaded and a line on stderr says which file had
        which fault.

        Raises:
            CheckpointError: only damaged checkpoints are there, or the path is something else; names the file
                and the fault. Or the save in flight failed.
        """
        self.wait()
        return reader.load(folder)

    def wait(self) -> None:
        """Return once the save in flight is durable.

        Raises:
            CheckpointError: it failed; names the file and the fault. What was saved before is untouched.
        """
        saving = self._saving
        if saving is not None:
            saving.join()
            self._saving = None
            saving.raise_fault()


class _Saving:
    """One save on its way to the disk."""

    _failed: list[_Saving] = []  # noqa: RUF012 - one list for the process on purpose

    def __init__(
        self,
        owner: Checkpoints,
        lock: FolderLock,
        held: writer.HeldSnapshot,
        keep: int | None,
        first: Callable[[], None] | None,
    ) -> None:
        self._owner = owner
        self._lock = lock
        self._held: writer.HeldSnapshot | None = held
        self._keep = keep
        self._first = first
        self._fault: BaseException | None = None
        self._process = os.getpid()
        # Not a daemon: the interpreter waits for it at exit.
        self._thread = threading.Thread(target=self.run, name="hotloop-checkpoint")

    def start(self) -> None:
        self._thread.start()

    def run(self) -> None:
        assert self._held is not None
        try:
            if self._first is not None:
                self._first()
            self._owner.last = writer.write(self._lock, self._held, self._keep)
        except BaseException as fault:
            self._fault = fault
            self._failed.append(self)
        finally:
            self._held = None  # gives the copies' memory back at once
            self._lock.release()

    def join(self) -> None:
        # In a forked child the thread does not exist, and the save is the parent's.
        if self._process == os.getpid():
            self._thread.join()

    def raise_fault(self) -> None:
        if self._fault is None or self._process != os.getpid():
            return
        self._failed.remove(self)
        if isinstance(self._fault, Exception) and not isinstance(self._fault, CheckpointError):
            kind = type(self._fault).__name__
            raise CheckpointError(f"the checkpoint was not saved: {kind}: {self._fault}") from self._fault
        raise self._fault

    @classmethod
    def tell(cls) -> None:
        """Print the faults that nobody was told of."""
        for saving in cls._failed:
            if saving._process == os.getpid():
                print(f"hotloop: {saving._fault}", file=sys.stderr, flush=True)


def _circumstances() -> dict[str, object]:
    from hotloop import __version__

    return {
        "format_version": FORMAT_VERSION,
        "hotloop": __version__,
        "torch": str(torch.__version__),
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


atexit.register(_Saving.tell)
