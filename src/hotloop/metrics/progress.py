"""The live line: how far the run is, how fast, how long still, and what was logged last."""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from hotloop.metrics.progress_line import ProgressLine
from hotloop.state.ring import Row

__all__ = ["Clock", "Progress"]

Clock = Callable[[], tuple[int, int]]

_TERMINAL_PERIOD_S = 0.1
_NOTEBOOK_PERIOD_S = 0.5
_PLAIN_PERIODS_S = (10.0, 30.0, 60.0)
_RATE_WINDOW_S = 10.0


class Progress:
    """The sink that shows one line: epoch, updates, rate, time left, last logged values, time passed.

    On a terminal the line is redrawn in place, at most ten times a second and no wider than the terminal.
    In Jupyter one output is updated, twice a second. Elsewhere (a file, a pipe) plain lines come after
    10, 30 and then every 60 seconds, and one at the end. A thread of its own draws, so the line moves
    even if nothing is logged; nothing is drawn before `start`, `set_totals` or the first row.

    `HOTLOOP_PROGRESS=0` switches it off, `NO_COLOR` takes the colour away.

    Args:
        stream: where to draw; sys.stderr if None.
        enabled: draw at all; None asks HOTLOOP_PROGRESS.
        clock: gives (updates done, number of the current epoch from 0); cheap, called from another
            thread, must not touch a device. None shows the last logged step.
        samples: gives the samples trained on so far, for a rate in samples; likewise.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        enabled: bool | None = None,
        clock: Clock | None = None,
        samples: Callable[[], int] | None = None,
    ) -> None:
        self.clock = clock
        self.samples = samples
        if enabled is None:
            asked = os.environ.get("HOTLOOP_PROGRESS", "").strip().lower()
            enabled = asked not in ("0", "off", "no", "false")
        self.enabled = enabled
        self._stream = stream
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._total_updates: int | None = None
        self._total_epochs: int | None = None
        self._last_step = 0
        self._values: dict[str, Any] = {}
        self._started_s: float | None = None
        self._drawn = ""  # what stands on the terminal's line now
        self._said_updates = -1
        self._marks: deque[tuple[float, int, int]] = deque()  # (time, updates, samples)
        self._display: Any = None
        self._mode = self._find_mode()

    def set_totals(self, total_updates: int | None = None, total_epochs: int | None = None) -> None:
        """Say how many updates and epochs the run will have in all; None for not known. Starts the line."""
        if self._is_foreign():
            return
        with self._lock:
            self._total_updates, self._total_epochs = total_updates, total_epochs
            begins = self._thread is None
            if begins:
                # a new pass, maybe in another cell or in one that was cleared: a notebook gets a new output
                self._display = None
        self.start()
        if begins and self._mode == "plain":
            # nothing is drawn yet: the first line that is printed tells the rate since now
            with contextlib.suppress(Exception):
                self._measure()

    def start(self) -> None:
        """Begin to draw; calling it again does nothing until `end`."""
        if self._mode == "off" or self._thread is not None or self._is_foreign():
            return
        with self._lock:
            if self._thread is not None:
                return
            if self._started_s is None:
                self._started_s = time.monotonic()
            self._marks.clear()
            self._stop = threading.Event()
            if self._mode != "plain":
                # A notebook shows an output under the cell of the thread that made it: make it here.
                self._draw()
            self._thread = threading.Thread(
                target=self._tick, args=(self._stop,), name="hotloop-progress", daemon=True
            )
            self._thread.start()

    def write_rows(self, rows: Sequence[Row]) -> None:
        """Remember the newest value of each name; the next redraw shows them."""
        if self._is_foreign():
            return
        with self._lock:
            for row in rows:
                self._values.update(row.values)
                self._last_step = row.step
        self.start()

    def print(self, *args: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
        """`print` that first clears the live line and puts it back after."""
        if self._mode != "terminal" or self._is_foreign():
            builtins.print(*args, sep=sep, end=end, file=file)
            return
        with self._lock:
            shown = self._drawn
            self._put("")
            builtins.print(*args, sep=sep, end=end, file=file, flush=True)
            if shown and end.endswith("\n"):
                self._put(shown)

    def end(self) -> None:
        """Draw the line a last time, leave it standing and stop drawing, until `start` or new rows.

        The totals were of what has ended: what comes after it has none, unless `set_totals` gives them.
        """
        if self._is_foreign():
            return
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._stop.set()
                self._draw(last=True)
            self._total_updates = self._total_epochs = None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)

    def close(self) -> None:
        """`end`, for good."""
        self.end()
        self._mode = "off"

    def line(self) -> str:
        """The line as it would be drawn now, without colour and as wide as it likes."""
        return self._measure().text()

    def _is_foreign(self) -> bool:
        """Whether this is the child of a fork: the line belongs to the parent, and the lock may be stuck."""
        return os.getpid() != self._pid

    def _find_mode(self) -> str:
        """How to draw: "off", "terminal", "notebook" or "plain"."""
        if not self.enabled:
            return "off"
        if self._stream is None and _in_notebook():
            return "notebook"
        try:
            terminal = (self._stream or sys.stderr).isatty()
        except (AttributeError, ValueError):
            terminal = False
        return "terminal" if terminal else "plain"

    def _tick(self, stop: threading.Event) -> None:
        """Body of the thread."""
        rounds = 0
        while True:
            if self._mode == "plain":
                period_s = _PLAIN_PERIODS_S[min(rounds, len(_PLAIN_PERIODS_S) - 1)]
                if rounds and rounds < len(_PLAIN_PERIODS_S):
                    period_s -= _PLAIN_PERIODS_S[rounds - 1]
            else:
                period_s = _TERMINAL_PERIOD_S if self._mode == "terminal" else _NOTEBOOK_PERIOD_S
            if stop.wait(period_s):
                return
            rounds += 1
            with self._lock:
                if stop.is_set():
                    return
                self._draw()

    def _measure(self) -> ProgressLine:
        """Everything the line says, as of now."""
        with self._lock:
            now_s = time.monotonic()
            updates, epoch = self._last_step, None
            if self.clock is not None:
                updates, epoch = self.clock()
            samples = self.samples() if self.samples is not None else 0
            marks = self._marks
            marks.append((now_s, updates, samples))
            while len(marks) > 2 and marks[1][0] < now_s - _RATE_WINDOW_S:
                marks.popleft()
            span_s = now_s - marks[0][0]
            return ProgressLine(
                updates=updates,
                total_updates=self._total_updates,
                epoch=epoch,
                total_epochs=self._total_epochs,
                updates_per_s=(updates - marks[0][1]) / span_s if span_s > 0 else None,
                samples_per_s=(samples - marks[0][2]) / span_s if span_s > 0 and self.samples else None,
                elapsed_s=now_s - self._started_s if self._started_s is not None else 0.0,
                values=dict(self._values),
            )

    def _draw(self, *, last: bool = False) -> None:
        """Show the line; whatever goes wrong in showing it switches it off instead of harming the run."""
        try:
            line = self._measure()
            if self._mode == "terminal":
                columns = shutil.get_terminal_size().columns
                text = line.text(columns - 1)
                if text != self._drawn or last:
                    self._put(text, line.colour(text), newline=last)
            elif self._mode == "notebook":
                self._show(line)
            elif self._mode == "plain" and line.updates != self._said_updates:
                self._said_updates = line.updates
                builtins.print(line.text(), file=self._stream or sys.stderr, flush=True)
        except Exception:
            self._mode = "off"
            self._stop.set()

    def _put(self, text: str, coloured: str | None = None, *, newline: bool = False) -> None:
        """Replace what stands on the terminal's line by `text`."""
        stream = self._stream or sys.stderr
        rest = " " * (len(self._drawn) - len(text))
        stream.write("\r" + (coloured or text) + rest + ("\n" if newline else "\r" if not text else ""))
        stream.flush()
        self._drawn = "" if newline else text

    def _show(self, line: ProgressLine) -> None:
        """Update the notebook's output, or make it."""
        from html import escape  # its table of entities is of no use elsewhere

        text = escape(line.text())
        bar = ""
        if line.total:
            bar = f'<progress value="{line.updates}" max="{line.total}" style="width:10em"></progress> '
        bundle = {"text/plain": line.text(), "text/html": f"<code>{bar}{text}</code>"}
        if self._display is None:
            show = sys.modules["IPython"].display.display
            self._display = show(bundle, raw=True, display_id=True)
        else:
            self._display.update(bundle, raw=True)


def _in_notebook() -> bool:
    """Whether this process is a Jupyter kernel; IPython is never imported for the answer."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return False
    shell = ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
