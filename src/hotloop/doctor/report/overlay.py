"""An overlay for Perfetto: the window's events with two more tracks, the findings and the idle time by cause."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from hotloop.doctor.recorded import Trace
from hotloop.doctor.report.drawing import finding_spans
from hotloop.doctor.trace.columns import Category
from hotloop.doctor.trace.idle import CAUSES

__all__ = ["make_overlay"]

_PID = "hotloop doctor"
MAX_EVENTS = 300_000


def make_overlay(trace: Trace) -> str:
    """A Chrome trace (JSON text) of the window for ui.perfetto.dev: what was recorded, and what was found in it.

    Times are those of the original file, device events moved by the skew. Python frames are left out if the window
    has more than `MAX_EVENTS` events.
    """
    header = {
        key: trace.header[key] for key in ("deviceProperties", "distributedInfo") if key in trace.header
    }
    return json.dumps({**header, "traceEvents": list(_events(trace)), "displayTimeUnit": "ms"})


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    timeline, events = trace.timeline, trace.events
    origin = events.origin_us
    low = timeline.window[0]
    high = max(timeline.window[1], timeline.device_window[1])
    yield {"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": "hotloop doctor"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": _PID, "args": {"sort_index": -1}}
    rows = np.flatnonzero((events.end_us > low) & (events.start_us < high))
    if len(rows) > MAX_EVENTS:
        rows = rows[events.category[rows] != Category.PYTHON][:MAX_EVENTS]
    device = (events.category >= Category.KERNEL) & (events.category <= Category.MEMSET)
    for row in rows.tolist():
        pid, tid = events.threads[int(events.thread[row])]
        start = float(events.start_us[row]) + (timeline.skew_us if device[row] else 0.0)
        kept = _slice(
            events.name_of(row), Category.NAMES[int(events.category[row])], pid, tid, origin + start,
            float(events.duration_us[row]),
        )  # fmt: skip
        # what joins launches and work, so that the overlay can be clicked through, and read again
        joins = {
            "correlation": int(events.correlation[row]),
            "External id": int(events.external[row]),
            "stream": int(events.stream[row]),
            "device": int(events.device[row]),
        }
        args: dict[str, Any] = {key: value for key, value in joins.items() if value >= 0}
        if device[row] and events.bytes[row] > 0:
            args["bytes"] = int(events.bytes[row])
        yield {**kept, "args": args} if args else kept
    for number, finding in enumerate(trace.findings(), 1):
        spans = finding_spans(trace, finding)
        label = f"{number} {finding.rule}"
        for a, b in zip(spans.start.tolist(), spans.end.tolist(), strict=True):
            args = {"title": finding.title, "place": str(finding.place) if finding.place else ""}
            yield {**_slice(finding.rule, "finding", _PID, label, origin + a, b - a), "args": args}
    idle = trace.idle
    for a, b, cause in zip(idle.gaps.start.tolist(), idle.gaps.end.tolist(), idle.cause, strict=True):
        yield _slice(CAUSES[cause], "idle", _PID, "idle, by cause", origin + a, b - a)


def _slice(name: str, category: str, pid: Any, tid: Any, start_us: float, took_us: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": round(start_us, 3),
        "dur": round(took_us, 3),
    }
