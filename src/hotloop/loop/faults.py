"""A non-finite loss or gradient: said, counted, or raised with the batches that it came from."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

from hotloop.errors import NonFiniteError
from hotloop.loop.host_updates import HostUpdates
from hotloop.loop.preparing import Preparer
from hotloop.loop.resident_updates import ResidentUpdates
from hotloop.loop.session import Session
from hotloop.loop.window import Window
from hotloop.state import HostState, ResidentState

__all__ = ["Faults"]

# Updates whose batch numbers are remembered. The device tells of a bad one as many updates later as the host runs
# ahead, which is far fewer.
_TRAIL = 64


class Faults:
    """Looks at what became of each update, without waiting for it."""

    def __init__(self, state: HostState | ResidentState, window: Window, rank: int, session: Session) -> None:
        self._state = state
        self._window = window
        self._rank = rank
        self._session = session
        self._trail: deque[tuple[int, int]] = deque(maxlen=_TRAIL)
        self._marks = 0
        self._before = 0
        self._stopped = False
        self.preparer: Callable[[], Preparer]

    def after(self, updates: HostUpdates | ResidentUpdates) -> None:
        """Called after each update on a device, and after each refused one on the host."""
        if isinstance(updates, HostUpdates):
            if self._state.nonfinite == "skip":
                self._say_skipped()
            elif self._state.nonfinite == "stop":
                self._stop(updates.attempted - 1, self._last_batch())
            return
        state = updates.state
        feed = self._window.feed
        self._trail.append((self._marks, feed.handed_out if feed is not None else self._last_batch()))
        self._marks += 1
        if not state.watching or not state.troubled():
            return
        seen = state.seen()
        if seen.bad and state.nonfinite == "stop":
            # every update's counters are looked at in turn: the first that shows a bad one is the one
            mark = seen.updates - 1
            self._stop_at(mark)
        if seen.refused and state.nonfinite == "skip":
            self._say_skipped()

    def restart(self, updates: int) -> None:
        """The run goes on from a checkpoint made after so many updates."""
        self._trail.clear()
        self._marks, self._before, self._stopped = 0, updates, False

    def settle(self) -> None:
        """Before a result is taken for good: has the device met anything that the host has not heard of yet?"""
        state = self._state
        if isinstance(state, ResidentState) and state.nonfinite == "stop" and not self._stopped:
            mark = state.first_bad()
            if mark is not None:
                self._stop_at(mark)

    def _stop_at(self, mark: int) -> None:
        self._stop(self._before + mark, next((batch for made, batch in self._trail if made == mark), 0))

    def _say_skipped(self) -> None:
        self._session.notes.say(
            "a loss or gradient was not finite: that update was skipped; `loop.skipped` counts them"
        )

    def _last_batch(self) -> int:
        preparer = self.preparer()
        loader = preparer.training_loader() if preparer.registry.loaders else None
        return loader.handed_out if loader is not None else 0

    def _indices(self, last: int) -> list[Any] | None:
        loader = self.preparer().training_loader()
        if loader is None or last == 0:
            return None
        found: list[Any] = []
        for number in range(max(last - self._window.every, 0) + 1, last + 1):
            found += loader.indices_of(number) or []
        return found or None

    def _stop(self, step: int, batch: int) -> None:
        self._stopped = True
        indices = self._indices(batch)
        where = ""
        if self._session.folder is not None:
            file = self._session.folder / f"nonfinite-rank{self._rank}.json"
            try:
                content = {"step": step, "rank": self._rank, "indices": indices}
                file.write_text(json.dumps(content, default=str) + "\n")
                where = f"; the dataset indices of its batches are in {file}"
            except OSError as error:
                where = f"; its batches could not be written down: {error}"
        raise NonFiniteError(
            f"loss or gradient was not finite in update {step} (counted from 0); weights are those before it{where}. "
            'Lower the learning rate or clip, or train on with nonfinite="skip"',
            step=step,
            indices=indices,
        )
