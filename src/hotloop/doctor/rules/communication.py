"""communication: collectives that no computation hides."""

from __future__ import annotations

import numpy as np

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.accumulation import needless_reductions
from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.trace.intervals import Spans
from hotloop.doctor.trace.kernels import COMMUNICATION

__all__ = ["RULE", "exposed_us", "judge"]


def exposed_us(case: Case) -> tuple[float, float]:
    """(time with a collective running, the part of it without any computation), in the device window."""
    timeline = case.timeline
    comm = timeline.work_named(COMMUNICATION)
    low, high = timeline.device_window
    talking = Spans(timeline.work_start[comm], timeline.work_end[comm]).clipped(low, high)
    computing = Spans(timeline.work_start[~comm], timeline.work_end[~comm])
    hidden = float(computing.within(talking.start, talking.end).sum()) if len(talking) else 0.0
    return talking.total, talking.total - hidden


def judge(case: Case) -> list[Finding]:
    """Exposed collectives >= 5 % of the window: their union minus the union of all other device work.

    In the trace of one rank a collective lasts until the slowest rank has come, so this includes waiting for others;
    the price (replayed with the collectives taking no time) is therefore an upper bound. A single collective that
    lasts far longer than others of its kind is a wait for a straggler: then no price is given.
    """
    timeline = case.timeline
    comm = timeline.work_named(COMMUNICATION)
    work = case.work[comm[case.work]]
    if not len(work):
        return []
    total, exposed = exposed_us(case)
    window = case.idle.window_us
    if window <= 0 or exposed < 0.05 * window:
        return []
    took = case.work_us[work]
    typical = float(np.median(took))
    waiting = float(took[took > max(20 * typical, 50_000.0)].sum())
    victim = waiting > 0.5 * float(took.sum())
    name = timeline.events.name_of(int(timeline.work_rows[work[int(np.argmax(took))]]))
    evidence = [
        f"{total / 1000:.4g} ms in {len(work)} collectives, {exposed / 1000:.4g} ms of it without any computation "
        f"({exposed / window:.0%} of the window)",
        f"the longest: {name[:60]}, {float(took.max()) / 1000:.4g} ms",
    ]
    if victim:
        return [
            Finding(
                RULE.id,
                "This rank waits for another one: look for the straggler in the other ranks' traces.",
                [
                    *evidence,
                    f"{waiting / 1000:.4g} ms lie in collectives more than 20 x as long as the typical one",
                ],
                "record all ranks: `hotloop doctor FOLDER` compares them",
                None,
                weight_us=exposed,
            )
        ]
    evidence.append("the trace of one rank: includes waiting for the others")
    return [
        Finding(
            RULE.id,
            "Collectives run while the device computes nothing.",
            evidence,
            "larger buckets that start earlier (bucket_cap_mb), gradient_as_bucket_view=True, fewer syncs (no_sync)",
            None,
            edit=Edit(work=(np.setdiff1d(work, needless_reductions(case)[0]), 0.0)),
            at_most=True,
            weight_us=exposed,
        )
    ]


RULE = Rule("communication", "collectives that no computation hides", judge)
