"""Threads beside the training thread keep off the device while work for it is being recorded."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["RECORDING_GATE", "RecordingGate"]


class RecordingGate:
    """Open while nothing is being recorded. Threads that pass never wait at it; who closes it waits for them.

    A device call of another thread would end up in the recording, or break it. So each thread of a loader makes its
    calls inside `passed`, and the recording is made inside `closed`.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Open it, as in the child of a fork, which has none of the threads that passed."""
        self._changed = threading.Condition()
        self._closings = 0
        self._inside = 0

    @contextmanager
    def closed(self) -> Iterator[None]:
        """No other thread is inside `passed`, nor comes in, while the context is open."""
        with self._changed:
            self._closings += 1
        try:
            # an interrupt comes in the middle of waiting, too
            with self._changed:
                while self._inside:
                    self._changed.wait()
            yield
        finally:
            with self._changed:
                self._closings -= 1

    @contextmanager
    def passed(self) -> Iterator[bool]:
        """Gives whether device calls may be made inside: False where something is being recorded."""
        with self._changed:
            free = self._closings == 0
            self._inside += free
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()


RECORDING_GATE = RecordingGate()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RECORDING_GATE.renew)
