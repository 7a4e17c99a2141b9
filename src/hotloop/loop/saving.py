"""Saving and resuming: when, where to, and what "where training is" means."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import CheckpointError, PrepareError
from hotloop.hardware.processes import Processes
from hotloop.loop.every import Due, Every
from hotloop.loop.resume import Registry, apply_snapshot, take_snapshot
from hotloop.loop.session import Session
from hotloop.loop.window import Window
from hotloop.state import HostState, ResidentState

if TYPE_CHECKING:
    from hotloop.loop.checkpoint import Checkpoints, Snapshot

__all__ = ["Position", "Saver"]

StrPath = str | os.PathLike[str]


@dataclass
class Position:
    """How far training is.

    Attributes:
        epoch: the epoch begun last, from 0; -1 before the first.
        updates: updates made or refused.
        in_epoch: that epoch is not over: the training loader has not ended it, or not begun it.
        feed: which of the prepared loaders feeds training, by its place among them; -1 if unknown.
    """

    epoch: int = -1
    updates: int = 0
    in_epoch: bool = False
    feed: int = -1


class Saver:
    """Writes and reads the checkpoints of one Loop."""

    def __init__(
        self,
        registry: Registry,
        *,
        window: Window,
        state: HostState | ResidentState,
        processes: Processes,
        device: torch.device,
        session: Session,
        position: Callable[[], Position],
        settle: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._window = window
        self._state = state
        self._processes = processes
        self._device = device
        self._session = session
        self._position = position
        self._settle = settle
        self._opened: Checkpoints | None = None
        self._due: dict[str, Due] = {}
        self._handled = 0
        self._asked = False
        self.path: Path | None = None
        self.keep = 1

    def save(self, path: StrPath | None, every: str | Every | None, keep: int | None, wait: bool) -> bool:
        """Save to `path` if it is due; True if so. Collective over the processes."""
        if path is not None:
            self.path = Path(path).expanduser()
        if keep is not None:
            self.keep = keep
        target = self.folder()
        if every is not None and not self._is_due(target, Every.parse(every)):
            return False
        self._write(target, wait)
        return True

    def folder(self) -> Path:
        """Where checkpoints go: the path last given, else the run's folder, else one that no other run has."""
        if self.path is not None:
            return self.path
        base = self._session.folder
        return base / "checkpoint" if base is not None else Path(f"checkpoint-{os.getpid()}")

    def _is_due(self, target: Path, every: Every) -> bool:
        position = self._position()
        now = {"updates": position.updates, "epoch": position.epoch + (not position.in_epoch)}
        due = self._due.get(str(target))
        if due is None or due.every != every:
            # counted from the run's beginning, so that a resumed run saves where the unbroken one does
            due = self._due[str(target)] = Due(every, updates=0, epoch=0)
            due.align(**now)
        passed = due.passed(**now)
        if every.seconds is not None and self._processes.world > 1:
            passed = self._agree(passed and self._processes.is_main)
        if passed:
            due.reset(**now)
        return passed

    def _agree(self, wish: bool) -> bool:
        """Clocks differ between ranks: rank 0's wish travels with the next update's sum, and all obey that."""
        # once: an answer from a device comes some updates later
        if wish and not self._asked:
            self._asked = self._window.flags[1] = True
        if isinstance(self._state, ResidentState):
            wishes = self._state.seen().saves
            if wishes == self._handled:
                return False
            self._handled = wishes
        else:
            if not self._window.agreed[1]:
                return False
            self._window.agreed[1] = False
        self._asked = False
        return True

    def _write(self, target: Path, wait: bool) -> None:
        # a fault that the device knows and the host does not must not become the newest checkpoint
        self._settle()
        position = self._position()
        snapshot = take_snapshot(
            self._registry,
            window=self._window,
            state=self._state,
            processes=self._processes,
            device=self._device,
            means=self._session.means,
            meta={
                "updates": position.updates,
                "epoch": position.epoch,
                "in_epoch": position.in_epoch,
                "feed": position.feed,
                "run": str(self._session.folder) if self._session.folder else None,
            },
        )
        if self._processes.is_main:
            # a kill loses rows of later updates alone: a resumed run does not write again what it does not repeat
            rows = self._session.log.flush
            self._storage().save(target, snapshot, keep=self.keep, wait=wait, first=rows)
        if wait:
            self._processes.barrier()

    def resume(self, path: StrPath) -> Position | None:
        """Load the newest whole checkpoint of `path` into the prepared objects; None if there is none."""
        if not any(self._registry.counts().values()):
            raise PrepareError("resume comes after prepare: there is nothing yet to load a state into")
        self.path = Path(path).expanduser()
        self._storage().wait()
        self._processes.barrier()
        snapshot = self._read(self.path)
        if snapshot is None:
            return None
        apply_snapshot(
            snapshot,
            self._registry,
            folder=self.path,
            window=self._window,
            state=self._state,
            processes=self._processes,
            device=self._device,
            means=self._session.means,
        )
        meta: dict[str, Any] = snapshot.meta
        return Position(int(meta["epoch"]), int(meta["updates"]), bool(meta["in_epoch"]), int(meta["feed"]))

    def _storage(self) -> Checkpoints:
        """What reads and writes the files; a run that never saves need not load it."""
        if self._opened is None:
            from hotloop.loop.checkpoint import Checkpoints

            self._opened = Checkpoints()
        return self._opened

    def _read(self, path: Path) -> Snapshot | None:
        """The newest whole checkpoint, the same on all ranks; what one of them cannot read, all raise."""
        snapshot, fault = None, None
        try:
            snapshot = self._storage().load(path)
        except CheckpointError as error:
            fault = error
        seen = self._processes.gather_object(
            (None if snapshot is None else snapshot.step, None if fault is None else str(fault))
        )
        if fault is not None:
            raise fault
        for rank, (_, text) in enumerate(seen):
            if text is not None:
                raise CheckpointError(f"rank {rank} cannot read the checkpoint: {text}")
        steps = [step for step, _ in seen]
        if len(set(steps)) != 1:
            raise CheckpointError(
                f"{path}: ranks see different checkpoints ({steps}); it must lie on storage that all share"
            )
        return snapshot

    def wait(self) -> None:
        """Return once the save in flight is durable; raises what made it fail."""
        if self._opened is not None:
            self._opened.wait()
