"""What a rule says: a finding with its place, evidence, fix and price; and the case it judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hotloop.doctor.replay.simulate import Edit, Replay
from hotloop.doctor.trace.columns import Category
from hotloop.doctor.trace.idle import Idle, part_idle
from hotloop.doctor.trace.intervals import Spans
from hotloop.doctor.trace.places import Place, find_place
from hotloop.doctor.trace.timeline import Timeline

__all__ = ["Case", "Finding", "Rule"]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass
class Finding:
    """One thing that is slow, or looks slow.

    Attributes:
        rule: stable id, such as "host-sync". title: one sentence of what is wrong.
        evidence: sentences with the measured facts. fix: what to do, as text or a small diff.
        place: source line, function or operator; None if the trace does not tell.
        kind: "stall" (costs time), "harmless" (looks like a stall, costs nothing), "note" (to know; no price).
        seconds: what the fix saves over the window, by replay, with the findings ranked above it already fixed; None
            if it cannot be told. low, high: range over the orders in which the findings may be fixed.
        at_most: `seconds` is an upper bound.
        steps: number of steps in the window; `seconds / steps` is the saving for each step.
        edit: what the fix changes in the trace, for the replay.
        trust: factor for the ranking of a price that rests on an assumed speed-up.
        weight_us: how much time the finding's events take; ranks findings without a price.
    """

    rule: str
    title: str
    evidence: list[str] = field(default_factory=list)
    fix: str = ""
    place: Place | None = None
    kind: str = "stall"
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    at_most: bool = False
    steps: int = 0
    edit: Edit | None = None
    optimistic: Edit | None = None
    weight_us: float = 0.0
    trust: float = 1.0

    @property
    def per_step(self) -> float | None:
        """Seconds saved in each step; None without a price or steps."""
        return self.seconds / self.steps if self.seconds is not None and self.steps else None


@dataclass
class Case:
    """All that a rule may look at."""

    timeline: Timeline

    @cached_property
    def idle(self) -> Idle:
        """The device's idle time by cause."""
        return part_idle(self.timeline)

    @cached_property
    def replay(self) -> Replay:
        """The simulator over the window."""
        return Replay(self.timeline)

    @cached_property
    def busy_share(self) -> float:
        """Part of the device window in which the device worked, 0..1."""
        return self.idle.busy_us / self.idle.window_us if self.idle.window_us > 0 else 0.0

    @cached_property
    def work(self) -> Ints:
        """Indices of the device work that the window's calls started."""
        return np.flatnonzero(self.timeline.work_in_window)

    @cached_property
    def calls(self) -> Ints:
        """Indices of the calls in the window."""
        return np.flatnonzero(self.timeline.calls_in_window)

    @cached_property
    def work_us(self) -> npt.NDArray[np.float64]:
        """[work of the timeline] durations."""
        return self.timeline.work_end - self.timeline.work_start

    @cached_property
    def call_us(self) -> npt.NDArray[np.float64]:
        """[calls of the timeline] durations."""
        return self.timeline.call_end - self.timeline.call_start

    @cached_property
    def update_rows(self) -> Ints:
        """Rows of the ranges in which optimizers stepped (`Optimizer.step#...`), in order."""
        events = self.timeline.events
        if not events.count:
            return np.empty(0, dtype=np.int64)
        rows = np.flatnonzero(events.names_matching(r"^Optimizer\.step#")[events.name])
        return rows[np.isin(events.category[rows], (Category.ANNOTATION, Category.OP))]

    @cached_property
    def updates(self) -> Spans:
        """When optimizers stepped."""
        events = self.timeline.events
        return Spans(events.start_us[self.update_rows], events.end_us[self.update_rows])

    def in_steps(self, times: npt.ArrayLike) -> float:
        """Share of the steady steps in which at least one of the times lies; 1 if the trace has no steps."""
        spans = self.timeline.step_spans
        if not spans:
            return 1.0
        at = np.sort(np.asarray(times, dtype=np.float64))
        hit = sum(bool(np.searchsorted(at, b) > np.searchsorted(at, a)) for a, b in spans)
        return hit / len(spans)

    def often(self, count: int) -> str:
        """How often something happens, in words."""
        steps = self.timeline.steps
        in_all = "once" if count == 1 else f"{count} times"
        if not steps:
            return in_all
        each = count / steps
        return f"{each:.0f} times a step" if each >= 1.5 else "once a step" if each > 0.75 else in_all

    def place(self, row: int, *called: str) -> Place:
        """Where in the source a host event comes from; `called` are names one of which the line calls."""
        return find_place(self.timeline, row, frozenset(called))


@dataclass(frozen=True)
class Rule:
    """A judgement with a stable id.

    Attributes:
        id: as used in reports and in `# hotloop: ignore[id]`. what: one line for the list of rules.
        judge: takes the case, returns findings without prices; those with an `edit` get one.
    """

    id: str
    what: str
    judge: Callable[[Case], list[Finding]]
