"""Several ranks of one run side by side: how long collectives must take, who waits, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotloop.doctor.rules.communication import exposed_us
from hotloop.doctor.rules.finding import Case
from hotloop.doctor.trace.kernels import COMMUNICATION

__all__ = ["RankRow", "Ranks", "compare_ranks"]


@dataclass(frozen=True)
class RankRow:
    """One rank: its step, how busy its device was, its collectives (all in ms a step)."""

    name: str
    rank: int | None
    step_ms: float
    busy_share: float
    collectives_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class Ranks:
    """All ranks of one run.

    Attributes:
        rows: one for each. transfer_ms: for each step the sum over matched collectives of the shortest duration on
            any rank, which is what moving the data takes. straggler: the row for which the others wait, or None.
        waiting_ms: what the longest-waiting rank spends in collectives beyond `transfer_ms`, in each step.
        matched: whether all ranks ran the same number of collectives.
    """

    rows: list[RankRow]
    transfer_ms: float
    waiting_ms: float
    straggler: RankRow | None
    matched: bool


def compare_ranks(cases: Sequence[Case], names: Sequence[str]) -> Ranks:
    """Match the i-th collective of each rank with the i-th of the others, and part transfer from waiting.

    A collective ends on all ranks together, so the rank that arrives last has the shortest one: the straggler is the
    rank with the least time in collectives, if another spends >= 10 % of a step more.
    """
    rows = []
    durations = []
    for case, name in zip(cases, names, strict=True):
        timeline = case.timeline
        steps = max(timeline.steps, 1)
        comm = case.work[timeline.work_named(COMMUNICATION)[case.work]]
        durations.append(case.work_us[comm])
        _, exposed = exposed_us(case)
        rows.append(
            RankRow(
                name,
                timeline.rank,
                timeline.step_us / 1000,
                case.busy_share,
                float(case.work_us[comm].sum()) / 1000 / steps,
                exposed / 1000 / steps,
            )
        )
    counts = {len(each) for each in durations}
    matched = len(counts) == 1 and 0 not in counts and len(cases) > 1
    steps = max(cases[0].timeline.steps, 1)
    transfer = float(np.min(np.stack(durations), axis=0).sum()) / 1000 / steps if matched else 0.0
    shortest = min(rows, key=lambda row: row.collectives_ms)
    longest = max(rows, key=lambda row: row.collectives_ms)
    apart = longest.collectives_ms - shortest.collectives_ms >= 0.1 * max(row.step_ms for row in rows)
    waiting = longest.collectives_ms - (transfer if matched else shortest.collectives_ms)
    return Ranks(rows, transfer, max(waiting, 0.0), shortest if apart and len(rows) > 1 else None, matched)
