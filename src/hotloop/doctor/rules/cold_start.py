"""cold-start: first-time costs (loading kernels, first allocations, tuning) lie inside the window."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotloop.doctor.rules.finding import Case, Finding, Rule

__all__ = ["RULE", "cold_calls", "judge"]

_ONCE = (
    r"(?i)Launch|Module|FuncSet|FuncGet|StreamCreate|GetDevice|DeviceGet|Malloc|Free|MemCreate|MemMap|HostAlloc"
    r"|Library|Graph(?:Instantiate|Upload)"
)


def cold_calls(case: Case) -> npt.NDArray[np.int64]:
    """Calls in the window that took >= 5 ms, are no waits or copies, and during which the device was mostly idle.

    Nothing but a first use is that slow: the driver loads code lazily, creates its context or its streams.
    """
    timeline = case.timeline
    calls = case.calls
    if not len(calls):
        return calls
    slow = case.call_us[calls] >= 5000.0
    once = timeline.call_named(_ONCE)[calls] & ~timeline.is_sync[calls] & ~timeline.is_copy[calls]
    calls = calls[slow & once]
    busy = timeline.busy.within(timeline.call_start[calls], timeline.call_end[calls])
    calls = calls[busy < 0.5 * case.call_us[calls]]
    # what happens in most of several steps is no first time
    if timeline.steps >= 3 and len(calls) and case.in_steps(timeline.call_start[calls]) > 0.5:
        return calls[:0]
    return calls


def judge(case: Case) -> list[Finding]:
    """First-time costs of >= 5 % of the window: said, not counted as something to fix in the loop.

    Steps that are marked and left out as warm-up do not matter; this is about what remains.
    """
    timeline = case.timeline
    calls = cold_calls(case)
    took = float(case.call_us[calls].sum()) if len(calls) else 0.0
    if took < 0.05 * case.idle.window_us or took <= 0 or case.idle.window_us <= 0:
        return []
    longest = calls[np.argsort(-case.call_us[calls])[:3]]
    told = ", ".join(
        f"{timeline.events.name_of(int(timeline.call_rows[c]))} {case.call_us[c] / 1000:.4g} ms"
        for c in longest
    )
    return [
        Finding(
            RULE.id,
            "The recording holds the program's first steps: their one-time costs say nothing about its pace.",
            [f"{took / 1000:.4g} ms ({took / case.idle.window_us:.0%}) in first-time calls: {told}"],
            "record later: torch.profiler.schedule(wait=5, warmup=2, active=5), or call the model before",
            case.place(int(timeline.call_rows[longest[0]])),
            kind="note",
            weight_us=took,
        )
    ]


RULE = Rule("cold-start", "one-time costs lie inside the window", judge)
