"""accumulation-sync: gradients are reduced over the ranks in every micro-step, not once for each update."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule

__all__ = ["RULE", "judge", "needless_reductions"]

Ints = npt.NDArray[np.int64]


def needless_reductions(case: Case) -> tuple[Ints, int]:
    """(all-reduces of micro-steps that no update follows, number of all all-reduces) in the window."""
    timeline = case.timeline
    events = timeline.events
    none = np.empty(0, dtype=np.int64)
    reduce = case.work[timeline.work_named(r"(?i)(?:nccl|rccl).*all_?reduce")[case.work]]
    if not len(reduce):
        return none, 0
    low, high = timeline.window
    starts = events.start_us
    inside = (starts >= low) & (starts <= high)
    forward = np.sort(
        starts[inside & events.names_matching(r"^DistributedDataParallel\.forward$")[events.name]]
    )
    update = np.sort(starts[inside & events.names_matching(r"^Optimizer\.step#")[events.name]])
    if len(update) < 1 or len(forward) < 2 * len(update):
        return none, len(reduce)
    # the micro-step of each all-reduce, and whether an update follows before the next forward
    micro = np.searchsorted(forward, timeline.asked[reduce], side="right") - 1
    ends = np.append(forward[1:], np.inf)
    last = np.searchsorted(update, forward) < np.searchsorted(update, ends)
    counts = np.bincount(micro[micro >= 0], minlength=len(forward))
    if last.all() or counts[~last].min() == 0:
        return none, len(reduce)
    return reduce[(micro >= 0) & ~last[np.maximum(micro, 0)]], len(reduce)


def judge(case: Case) -> list[Finding]:
    """Two or more data-parallel forwards for each optimizer step, each followed by all-reduces of the gradients.

    Only the last micro-step needs them: priced by replaying without the all-reduces of the others.
    """
    useless, count = needless_reductions(case)
    if not len(useless):
        return []
    spent = float(case.work_us[useless].sum())
    return [
        Finding(
            RULE.id,
            "Gradients are reduced over all ranks in every micro-step of an accumulated update.",
            [f"{len(useless)} of {count} all-reduces come before the last micro-step, {spent / 1000:.4g} ms"],
            "+ with loop.accumulate():      # or model.no_sync() in all micro-steps but the last\n"
            "      loop.backward(loss)",
            None,
            edit=Edit(work=(useless, 0.0)),
            weight_us=spent,
        )
    ]


RULE = Rule("accumulation-sync", "gradients are reduced in every micro-step", judge)
