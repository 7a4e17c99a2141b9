"""launch-bound: the device waits for the next small kernel because the host cannot launch fast enough."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.trace.intervals import Spans

__all__ = ["RULE", "hold_ups", "judge", "spread_host_time"]

COMPILED = 0.5  # host time left where compiled code launches fewer kernels
CAPTURED = 0.1  # host time left where a whole step is one launch


def hold_ups(case: Case) -> Spans:
    """Idle intervals in which one single delay of the host is to blame: >= 1 ms and >= 2 % of a step.

    A host that is late by a few microseconds before each of a thousand kernels is launch-bound; one that is late
    once by a second is doing something else.
    """
    gaps = case.idle.gaps
    long = gaps.end - gaps.start >= max(1000.0, 0.02 * case.timeline.step_us)
    host = np.array([cause in ("host", "after-sync") for cause in case.idle.cause], dtype=bool)
    chosen = long & host if len(gaps) else np.zeros(0, dtype=bool)
    return Spans(gaps.start[chosen], gaps.end[chosen])


def spread_host_time(case: Case) -> float:
    """Idle microseconds in which the host was late, without single long delays."""
    parts = case.idle.parts
    long = hold_ups(case)
    return max(parts.get("host", 0.0) - long.total, 0.0) + parts.get("after-sync", 0.0)


def _share_unqueued(case: Case) -> float:
    """Share of the work before whose launch returned all earlier work had ended: it waited for nothing else.

    A fixed limit for the time from launch to start would be wrong: it is 5 us on one GPU and 18 us on another.
    """
    timeline = case.timeline
    work = case.work[timeline.launch[case.work] >= 0]
    if not len(work):
        return 0.0
    ended = np.concatenate(([-np.inf], np.maximum.accumulate(timeline.work_end)[:-1]))
    return float((ended[work] <= timeline.call_end[timeline.launch[work]]).mean())


def judge(case: Case) -> list[Finding]:
    """Host-late idle time in small pieces >= 20 % of the window, and most kernels start as soon as launched.

    Priced by replaying with half of the host's time between launches (compiled code), the range's far end with a
    tenth (a captured step). Loading, waits, driver allocations and single long delays are left as they are.
    """
    timeline = case.timeline
    window = case.idle.window_us
    late = spread_host_time(case)
    launches = int((timeline.launch[case.work] >= 0).sum())
    if window <= 0 or late < 0.2 * window or launches < 20:
        return []
    unqueued = _share_unqueued(case)
    if unqueued < 0.5:
        return []
    left = Spans(*map(np.asarray, ([timeline.window[0]], [timeline.device_window[1]])))
    alone = (
        timeline.loader.joined(hold_ups(case))
        .joined(_spans(case, timeline.is_alloc))
        .joined(_spans(case, case.call_us > 5000.0))
    )
    spans = alone.gaps(float(left.start[0]), float(left.end[0]))
    stacks = bool(timeline.header.get("with_stack"))
    mean = float(case.work_us[case.work].mean())
    evidence = [
        f"the device works {case.busy_share:.0%} of the time; the host was late for {late / window:.0%} of it",
        f"{unqueued:.0%} of {launches} kernels start as soon as they are launched; they last {mean:.1f} us on average",
    ]
    if stacks:
        evidence.append("recorded with Python stacks, which slow the host down: record without them to check")
    return [
        Finding(
            RULE.id,
            "The host launches too slowly: many small kernels, each waiting for Python.",
            evidence,
            "+ @loop.capture          # the step as one CUDA graph\n  def train(x, y): ...\n"
            "(or torch.compile: fewer, larger kernels)",
            None,
            edit=Edit(host=(spans, COMPILED)),
            optimistic=Edit(host=(spans, CAPTURED)),
            weight_us=late,
        )
    ]


def _spans(case: Case, mask: npt.NDArray[np.bool_]) -> Spans:
    return Spans(case.timeline.call_start[mask], case.timeline.call_end[mask])


RULE = Rule("launch-bound", "the host launches more slowly than the device works", judge)
