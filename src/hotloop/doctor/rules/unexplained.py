"""unexplained-idle: the device was idle, and the trace does not say why."""

from __future__ import annotations

import numpy as np

from hotloop.doctor.rules.finding import Case, Finding, Rule

__all__ = ["RULE", "judge"]


def judge(case: Case) -> list[Finding]:
    """Idle time without a cause >= 20 % of the window, and host waits during which the device was idle.

    A wait of the host that the device's traced work does not fill (< 50 % busy) is for something outside the trace:
    another process or stream, a dropped event. Neither is turned into seconds to save.
    """
    timeline = case.timeline
    if not len(timeline.work_rows):
        return []
    calls = case.calls[(timeline.is_sync | timeline.is_copy)[case.calls]]
    took = case.call_us[calls]
    busy = timeline.busy.within(timeline.call_start[calls], timeline.call_end[calls])
    strange = calls[(took >= 1000.0) & (busy < 0.5 * took)]
    waited = float(case.call_us[strange].sum())
    idle = case.idle.parts.get("unexplained", 0.0)
    window = case.idle.window_us
    if window <= 0 or max(idle, waited) < 0.2 * window:
        return []
    evidence = [
        f"{idle / 1000:.4g} ms ({idle / window:.0%}) of the device's idle time have no cause in the trace"
    ]
    place = None
    if len(strange) and waited >= 0.2 * window:
        longest = strange[int(np.argmax(case.call_us[strange]))]
        row = int(timeline.call_rows[longest])
        place = case.place(row)
        evidence.append(
            f"the host waited {waited / 1000:.4g} ms in {timeline.events.name_of(row)} while the traced device work "
            "took hardly any time: it waited for something outside this trace"
        )
    return [
        Finding(
            RULE.id,
            "The device was idle for reasons that this trace does not show: no saving can be claimed.",
            evidence,
            "record longer, and all processes and streams of the device",
            place,
            kind="note",
            weight_us=max(idle, waited),
        )
    ]


RULE = Rule("unexplained-idle", "idle time without a cause in the trace", judge)
