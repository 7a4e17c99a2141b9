"""small-grids: kernels that fill only a part of the device."""

from __future__ import annotations

import numpy as np

from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.trace.kernels import COMMUNICATION, family

__all__ = ["RULE", "judge"]


def judge(case: Case) -> list[Finding]:
    """Kernels of >= 20 us with less than one block for each multiprocessor, >= 25 % of the busy time.

    A kernel of B blocks on S multiprocessors uses at most B/S of the device. Told without seconds: what a larger
    batch or another kernel would gain is not in the trace. On a device that is idle half of the time it does not
    matter.
    """
    timeline = case.timeline
    events = timeline.events
    if not len(events.kernel_rows) or case.busy_share < 0.6:
        return []
    place = np.searchsorted(events.kernel_rows, timeline.work_rows)
    place = np.minimum(place, len(events.kernel_rows) - 1)
    known = events.kernel_rows[place] == timeline.work_rows
    per_sm = np.where(known, events.kernel_facts[place, 2], np.nan)
    units = timeline.device_property("numSms")
    if units:
        per_sm = np.where(np.isnan(per_sm) & known, events.kernel_facts[place, 0] / units, per_sm)
    small = (np.nan_to_num(per_sm, nan=9.0) < 1.0) & (case.work_us >= 20.0)
    small &= ~timeline.work_named(COMMUNICATION)
    work = case.work[small[case.work]]
    busy = float(case.work_us[case.work].sum())
    spent = float(case.work_us[work].sum())
    if busy <= 0 or spent < 0.25 * busy:
        return []
    longest = work[int(np.argmax(case.work_us[work]))]
    name = events.name_of(int(timeline.work_rows[longest]))
    call = int(timeline.launch[longest])
    return [
        Finding(
            RULE.id,
            "Long kernels fill only a part of the device.",
            [
                f"{len(work)} kernels with less than one block per multiprocessor take {spent / busy:.0%} "
                f"of the device's work ({spent / 1000:.4g} ms)",
                f"the longest: {name[:80]} ({family(name)}), {float(per_sm[longest]):.2g} blocks per multiprocessor",
            ],
            "a larger batch, or layouts whose sizes are multiples of 64",
            case.place(int(timeline.call_rows[call])) if call >= 0 else None,
            kind="note",
            weight_us=spent,
        )
    ]


RULE = Rule("small-grids", "kernels that fill only a part of the device", judge)
