"""Whether compiling pays: its seconds against what faster kernels save in the steps still to come."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from hotloop.capture.graphs import Recorder

__all__ = ["Choice", "compile_seconds"]

# The part of a graph's device time that compiled forwards and backwards saved where both were measured on an H200: 29 %
# for a small MLP, 37 % for a character GPT. The estimate stays below both.
_SAVED = 0.25
# What compiling has to bring in, as a multiple of what it costs: both are estimates.
_MARGIN = 2.0
_SKIPPED, _MEASURED = 8, 16


def compile_seconds(modules: list[nn.Module]) -> float:
    """An estimate of the seconds that compiling the forwards and backwards of `modules` takes, without a cache."""
    leaves = sum(1 for root in modules for m in root.modules() if next(m.children(), None) is None)
    return 10.0 + 0.2 * leaves


class Choice:
    """Measures replays of a graph of eager kernels, decides whether to compile, and looks whether it was right.

    Attributes:
        compiled: compiled forwards are to be used.
        settled: nothing more will change.
        untried: compiled forwards have not run yet.
    """

    def __init__(
        self,
        recorder: Recorder,
        modules: Callable[[], list[nn.Module]],
        remaining: Callable[[], int | None],
        say: Callable[[str], None],
    ) -> None:
        self.compiled = False
        self.settled = False
        self.untried = True
        self._recorder = recorder
        self._modules = modules
        self._remaining = remaining
        self._say = say
        self._count = 0
        self._pairs: list[tuple[Any, Any]] = []
        self._began = 0.0
        self._wall_ms = 0.0
        self._graph_ms = 0.0

    def launch(self, replay: Callable[[], None], name: str) -> None:
        """Replay, and measure it where it is still to be decided."""
        self._count += 1
        if self._count <= _SKIPPED:
            replay()
            self._began = time.perf_counter()
            return
        if self._count <= _SKIPPED + _MEASURED:
            start = self._recorder.mark_time()
            replay()
            self._pairs.append((start, self._recorder.mark_time()))
            return
        if len(self._pairs) == _MEASURED and self._wall_ms == 0.0:
            self._wall_ms = (time.perf_counter() - self._began) / _MEASURED * 1e3
        replay()
        times = [self._recorder.elapsed_ms(*pair) for pair in self._pairs]
        if None not in times:
            self._decide(statistics.median(t for t in times if t is not None), name)

    def refuse(self, reason: str) -> None:
        """Compiling does not work here: eager kernels for good."""
        self.compiled, self.settled = False, True
        self._say(reason)

    def _decide(self, device_ms: float, name: str) -> None:
        if self.compiled:
            self.settled = True
            if device_ms > self._graph_ms:
                self.compiled = False
                self._say(
                    f"{name}: compiled kernels take {device_ms:.2f} ms a step, eager ones {self._graph_ms:.2f}: the "
                    "graph of eager kernels is used"
                )
            return
        self._graph_ms = device_ms
        remaining = self._remaining()
        cost = compile_seconds(self._modules())
        # faster kernels help only as far as it is the device that sets the pace
        bound = min(device_ms / max(self._wall_ms, 1e-9), 1.0)
        saved = (remaining or 0) * device_ms / 1e3 * _SAVED * bound
        if saved < _MARGIN * cost:
            self.settled = True
            return
        self._say(
            f"{name}: {remaining} steps of {device_ms:.2f} ms are to come, so the forwards are compiled now: about "
            f"{cost:.0f} s, to save about {saved:.0f} s"
        )
        self.compiled = True
        self._count, self._pairs, self._wall_ms = 0, [], 0.0
