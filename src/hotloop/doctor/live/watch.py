"""Two short windows of a program's steps, recorded: one without Python stacks for prices, one with them for lines."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import torch

from hotloop.doctor.live.pace import Cost, RecordingCost, StepClock, measure_link
from hotloop.doctor.live.recorder import make_profiler, without_notices
from hotloop.doctor.live.steps import StepMarks
from hotloop.doctor.live.stoppers import Stopper, find_stoppers, optimizer_stopper
from hotloop.doctor.live.windows import Notes
from hotloop.stalls import Sync, record_syncs

__all__ = ["Watch"]

WARM_UP = 2
PACED = 10  # steps before the first window whose time is taken


class Watch:
    """Counts a program's steps (see `StepMarks`), and records two windows of them.

    Attributes:
        skip: steps before the first window. active: steps of each window. steps: steps seen so far.
        syncs: waits for the device with their exact lines, from the second window (CUDA only).
        leaves: whether the profiler's hooks are taken out of the driver after the last window: they slow down each
            launch as long as they are there.
    """

    leaves = True

    def __init__(self, *, skip: int = 10, active: int = 5) -> None:
        self.skip, self.active = skip, active
        self.steps = 0
        self.syncs: list[Sync] = []
        self._folder = Path(tempfile.mkdtemp(prefix="hotloop-doctor-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._clock = StepClock()
        self._marks = StepMarks(self._after_step)
        self._profiler: Any = None
        self._left = 0
        self._mark_s: list[float] = []
        self._over = False
        self._recording = RecordingCost()
        self._cost: Cost | None = None
        self._done: list[Path] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        self._marks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._marks.close()
        if self._profiler is not None:
            self._over = True
            self._end_window()

    def _after_step(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # recorded into a graph, not made
        self.steps += 1
        if self.skip - PACED <= self.steps <= self.skip:
            self._clock.mark()
        if self._profiler is not None:
            self._left -= 1
            if self._left > 0:
                begun = time.perf_counter()
                with without_notices() if self._left == self.active else contextlib.nullcontext():
                    self._profiler.step()
                if len(self._done) == 1:
                    self._mark_s.append(time.perf_counter() - begun)
            else:
                self._end_window()
        elif self.steps == self.skip:
            self._begin_window()

    def _begin_window(self) -> None:
        from torch.profiler import schedule

        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        stacks = bool(self._done)
        if not stacks:
            self._recording.before()
        path = self._folder / f"window{len(self._done)}.json"
        self._done.append(path)
        self._left = WARM_UP + self.active
        self._profiler = make_profiler(
            cuda=cuda,
            schedule=schedule(wait=0, warmup=WARM_UP, active=self.active, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            with_stack=stacks,
            record_shapes=not stacks,
        )
        if stacks and cuda:
            self.syncs = self._stack.enter_context(record_syncs(torch.device("cuda"), copies=True))
        with without_notices():
            self._profiler.start()

    def _end_window(self) -> None:
        profiler, self._profiler = self._profiler, None
        with without_notices():
            profiler.stop()
        self._stack.close()
        if len(self._done) < 2 and not self._over:
            self._begin_window()
        else:
            self._marks.close()
            if not self._over:
                with without_notices():
                    self._cost = self._recording.after(last=self.leaves)

    @property
    def files(self) -> list[Path]:
        """Traces of the window without stacks and the one with them, as far as the program ran."""
        return [path for path in self._done if path.is_file()]

    def make_notes(self) -> Notes:
        """What is known besides the traces; for after the program's end, since it uses the device."""
        if not self.files:
            return Notes()
        # what begins and ends a window takes longer than what stands between two of its steps
        mark_us = 1e6 * statistics.median(self._mark_s[WARM_UP:]) if len(self._mark_s) > WARM_UP else None
        cost = self._cost or self._recording.after(last=False)
        return Notes(
            self._clock.step_us(),
            None if cost is None else cost.event_us,
            None if cost is None else cost.kernel_us,
            mark_us,
            measure_link(),
            list(self.syncs),
        )

    def stoppers(self) -> tuple[Stopper, ...]:
        """What would keep a step from being captured: waits that were seen, effects in the source, optimizers."""
        waits = {(sync.file, sync.line, sync.reason) for sync in self.syncs}
        found = find_stoppers(self._marks.place, waits) if self.files else []
        made = [each() for each in self._marks.optimizers.values()]
        return (*found, *(s for each in made if each is not None and (s := optimizer_stopper(each))))
