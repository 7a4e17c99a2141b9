"""allocator: the caching allocator goes to the driver for memory in steady steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.trace.places import Place

__all__ = ["RULE", "judge"]


def judge(case: Case) -> list[Finding]:
    """cudaMalloc/cudaFree (or their ROCm and virtual-memory forms) in at least half of two or more steady steps.

    Without marked steps nothing is said: a program's first allocations are no fault. Priced by replaying with these
    calls returning at once.
    """
    timeline = case.timeline
    calls = case.calls[timeline.is_alloc[case.calls]]
    if timeline.steps < 2 or not len(calls) or case.in_steps(timeline.call_start[calls]) < 0.5:
        return []
    took = case.call_us[calls]
    cause = _cause(case, calls)
    names = [timeline.events.name_of(int(timeline.call_rows[call])) for call in calls]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    return [
        Finding(
            RULE.id,
            "Memory is taken from the driver and given back in every step: the allocator's cache does not fit.",
            [
                f"{kinds} in {timeline.steps} steps, {float(took.sum()) / 1000:.4g} ms",
                f"the device was idle in {case.idle.parts.get('alloc', 0.0) / 1000:.4g} ms of it",
            ],
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, no torch.cuda.empty_cache() in the loop, "
            "or a smaller batch",
            cause,
            edit=Edit(quicken=calls),
            weight_us=float(took.sum()),
        )
    ]


def _cause(case: Case, calls: npt.NDArray[np.int64]) -> Place:
    """The line that gives the memory back, if one does so by name; else the one that waited longest for it."""
    timeline = case.timeline
    by_length = calls[np.argsort(-case.call_us[calls], kind="stable")]
    frees = by_length[timeline.call_named(r"Free|Release|Unmap")[by_length]]
    for call in frees[:20].tolist():
        place = case.place(int(timeline.call_rows[call]))
        if place.callee == "empty_cache" or any("empty_cache" in frame for frame in place.frames):
            return place
    return case.place(int(timeline.call_rows[by_length[0]]))


RULE = Rule("allocator", "memory is taken from the driver in every step", judge)
