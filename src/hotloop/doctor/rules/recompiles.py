"""recompiles: torch.compile compiles again in steady steps, or the graph is broken into many pieces."""

from __future__ import annotations

import re

import numpy as np

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.trace.columns import Category
from hotloop.doctor.trace.intervals import Spans

__all__ = ["RULE", "judge"]

_REGION = re.compile(r"Torch-Compiled Region:? (\d+)/(\d+)")
_COMPILING = (
    r"^_compile\.compile_inner|^entire_frame_compile|^backend_compile|^compile_fx|^GraphLowering|"
    r"convert_frame\.py\(\d+\): (?:_compile|compile_inner)|^aot_dispatch|^OutputGraph\.call_user_compiler"
)
BROKEN = 5


def judge(case: Case) -> list[Finding]:
    """Compilation inside the window, or a compiled region's version (`Torch-Compiled Region i/j`) that rises in it.

    Priced by replaying without the host time inside the compiler; a region whose version rises without the compiler
    in the trace is told without seconds. More than `BROKEN` regions in a step are graph breaks, told as a note.
    """
    timeline = case.timeline
    events = timeline.events
    if not events.count:
        return []
    low, high = timeline.window
    inside = (events.start_us >= low) & (events.start_us <= high)
    findings = []
    host = np.isin(events.category, (Category.OP, Category.ANNOTATION, Category.PYTHON, Category.OTHER))
    compiling = np.flatnonzero(inside & host & events.names_matching(_COMPILING)[events.name])
    spans = Spans(events.start_us[compiling], events.end_us[compiling]) if len(compiling) else Spans()
    versions: dict[str, list[tuple[float, int]]] = {}
    regions = np.flatnonzero(inside & host & events.names_matching(_REGION.pattern)[events.name])
    for row in regions.tolist():
        match = _REGION.search(events.name_of(row))
        if match:
            versions.setdefault(match[1], []).append((float(events.start_us[row]), int(match[2])))
    rising = [name for name, seen in versions.items() if _rises([version for _, version in sorted(seen)])]
    if (spans.total > 0.01 * timeline.window_us and timeline.steps) or rising:
        evidence = []
        if len(compiling):
            evidence.append(f"{spans.total / 1000:.4g} ms in the compiler inside the window")
        if rising:
            evidence.append(f"regions compiled anew: {', '.join(rising[:8])}")
        findings.append(
            Finding(
                RULE.id,
                "torch.compile compiles again in steady steps.",
                evidence,
                "TORCH_LOGS=recompiles tells why; mark_dynamic, or padded shapes",
                case.place(int(compiling[0])) if len(compiling) else None,
                edit=Edit(host=(spans, 0.0)) if len(compiling) else None,
                weight_us=spans.total,
            )
        )
    if len(versions) > BROKEN and not rising:
        findings.append(
            Finding(
                RULE.id,
                f"The compiled code is in {len(versions)} pieces: the graph is broken.",
                [f"{len(regions)} calls of compiled regions in the window"],
                "TORCH_LOGS=graph_breaks tells where",
                kind="note",
            )
        )
    return findings


def _rises(seen: list[int]) -> bool:
    """Whether a new highest version appears after the first calls."""
    return any(version > max(seen[:index]) for index, version in enumerate(seen) if index >= 2)


RULE = Rule("recompiles", "torch.compile compiles again, or the graph is broken", judge)
