"""How fast a program is while nobody records it, and what recording costs it: a profile shows a slower host."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hotloop.doctor.live.recorder import make_profiler

__all__ = ["Cost", "RecordingCost", "StepClock", "measure_link"]

OPERATORS, KERNELS = 300, 100
_FEWEST = 4 * 2**20  # values of a kernel that takes some 10 us: longer than its launch


class StepClock:
    """The time of a step, taken at its end without stopping the device.

    On a CUDA device by events in its stream, which a host that runs ahead cannot hurry; elsewhere by the clock.
    """

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def mark(self) -> None:
        """A step has ended."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def step_us(self) -> float | None:
        """Mean microseconds between marks, without hiccups; None before the third. Waits for the device."""
        try:
            marks = [mark for mark in self._marks if type(mark) is type(self._marks[-1])]
            if len(marks) < 3:
                return None
            if isinstance(marks[-1], float):
                steps = [1e6 * (b - a) for a, b in pairwise(marks)]
            else:
                marks[-1].synchronize()
                steps = [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)]
        except RuntimeError:
            # the program has left the device in a state in which it cannot be asked
            return None
        typical = statistics.median(steps)
        return statistics.fmean(step for step in steps if step <= 2 * typical)


@dataclass(frozen=True)
class Cost:
    """What recording adds, in microseconds: to the host for each event, to the device for each piece of work."""

    event_us: float
    kernel_us: float


class RecordingCost:
    """Measures what recording costs, on small operators of one launch each and on kernels of some 10 us.

    `before` comes before anything is recorded: the profiler's hooks stay in the driver once they are there.
    """

    def __init__(self) -> None:
        self._plain: tuple[float, float] | None = None

    # the first measurement of the process counts: later ones find what the profiler has left behind
    known: Cost | None = None

    def before(self) -> None:
        """Time them without a profiler."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._plain = _guarded(_time)

    def after(self, *, last: bool) -> Cost | None:
        """Time them recorded; None without CUDA, or if the device cannot be asked.

        Args:
            last: nothing is recorded after this: the profiler leaves the driver, where it slows down each launch.
        """
        if self._plain is None:
            return None
        before = os.environ.get("TEARDOWN_CUPTI")
        if last:
            # read by Kineto when it stops; after this it must not come back, which some drivers do not survive
            os.environ["TEARDOWN_CUPTI"] = "1"
        try:
            recorded = _guarded(_time_recorded)
        finally:
            if before is None:
                os.environ.pop("TEARDOWN_CUPTI", None)
            else:
                os.environ["TEARDOWN_CUPTI"] = before
        if recorded is None:
            return None
        operator, kernel = (max(b - a, 0.0) for a, b in zip(self._plain, recorded, strict=True))
        if RecordingCost.known is None:
            # an operator and its launch are two events
            RecordingCost.known = Cost(operator / 2, kernel)
        return RecordingCost.known


def _guarded(measure: Callable[[], tuple[float, float]]) -> tuple[float, float] | None:
    try:
        return measure()
    except (RuntimeError, AttributeError):
        # no memory left, a device that cannot be asked any more, or a torch without its sleeping kernel
        return None


def _time_recorded() -> tuple[float, float]:
    with make_profiler(cuda=True, record_shapes=True):
        return _time()


def _time() -> tuple[float, float]:
    """Microseconds of the host for an operator, and of the device for a kernel; the best of three."""
    small, large = torch.zeros(8, device="cuda"), torch.zeros(_FEWEST, device="cuda")
    host, device = [], []
    for _ in range(4):  # the first warms up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(OPERATORS):
            small.add_(1.0)
        host.append((time.perf_counter() - start) * 1e6 / OPERATORS)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # a queue to start from: the host must stay ahead of what is timed
        torch.cuda._sleep(20_000_000)
        begin.record()
        for _ in range(KERNELS):
            large.add_(1.0)
        end.record()
        end.synchronize()
        device.append(begin.elapsed_time(end) * 1e3 / KERNELS)
    return min(host[1:]), min(device[1:])


def measure_link(*, size_bytes: int = 2**25) -> float | None:
    """Bytes a microsecond of a copy from pinned memory to the device, the best of three; None without CUDA."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    try:
        source = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device="cuda")
        best = 0.0
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            best = max(best, size_bytes / (1e3 * begin.elapsed_time(end)))
    except RuntimeError:
        # no memory left, or a device that cannot be asked any more
        return None
    return best
