"""Signals that ask a run to end: remembered, and honoured between two steps."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["StopSignals"]


class StopSignals:
    """Catches SIGTERM, Ctrl-C and, under Slurm, SIGUSR1 (`sbatch --signal=USR1@90`) while training is under way.

    The first one sets `pending`; the loop saves at the end of the step and exits. A second Ctrl-C ends at once.
    Outside the main thread nothing is caught: Python allows handlers only there. While `active()` is False, as
    between two trainings in a notebook, signals do what they did before.
    """

    def __init__(self, active: Callable[[], bool]) -> None:
        self.pending: int | None = None
        self._active = active
        self._before: dict[int, Any] = {}

    @property
    def installed(self) -> bool:
        """True while signals come here."""
        return bool(self._before)

    def install(self) -> None:
        """Start catching; does nothing if it already does."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        wanted = [signal.SIGTERM, signal.SIGINT]
        if "SLURM_JOB_ID" in os.environ:
            wanted.append(signal.SIGUSR1)
        for number in wanted:
            before = signal.getsignal(number)
            owner = getattr(before, "__self__", None)
            if isinstance(owner, StopSignals) and not owner._active():
                # a run that is over stands back, so that no chain of them grows
                owner.remove()
                before = signal.getsignal(number)
            if before is signal.SIG_IGN or before is None:
                continue
            self._before[number] = before
            signal.signal(number, self._handle)

    def remove(self) -> None:
        """Give the signals back to who had them."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._active():
            self.remove()
            signal.raise_signal(number)
            return
        if self.pending is not None and number == signal.SIGINT:
            # what is done about it lies with the script, which may train on
            self.pending = None
            self.remove()
            raise KeyboardInterrupt
        if self.pending is None:
            self.pending = number
            again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            # os.write, since a signal may arrive in the middle of a buffered print
            os.write(2, f"\nhotloop: {name}: saving and stopping at the end of this step{again}\n".encode())

    def leave(self, number: int | None) -> None:
        """Raise what ends the run: KeyboardInterrupt for Ctrl-C, SystemExit(128 + number) otherwise.

        `number` is the signal that came here or to another process of the run.
        """
        self.pending = None
        self.remove()
        sys.stderr.flush()
        if number is None or number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
