"""Two short windows of a program's steps, recorded: one without Python stacks for prices, one with them for lines."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch

from hotloop.doctor.live.steps import StepMarks
from hotloop.doctor.recorded import Trace, read
from hotloop.doctor.trace.stream import TraceError
from hotloop.stalls import Sync, record_syncs

__all__ = ["Watch"]

WARM_UP = 2


class Watch:
    """Counts a program's steps (see `StepMarks`), and records two windows of them.

    Attributes:
        skip: steps before the first window. active: steps of each window. steps: steps seen so far.
        syncs: waits for the device with their exact lines, from the second window (CUDA only).
    """

    def __init__(self, *, skip: int = 10, active: int = 5) -> None:
        self.skip, self.active = skip, active
        self.steps = 0
        self.syncs: list[Sync] = []
        self._folder = tempfile.TemporaryDirectory(prefix="hotloop-doctor-")
        self._marks = StepMarks(self._after_step)
        self._profiler: Any = None
        self._left = 0
        self._over = False
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
        self.steps += 1
        if self._profiler is not None:
            self._left -= 1
            if self._left > 0:
                self._profiler.step()
            else:
                self._end_window()
        elif self.steps == self.skip:
            self._begin_window()

    def _begin_window(self) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU]
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        if cuda:
            activities.append(ProfilerActivity.CUDA)
        stacks = bool(self._done)
        path = Path(self._folder.name) / f"window{len(self._done)}.json"
        self._done.append(path)
        self._left = WARM_UP + self.active
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=WARM_UP, active=self.active, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            with_stack=stacks,
            record_shapes=not stacks,
        )
        if stacks and cuda:
            self.syncs = self._stack.enter_context(record_syncs(torch.device("cuda"), copies=True))
        self._profiler.start()

    def _end_window(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._stack.close()
        if len(self._done) < 2 and not self._over:
            self._begin_window()
        else:
            self._marks.close()

    def traces(self) -> tuple[Trace | None, Trace | None]:
        """(the window without stacks, the one with them), as far as the program ran."""
        found: list[Trace | None] = []
        for path in self._done:
            try:
                found.append(read(path) if path.is_file() else None)
            except TraceError:
                found.append(None)
        found += [None] * (2 - len(found))
        return found[0], found[1]
