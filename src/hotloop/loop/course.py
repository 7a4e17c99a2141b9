"""How far a run is: the epochs and steps still to do, the position for a checkpoint, and signals that end it early."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hotloop.hardware.processes import Processes
from hotloop.loop.faults import Faults
from hotloop.loop.preparing import Preparer
from hotloop.loop.saving import Position, Saver
from hotloop.loop.session import Session
from hotloop.loop.signals import StopSignals
from hotloop.loop.window import Window
from hotloop.state import HostState, ResidentState

__all__ = ["Course"]


class Course:
    """The epochs and steps of one Loop.

    Args:
        updates: gives the updates made or refused so far.

    Attributes:
        epoch: the epoch begun last, from 0; -1 before the first.
        preparer, saver: set once they exist.
    """

    preparer: Preparer
    saver: Saver

    def __init__(
        self,
        *,
        window: Window,
        state: HostState | ResidentState,
        processes: Processes,
        session: Session,
        faults: Faults,
        updates: Callable[[], int],
    ) -> None:
        self.epoch = -1
        self._first_epoch = 0
        self._at_start: tuple[int, list[tuple[int, int]]] | None = None
        self._active = False
        self._goal: int | None = None
        # updates of the last epoch that was done whole; whether the next one was begun before a resume
        self._in_last: int | None = None
        self._begun_before = False
        self._window = window
        self._resident = state if isinstance(state, ResidentState) else None
        self._processes = processes
        self._session = session
        self._faults = faults
        self._updates = updates
        # what other ranks wish comes to the host by way of the device
        self._asks_device = self._resident is not None and processes.world > 1
        # handlers outlive what they were made for, and must not keep it alive
        me = weakref.ref(self)
        self._signals = StopSignals(lambda: (course := me()) is not None and course._trains())
        weakref.finalize(self, self._signals.remove).atexit = False

    @property
    def _loaders(self) -> list[Any]:
        return self.preparer.registry.loaders

    def _trains(self) -> bool:
        return self._active or any(loader.live for loader in self._loaders)

    def epochs(self, n: int) -> Iterator[int]:
        """See `Loop.epochs`."""
        if self._first_epoch >= n > 0:
            done = f"{self._first_epoch} epoch{' is' if self._first_epoch == 1 else 's are'}"
            self._session.notes.say(f"epochs({n}): {done} done already, none is left to do")
        with self._under_way():
            self._show_totals(n)
            for epoch in range(self._first_epoch, n):
                self.epoch, self._first_epoch = epoch, epoch
                self._at_start = self._marks()
                before = self._updates()
                yield epoch
                self._first_epoch, self._at_start = epoch + 1, None
                self._in_last = None if self._begun_before else self._updates() - before
                self._begun_before = False
                self._say_if_untracked()
                self._show_totals(n)
                self._honour_signal()
            self._faults.settle()

    def steps(self, n: int) -> Iterator[int]:
        """See `Loop.steps`."""
        with self._under_way():
            self._session.progress.set_totals(n, None)
            self._goal = n
            idle = 0
            while self._updates() + idle < n:
                before = (self._updates(), self._pending())
                yield self._updates() + idle
                idle += before == (self._updates(), self._pending())
                self._honour_signal()
            self._say_if_untracked()
            self._faults.settle()

    def _say_if_untracked(self) -> None:
        """Tell of batches that trained a prepared module whose optimizer was not prepared."""
        prepared = self.preparer.registry
        if prepared.optimizers or not any(loader.with_grad and loader.handed_out for loader in self._loaders):
            return
        if any(p.requires_grad for module in prepared.modules for p in module.parameters()):
            self._session.notes.say(
                "no optimizer was given to prepare: its updates are not counted, guarded or saved"
            )

    def remaining(self) -> int | None:
        """Updates still to come in the `epochs` or `steps` under way; None if that is not known."""
        return None if self._goal is None or not self._active else max(self._goal - self._updates(), 0)

    def _under_way(self) -> _UnderWay:
        return _UnderWay(self)

    def _pending(self) -> int:
        return sum(u.pending for u in self.preparer.updates)

    def _show_totals(self, epochs: int) -> None:
        # an epoch that was begun before a resume has made some of its updates already, all others are to come
        first = 0 if self._begun_before else self._first_epoch
        left = self._updates_of(range(first, epochs))
        self._goal = None if left is None else left + (0 if self._begun_before else self._updates())
        self._session.progress.set_totals(self._goal, epochs)

    def _updates_of(self, epochs: range) -> int | None:
        """How many updates those epochs have, as far as can be told: where not planned, what the last one had."""
        loader = self._loaders[0] if self._loaders else None
        planned = None if loader is None else loader.planned(epochs.stop)
        if planned is not None:
            return sum(-(-steps // self._window.every) for steps in planned[epochs.start :])
        if self._in_last:
            return self._in_last * len(epochs)
        if loader is None:
            return None
        try:
            return -(-len(loader) // self._window.every) * len(epochs)
        except TypeError:
            return None

    def between_batches(self, loader: Any) -> None:
        """`loader` is asked for its next batch: all that belongs to the batches before is done."""
        window = self._window
        if window.latest is not loader:
            window.come_forward(loader)
        if not torch.is_grad_enabled():
            return
        if not self._signals.installed and not self._session.ended:
            self._signals.install()
        if self._signals.pending is not None or window.agreed[0] or self._asks_device:
            self._honour_signal()

    def _honour_signal(self) -> None:
        pending = self._signals.pending is not None
        if self._processes.world > 1:
            # every rank must leave after the same update: the wish travels with the next sum
            self._window.flags[0] = pending
            resident = self._resident
            if not (self._window.agreed[0] if resident is None else resident.seen().stop):
                return
        elif not pending:
            return
        if not self._window.boundary:
            return
        self.saver.save(None, None, None, wait=True)
        session = self._session
        session.progress.end()
        if self._processes.is_main:
            session.progress.print(
                f"hotloop: saved update {self._updates()} to {self.saver.folder()}; resume from there"
            )
        numbers = [n for n in self._processes.gather_object(self._signals.pending) if n is not None]
        self._window.agreed[0] = False
        number = numbers[0] if numbers else None
        if session.cell is not None and number == signal.SIGINT:
            # an interrupted notebook lives on, and its next cell may train further
            session.log.flush()
        else:
            session.end("interrupted", reason="signal")
        self._signals.leave(number)

    def position(self) -> Position:
        """Where training is."""
        loader = self.preparer.training_loader()
        in_epoch = loader is not None and loader.live
        if not in_epoch and self._at_start is not None:
            # nothing of this epoch is done yet: a save at its top must not count it as over
            updates, marks = self._at_start
            at = self._loaders.index(loader) if loader is not None else -1
            unmoved = 0 <= at < len(marks) and marks[at] == self._marks()[1][at]
            in_epoch = updates == self._updates() and (loader is None or unmoved)
        feed = -1 if loader is None else self._loaders.index(loader)
        return Position(self.epoch, self._updates(), in_epoch, feed)

    def _marks(self) -> tuple[int, list[tuple[int, int]]]:
        return self._updates(), [(x.epoch, x.handed_out) for x in self._loaders]

    def go_on(self, position: Position) -> None:
        """The run continues from a checkpoint made at `position`."""
        self.epoch = position.epoch
        self._first_epoch = max(position.epoch + (not position.in_epoch), 0)
        self._begun_before, self._in_last = position.in_epoch, None
        self.preparer.expected_feed = position.feed
        self._faults.restart(position.updates)

    def samples_seen(self) -> int:
        """Samples trained on so far, as far as can be told without asking a device."""
        loader = self.preparer.training_loader()
        return 0 if loader is None else loader.samples_handed_out

    def end(self) -> None:
        """Catch no signals any more."""
        self._signals.remove()


class _UnderWay:
    """While a run is under way signals are caught, and the progress line is drawn."""

    def __init__(self, course: Course) -> None:
        self._course = course

    def __enter__(self) -> None:
        self._course._active = True
        self._course._signals.install()

    def __exit__(self, *_: object) -> None:
        self._course._active = False
        self._course._signals.remove()
        # what was logged last belongs on the line that stays
        self._course._session.log.flush()
        self._course._session.progress.end()
