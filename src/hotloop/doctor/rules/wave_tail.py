"""wave-tail: kernels whose last wave of blocks leaves most of the device empty."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.trace.kernels import COMMUNICATION

__all__ = ["RULE", "judge", "waves"]

SHORTEST_US = 20.0


def waves(case: Case) -> npt.NDArray[np.float64]:
    """[work of the timeline] waves in which a kernel's blocks run, NaN where the trace does not tell.

    A multiprocessor of T threads holds occupancy x T / block blocks at a time; B blocks on S of them take
    B / (S x that) waves. Occupancy is the estimate in the trace, which is the theoretical one.
    """
    timeline = case.timeline
    events = timeline.events
    found = np.full(len(timeline.work_rows), np.nan)
    units, threads = (
        timeline.device_property("numSms"),
        timeline.device_property("maxThreadsPerMultiprocessor"),
    )
    if not len(events.kernel_rows) or not units or not threads:
        return found
    place = np.minimum(np.searchsorted(events.kernel_rows, timeline.work_rows), len(events.kernel_rows) - 1)
    known = events.kernel_rows[place] == timeline.work_rows
    blocks, size, _, occupancy = events.kernel_facts[place].T.astype(np.float64)
    with np.errstate(invalid="ignore"):
        known &= (blocks > 0) & (size > 0) & (occupancy > 0) & (occupancy <= 100)
    held = np.maximum(np.floor(occupancy[known] / 100 * threads / size[known] + 1e-6), 1.0)
    found[known] = blocks[known] / (units * held)
    return found


def judge(case: Case) -> list[Finding]:
    """Kernels of >= 20 us in one to five waves, of which the empty part of the last one is >= 10 % of the busy time.

    W waves last as long as the next whole number of them: W / ceil(W) of the device is used. Told without seconds:
    another number of blocks is another kernel or another size. On a device that is idle half of the time it does not
    matter.
    """
    timeline = case.timeline
    if case.busy_share < 0.6:
        return []
    number = waves(case)
    with np.errstate(invalid="ignore"):
        tailed = (number > 1.0) & (number < 5.0) & (case.work_us >= SHORTEST_US)
    tailed &= ~timeline.work_named(COMMUNICATION)
    work = case.work[tailed[case.work]]
    lost = case.work_us[work] * (1 - number[work] / np.ceil(number[work]))
    busy = float(case.work_us[case.work].sum())
    if busy <= 0 or float(lost.sum()) < 0.1 * busy:
        return []
    worst = work[int(np.argmax(lost))]
    name = timeline.events.name_of(int(timeline.work_rows[worst]))
    call = int(timeline.launch[worst])
    return [
        Finding(
            RULE.id,
            "Long kernels end in a wave of blocks that leaves most of the device empty.",
            [
                f"in {len(work)} kernels the empty part of the last wave is {float(lost.sum()) / busy:.0%} of the "
                f"device's work ({float(lost.sum()) / 1000:.4g} ms)",
                f"the worst: {name[:80]}, {number[worst]:.3g} waves, {case.work_us[worst]:.4g} us",
            ],
            "sizes that give a whole number of waves: batch or width a little smaller or larger",
            case.place(int(timeline.call_rows[call])) if call >= 0 else None,
            kind="note",
            weight_us=float(lost.sum()),
        )
    ]


RULE = Rule("wave-tail", "kernels whose last wave of blocks leaves the device empty", judge)
