"""How fast a program is while nobody records it, and what recording costs it: a profile shows a slower host."""

from __future__ import annotations

import os
import statistics
import time
from itertools import pairwise
from typing import Any

import torch

__all__ = ["StepClock", "measure_event_cost", "measure_link"]


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
        """Median microseconds between marks; None before the third. Waits for the device."""
        try:
            marks = [mark for mark in self._marks if type(mark) is type(self._marks[-1])]
            if len(marks) < 3:
                return None
            if isinstance(marks[-1], float):
                return 1e6 * statistics.median(b - a for a, b in pairwise(marks))
            marks[-1].synchronize()
            return 1e3 * statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))
        except RuntimeError:
            # the program has left the device in a state in which it cannot be asked
            return None


def measure_event_cost(*, operators: int = 300, last: bool = False) -> float | None:
    """Microseconds that recording adds to the host for each event, operator or runtime call; None without CUDA.

    Measured on small operators of one launch each, which are two events, with and without a profiler.

    Args:
        operators: how many. last: nothing is recorded after this: the profiler leaves the driver.
    """
    from torch.profiler import ProfilerActivity, profile

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None

    def run() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(operators):
            x.add_(1.0)
        took = time.perf_counter() - start
        torch.cuda.synchronize()
        return took

    before = os.environ.get("TEARDOWN_CUPTI")
    if last:
        # read by Kineto when it stops; after this it must not come back, which some drivers do not survive
        os.environ["TEARDOWN_CUPTI"] = "1"
    try:
        x = torch.zeros(8, device="cuda")
        run()
        plain = min(run() for _ in range(3))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True):
            run()
            recorded = min(run() for _ in range(3))
    except RuntimeError:
        return None
    finally:
        if before is None:
            os.environ.pop("TEARDOWN_CUPTI", None)
        else:
            os.environ["TEARDOWN_CUPTI"] = before
    return max(recorded - plain, 0.0) * 1e6 / (2 * operators)


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
