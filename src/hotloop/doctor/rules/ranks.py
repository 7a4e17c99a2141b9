"""Several ranks of one run side by side: how long collectives must take, who waits, for whom, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotloop.doctor.rules.communication import exposed_us
from hotloop.doctor.rules.finding import Case
from hotloop.doctor.trace.columns import Category
from hotloop.doctor.trace.intervals import Spans
from hotloop.doctor.trace.kernels import COMMUNICATION

__all__ = ["RankRow", "Ranks", "compare_ranks"]

# on the CPU collectives are ranges that the backend's own threads record
_ON_HOST = r"^(?:gloo|mpi|ucc|ccl|xccl|nccl):"


@dataclass(frozen=True)
class RankRow:
    """One rank: its step, how busy its device was, its collectives, what it does besides (all in ms a step).

    `busy_share` is None without a device. `exposed_ms` is the part of the collectives without any computation.
    `loader_ms`, `device_ms` and `host_ms` part the rest of the step: in the data loader, in the device's other work,
    and neither.
    """

    name: str
    rank: int | None
    step_ms: float
    busy_share: float | None
    collectives_ms: float
    exposed_ms: float
    loader_ms: float
    device_ms: float
    host_ms: float


@dataclass(frozen=True)
class Ranks:
    """All ranks of one run.

    Attributes:
        rows: one for each. transfer_ms: for each step the sum over matched collectives of the shortest duration on
            any rank, which is what moving the data takes. straggler: the row for which the others wait, or None.
        waiting_ms: what the longest-waiting rank spends in collectives beyond `transfer_ms`, in each step.
        matched: whether all ranks ran the same number of collectives.
        reason: what the straggler does more than the others, "" if there is none.
    """

    rows: list[RankRow]
    transfer_ms: float
    waiting_ms: float
    straggler: RankRow | None
    matched: bool
    reason: str = ""

    @property
    def verdict(self) -> str:
        """One sentence if ranks wait for another, else ""."""
        if self.straggler is None:
            return ""
        who = self.straggler.name if self.straggler.rank is None else f"rank {self.straggler.rank}"
        step = max(row.step_ms for row in self.rows)
        return (
            f"The other ranks wait for {who}: up to {_ms(self.waiting_ms)} of a step of {_ms(step)}"
            + (f"; {self.reason}" if self.reason else "")
            + "."
        )


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
        took, exposed = _collectives(case)
        durations.append(took)
        low, high = timeline.window
        loader = timeline.loader.clipped(low, high).total / 1000 / steps
        step = timeline.step_us / 1000
        comm = timeline.work_named(COMMUNICATION)
        own = Spans(timeline.work_start[~comm], timeline.work_end[~comm])
        device = own.clipped(*timeline.device_window).total / 1000 / steps if len(own) else 0.0
        exposed = exposed / 1000 / steps
        rows.append(
            RankRow(
                name,
                timeline.rank,
                step,
                case.busy_share if len(timeline.work_rows) else None,
                float(took.sum()) / 1000 / steps,
                exposed,
                loader,
                device,
                max(step - exposed - loader - device, 0.0),
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
    straggler = shortest if apart and len(rows) > 1 else None
    reason = _excess(straggler, [row for row in rows if row is not straggler]) if straggler else ""
    return Ranks(rows, transfer, max(waiting, 0.0), straggler, matched, reason)


def _collectives(case: Case) -> tuple[npt.NDArray[np.float64], float]:
    """([collectives] durations in the order in which they began, their time without any computation), microseconds."""
    timeline = case.timeline
    if len(timeline.work_rows):
        comm = case.work[timeline.work_named(COMMUNICATION)[case.work]]
        return case.work_us[comm], exposed_us(case)[1]
    events = timeline.events
    if not events.count:
        return np.empty(0), 0.0
    low, high = timeline.window
    rows = np.flatnonzero(events.names_matching(_ON_HOST)[events.name])
    rows = rows[(events.start_us[rows] >= low) & (events.start_us[rows] <= high)]
    rows = rows[np.argsort(events.start_us[rows], kind="stable")]
    talking = Spans(events.start_us[rows], events.end_us[rows])
    ops = events.rows(Category.OP)
    talk = events.names_matching(r"^c10d::|" + _ON_HOST[1:])
    ops = ops[~talk[events.name[ops]]]
    computing = Spans(events.start_us[ops], events.end_us[ops])
    hidden = float(computing.within(talking.start, talking.end).sum()) if len(talking) and len(ops) else 0.0
    return events.duration_us[rows].astype(np.float64), talking.total - hidden


def _excess(slow: RankRow, others: list[RankRow]) -> str:
    """What a slow rank spends more time with than the median of the others, in words."""
    parts = (
        ("in its data loader", "loader_ms"),
        ("in its device's own work", "device_ms"),
        ("on its host", "host_ms"),
    )
    more = {
        words: getattr(slow, name) - float(np.median([getattr(row, name) for row in others]))
        for words, name in parts
    }
    where = max(more, key=lambda words: more[words])
    return f"it spends {_ms(more[where])} a step more {where}" if more[where] > 0 else ""


def _ms(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms:.0f} ms"
