"""host-stall: the loop stands still in Python code that is neither loading nor launching."""

from __future__ import annotations

import numpy as np

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.cold_start import cold_calls
from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.rules.launch_bound import hold_ups
from hotloop.doctor.trace.columns import Category
from hotloop.doctor.trace.intervals import Spans
from hotloop.doctor.trace.places import Place

__all__ = ["RULE", "judge"]


def judge(case: Case) -> list[Finding]:
    """Single long host delays (>= 1 ms and >= 2 % of a step each) that sum to >= 5 % of the window.

    Only the part without any runtime call or load is counted: the host was in Python, in an operator that computes
    on the CPU, in the operating system, or asleep.
    First-time costs (see cold-start) are left out. Priced by replaying with that host time removed.
    """
    timeline = case.timeline
    window = case.idle.window_us
    holds = hold_ups(case)
    if not len(holds) or not len(timeline.call_rows):
        return []
    work = Spans(timeline.call_start, timeline.call_end).joined(timeline.loader)
    starts, ends = [], []
    for low, high in zip(holds.start.tolist(), holds.end.tolist(), strict=True):
        dark = work.gaps(low, high)
        keep = dark.end - dark.start >= 500.0
        starts += dark.start[keep].tolist()
        ends += dark.end[keep].tolist()
    dark = Spans(starts, ends)
    cold = cold_calls(case)
    total = dark.total
    if total < 0.05 * window or (len(cold) and not timeline.steps):
        return []
    # what happens once or twice is no property of the loop, and a trace with holes looks like this everywhere
    if timeline.steps < 2 or case.in_steps(dark.start) < 0.5 or case.idle.share("unexplained") >= 0.2:
        return []
    longest = int(np.argmax(dark.end - dark.start))
    place = _around(case, float(dark.start[longest] + dark.end[longest]) / 2)
    where = f" under {place.annotation!r}" if place.annotation else f" in {place.op}" if place.op else ""
    return [
        Finding(
            RULE.id,
            f"The loop stands still on the host{where}: neither loading nor launching.",
            [
                f"{total / 1000:.4g} ms in {len(dark)} pieces, the longest "
                f"{float((dark.end - dark.start).max()) / 1000:.4g} ms; the device was idle meanwhile",
            ],
            "look at what the line does: a sleep, file access, logging, work on the CPU that belongs in the loader",
            place,
            edit=Edit(host=(dark, 0.0)),
            weight_us=total,
        )
    ]


def _around(case: Case, time: float) -> Place:
    """The place of the innermost host event that covers a moment."""
    events = case.timeline.events
    rows = events.rows(Category.ANNOTATION, Category.PYTHON, Category.OP)
    cover = rows[(events.start_us[rows] <= time) & (events.end_us[rows] >= time)]
    if not len(cover):
        return Place()
    innermost = int(cover[np.argmin(events.duration_us[cover])])
    place = case.place(innermost)
    if not place.annotation:
        named = [r for r in cover if events.category[r] == Category.ANNOTATION]
        named = [r for r in named if not events.name_of(r).startswith("ProfilerStep")]
        if named:
            place.annotation = events.name_of(min(named, key=lambda r: float(events.duration_us[r])))
    return place


RULE = Rule("host-stall", "the loop stands still in Python code", judge)
