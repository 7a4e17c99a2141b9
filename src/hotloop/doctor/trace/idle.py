"""Idle time of the device, parted by cause so that the parts sum to all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotloop.doctor.trace.columns import Category
from hotloop.doctor.trace.intervals import Spans
from hotloop.doctor.trace.timeline import Timeline

__all__ = ["CAUSES", "Idle", "part_idle"]

CAUSES: dict[str, str] = {
    "loader": "waiting for the data loader",
    "alloc": "in cudaMalloc / cudaFree",
    "copy": "in a copy that blocks the host",
    "sync": "in a host synchronisation",
    "after-sync": "refilling the queue after a synchronisation",
    "host": "the host was late: Python, operators, launches",
    "queued": "launched, but not started (order of streams, launch delay)",
    "unexplained": "no cause in the trace",
}

_QUEUE_LIMIT_US = 1000.0


@dataclass
class Idle:
    """How the device's time in the window is spent, in microseconds.

    Attributes:
        window_us: length of the window. busy_us: union of all device work in it.
        parts: idle time by cause (keys of `CAUSES`); `busy_us + sum(parts) == window_us`.
        gaps: the idle intervals. cause: [gaps] the largest cause of each.
    """

    window_us: float
    busy_us: float
    parts: dict[str, float]
    gaps: Spans
    cause: list[str]

    def share(self, cause: str) -> float:
        """A cause's part of the window, 0..1."""
        return self.parts.get(cause, 0.0) / self.window_us if self.window_us > 0 else 0.0


def part_idle(timeline: Timeline) -> Idle:
    """Part every idle interval [g, h) of the device union.

    h is when the next work starts, l when its launch call began. Up to l the host was late: that stretch goes, in this
    order, to the loader, driver allocations, blocking copies and synchronisations that cover it, then to "after-sync"
    if the host was held by a synchronisation when the interval began, then to the host if any host event of the
    trace covers it, else to "unexplained". From l to h the work was queued.
    """
    low, high = timeline.device_window
    busy = timeline.busy.clipped(low, high)
    gaps = timeline.busy.gaps(low, high)
    window = max(high - low, 0.0)
    if not len(timeline.work_rows):
        return Idle(window, 0.0, {"unexplained": window} if window else {}, gaps, ["unexplained"] * len(gaps))
    late_until = _late_until(timeline, gaps)
    waiting = gaps.end - late_until
    # an idle device starts what it has within microseconds: a longer wait is for something the trace does not show
    strange = (waiting > _QUEUE_LIMIT_US) & ~_after_graph(timeline, gaps)
    queued = np.where(strange, 0.0, waiting)
    host = _host_cover(timeline)
    sync, copy, alloc = (
        _calls(timeline, mask) for mask in (timeline.is_sync, _blocking_copies(timeline), timeline.is_alloc)
    )
    parts: dict[str, npt.NDArray[np.float64]] = {"queued": queued}
    covered = Spans()
    done = np.zeros(len(gaps))
    for name, spans in (("loader", timeline.loader), ("alloc", alloc), ("copy", copy), ("sync", sync)):
        covered = covered.joined(spans)
        now = covered.within(gaps.start, late_until)
        parts[name] = now - done
        done = now
    rest = np.maximum(late_until - gaps.start - done, 0.0)
    held = _held(Spans(sync.start, sync.end + 5.0).joined(Spans(copy.start, copy.end + 5.0)), gaps.start)
    parts["after-sync"] = np.where(held, rest, 0.0)
    rest = np.where(held, 0.0, rest)
    seen = np.minimum(host.joined(covered).within(gaps.start, late_until), late_until - gaps.start)
    dark = np.maximum(late_until - gaps.start - seen, 0.0)
    # Python between two operators leaves no event in a trace without stacks: it is dark only where nothing follows
    unknown = np.where(_call_after(timeline, gaps) < 0, np.minimum(dark, rest), 0.0)
    parts["unexplained"] = unknown + np.where(strange, waiting, 0.0)
    parts["host"] = rest - unknown
    names = list(CAUSES)
    table = np.stack([parts[name] for name in names])
    cause = [names[index] for index in table.argmax(axis=0)] if len(gaps) else []
    return Idle(window, busy.total, {name: float(parts[name].sum()) for name in names}, gaps, cause)


def _call_after(timeline: Timeline, gaps: Spans) -> npt.NDArray[np.int64]:
    """[gaps] index of the call that launched the work which ends the gap; -1 if unknown."""
    index = np.searchsorted(timeline.work_start, gaps.end - 1e-9)
    call = np.full(len(gaps), -1, dtype=np.int64)
    there = index < len(timeline.work_start)
    call[there] = timeline.launch[index[there]]
    return call


def _after_graph(timeline: Timeline, gaps: Spans) -> npt.NDArray[np.bool_]:
    """[gaps] the work that ends the gap belongs to a captured graph, whose start takes long and whose nodes wait."""
    call = _call_after(timeline, gaps)
    graph = timeline.call_named(r"GraphLaunch")
    found = np.zeros(len(gaps), dtype=bool)
    found[call >= 0] = graph[call[call >= 0]]
    return found


def _late_until(timeline: Timeline, gaps: Spans) -> npt.NDArray[np.float64]:
    """[gaps] until when the host was late: the return of the launch of the next work, the gap's end if unknown.

    The time inside a launch call is the host's; that inside a copy is not, it may wait for the device.
    """
    call = _call_after(timeline, gaps)
    until = gaps.end.copy()
    known = call >= 0
    index = call[known]
    until[known] = np.where(timeline.is_copy[index], timeline.call_start[index], timeline.call_end[index])
    return np.clip(until, gaps.start, gaps.end)


def _host_cover(timeline: Timeline) -> Spans:
    rows = timeline.events.rows(Category.OP, Category.RUNTIME, Category.PYTHON, Category.ANNOTATION)
    events = timeline.events
    steps = (
        events.names_matching(r"^ProfilerStep|^PyTorch Profiler")[events.name[rows]] if len(rows) else rows
    )
    rows = rows[~np.asarray(steps, dtype=bool)]
    return Spans(events.start_us[rows], events.end_us[rows])


def _calls(timeline: Timeline, mask: npt.NDArray[np.bool_]) -> Spans:
    return Spans(timeline.call_start[mask], timeline.call_end[mask])


def _blocking_copies(timeline: Timeline) -> npt.NDArray[np.bool_]:
    """[calls] copies during which the host stood still for half of the device's copy or longer, and >= 20 us."""
    first = timeline.first_work
    mask = timeline.is_copy & (first >= 0)
    took = timeline.call_end - timeline.call_start
    work = np.zeros(len(took))
    work[mask] = (timeline.work_end - timeline.work_start)[first[mask]]
    return mask & (took >= 0.5 * work) & (took >= 20.0)


def _held(spans: Spans, at: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    index = np.searchsorted(spans.start, at, side="right") - 1
    inside = np.zeros(len(at), dtype=bool)
    good = index >= 0
    inside[good] = spans.end[index[good]] >= at[good]
    return inside
