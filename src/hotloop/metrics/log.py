"""The way of a logged value: from the training thread through the ring and a thread to the sinks."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hotloop.errors import HotloopError
from hotloop.metrics.sinks import Sink
from hotloop.state.ring import open_ring

__all__ = ["Log"]

_PERIOD_S = 0.05
_LINGER_S = 2.0
_RESERVED = frozenset({"step", "time"})
_KEPT_ERRORS = 100


class Log:
    """Takes rows without waiting and hands them to `sinks`, at most 20 times a second, from a daemon thread.

    The thread starts with the first row and ends when none has come for two seconds, so an idle loop costs
    nothing and a forgotten Log is collected like any object. A sink that raises never stops training: the
    first error of each sink is said on stderr, all are counted in `errors`, its rows in `lost`. In the
    child of a fork a Log is inert: the rows and the files belong to the parent.

    Attributes:
        device: where most of the logged tensors live.
        sinks: where rows go, in this order.
        errors: what sinks and the device raised, oldest first; the first 100 are kept.
        lost: rows that a sink failed to take, summed over sinks.
    """

    def __init__(self, device: torch.device, sinks: Iterable[Sink], capacity: int = 1024) -> None:
        self.device = device
        self.sinks: list[Sink] = list(sinks)
        self.errors: list[Exception] = []
        self.lost = 0
        self._ring = open_ring(device, capacity)
        self._write_row = self._ring.write
        self._known: set[str] = set()
        self._failed: set[int] = set()
        self._closed = False
        self._renew_locks()
        _LOGS.add(self)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log `values` (name -> number, bool, string or one-element tensor) for `step`; never waits.

        Raises:
            HotloopError: a value is not one real number or string, or a name is no string or one of
                "step" and "time", which every row has already.
        """
        if not values.keys() <= self._known:
            self._learn(values)
        self._write_row(step, values)
        if not self._awake:
            self._wake()

    @property
    def dropped(self) -> int:
        """Rows that the ring refused because it was full, plus those that the device failed to deliver."""
        return self._ring.dropped

    def flush(self) -> None:
        """Return once all rows written before are in the sinks.

        Inside this thread's own `pause` the rows on the device have to stay there.
        """
        if self._closed:
            return
        # The ring first: whoever pauses it may flush too, and must not find the delivery taken by a waiter.
        with self._ring.lock, self._delivery:
            self._deliver()
            for sink in self.sinks:
                if hasattr(sink, "flush"):
                    self._guard(sink, sink.flush, 0)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """No other thread makes a device call for this log while the context is open; for graph capture."""
        with self._ring.pause():
            yield

    def close(self) -> None:
        """Flush, say how many rows were dropped if any, close the sinks; calling it again does nothing."""
        if self._closed:
            return
        self.flush()
        with self._delivery:
            if self._closed:
                return
            self._closed = True
            self._write_row = _write_nothing
            self._awake = True  # nobody needs to be woken any more
            self._stop.set()
            self._work.set()
            for sink in self.sinks:
                self._guard(sink, sink.close, 0)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)
        if self.dropped:
            _say(f"{self.dropped} logged rows were dropped: they came faster than they could be stored")
        if self.lost:
            _say(f"{self.lost} logged rows were lost in failing sinks; the first error was: {self.errors[0]}")

    def _renew_locks(self) -> None:
        """Everything that ties this log to the threads of one process."""
        self._delivery = threading.RLock()
        self._thread_lock = threading.Lock()
        self._work = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._awake = False

    def _learn(self, values: Mapping[str, Any]) -> None:
        """Check names that were not seen before."""
        for name in values:
            if not isinstance(name, str):
                raise HotloopError(f"the name of a logged value must be a string, not {name!r}")
            if name in _RESERVED:
                raise HotloopError(f"a logged value cannot be called {name!r}, every row has one; rename it")
        self._known.update(values)

    def _wake(self) -> None:
        """Have the thread drain soon; start it if there is none."""
        with self._thread_lock:
            self._awake = True
            self._work.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._drain_until_idle, name="hotloop-log", daemon=True
                )
                self._thread.start()

    def _drain_until_idle(self) -> None:
        """Body of the thread."""
        last_s = 0.0
        while not self._stop.is_set():
            if not self._work.wait(_LINGER_S):
                with self._thread_lock:
                    if not self._work.is_set():
                        self._thread = None
                        return
            self._stop.wait(max(0.0, last_s + _PERIOD_S - time.monotonic()))
            self._drain_once()
            last_s = time.monotonic()

    def _drain_once(self) -> None:
        """One round of the thread; does nothing while a capture pauses the ring."""
        with self._delivery:
            # Before the rows are taken: a row written from here on wakes the thread again.
            self._work.clear()
            self._awake = self._closed
            if self._closed:
                return
            if not self._ring.lock.acquire(blocking=False):
                self._work.set()
                return
            try:
                self._deliver()
            finally:
                self._ring.lock.release()

    def _deliver(self) -> None:
        """Take what the ring has and give it to every sink."""
        try:
            rows = self._ring.drain()
        except Exception as error:
            self._keep(error)
            if id(self._ring) not in self._failed:
                self._failed.add(id(self._ring))
                _say(f"the device failed while logged values were read back: {error}")
            return
        if rows:
            for sink in self.sinks:
                self._guard(sink, partial(sink.write_rows, rows), len(rows))

    def _guard(self, sink: Sink, action: Callable[[], object], rows: int) -> None:
        """Run `action` of `sink`; an error costs `rows` rows, not the training."""
        try:
            action()
        except Exception as error:
            self.lost += rows
            self._keep(error)
            if id(sink) not in self._failed:
                self._failed.add(id(sink))
                name = getattr(sink, "path", None) or type(sink).__name__
                _say(f"logging to {name} failed, training goes on: {type(error).__name__}: {error}")

    def _keep(self, error: Exception) -> None:
        """Remember `error` without the frames, and so the tensors, that it came through."""
        if len(self.errors) < _KEPT_ERRORS:
            self.errors.append(error.with_traceback(None))

    def _go_inert(self) -> None:
        """Become harmless in the child of a fork."""
        self._closed = True
        self._write_row = _write_nothing
        self._ring.forget()
        self._renew_locks()
        self._awake = True


_LOGS: weakref.WeakSet[Log] = weakref.WeakSet()


def _write_nothing(step: int, values: Mapping[str, Any]) -> None:
    """Stands in for the ring once a log is closed."""


def _say(text: str) -> None:
    """One line on stderr; a closed or full stderr is no reason to fail."""
    try:
        print(f"hotloop: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def _close_all() -> None:
    """At interpreter exit: no written row is lost."""
    for log in list(_LOGS):
        log.close()


def _after_fork() -> None:
    """In the child of a fork: the locks may be held by threads that do not exist here."""
    for log in list(_LOGS):
        log._go_inert()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
