"""Everything the doctor says about a trace as plain values: what `--json` prints and the pages are made of."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hotloop.doctor.recorded import Trace
from hotloop.doctor.rules.finding import Finding
from hotloop.doctor.rules.ranks import compare_ranks
from hotloop.doctor.trace.kernels import family

__all__ = ["gather_facts", "kernel_table"]

VERSION = 1


def gather_facts(trace: Trace) -> dict[str, Any]:
    """The report's content. Times are seconds where the key ends in `_s`, shares are 0..1; unknown is null."""
    diagnosis, timeline, idle = trace.diagnosis, trace.timeline, trace.idle
    replay = trace.case.replay
    facts: dict[str, Any] = {
        "version": VERSION,
        "trace": trace.name,
        "verdict": diagnosis.verdict,
        "device": timeline.device_name or None,
        "rank": timeline.rank,
        "steps": timeline.steps,
        "window_s": timeline.window_us / 1e6,
        "step_s": timeline.step_us / 1e6 if timeline.steps else None,
        "window_note": timeline.step_note,
        "busy_share": trace.case.busy_share if len(timeline.work_rows) else None,
        "device_window_s": idle.window_us / 1e6,
        "idle_s": {cause: us / 1e6 for cause, us in idle.parts.items()},
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "harmless": [_finding(finding) for finding in diagnosis.harmless],
        "notes": [_finding(finding) for finding in diagnosis.notes],
        "silenced": [_finding(finding) for finding in diagnosis.silenced],
        "replay": {
            "usable": replay.usable,
            "why_not": replay.why_not or None,
            "measured_s": replay.measured_us / 1e6,
            "error": replay.error,
            "unrecorded_s": replay.replayed_us / 1e6,
            "event_us": replay.event_us or None,
        },
        "skew_s": timeline.skew_us / 1e6,
        "file": {
            "sound": trace.recovery.sound,
            "repairs": trace.recovery.sentences(),
            "lost_events": trace.recovery.lost,
            "slices": trace.events.count,
            "json_bytes": trace.recording.raw_bytes,
            "read_s": trace.recording.seconds,
        },
        "kernels": kernel_table(trace),
    }
    if len(trace.ranks) > 1:
        facts["ranks"] = _ranks(trace, facts)
    return facts


def _finding(finding: Finding) -> dict[str, Any]:
    place = finding.place
    return {
        "rule": finding.rule,
        "title": finding.title,
        "saves_s": finding.seconds,
        "saves_low_s": finding.low,
        "saves_high_s": finding.high,
        "saves_step_s": finding.per_step,
        "at_most": finding.at_most,
        "evidence": finding.evidence,
        "fix": finding.fix,
        "place": None
        if place is None
        else {
            "text": str(place),
            "file": place.file or None,
            "line": place.line or None,
            "exact": place.exact,
            "candidates": place.candidates,
            "function": place.function or None,
            "op": place.op or None,
            "annotation": place.annotation or None,
        },
    }


def kernel_table(trace: Trace) -> list[dict[str, Any]]:
    """Device work in the window by family: seconds, share of the work, number, and the longest kernel's name."""
    case = trace.case
    timeline = case.timeline
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    by_name: dict[int, float] = defaultdict(float)
    families: dict[int, str] = {}
    for index in case.work.tolist():
        number = int(timeline.events.name[timeline.work_rows[index]])
        what = families.get(number) or families.setdefault(number, family(timeline.events.names[number]))
        took = float(case.work_us[index])
        spent[what] += took
        count[what] += 1
        by_name[number] += took
    total = sum(spent.values())
    table = []
    for what in sorted(spent, key=lambda key: -spent[key]):
        longest = max((n for n in by_name if families[n] == what), key=lambda n: by_name[n])
        table.append(
            {
                "family": what,
                "seconds": spent[what] / 1e6,
                "share": spent[what] / total if total else 0.0,
                "count": count[what],
                "longest": timeline.events.names[longest],
            }
        )
    return table


def _ranks(trace: Trace, facts: dict[str, Any]) -> dict[str, Any]:
    """The ranks side by side; a straggler comes first in the verdict, since the others' pages show its victims."""
    ranks = compare_ranks([each.case for each in trace.ranks], [each.name for each in trace.ranks])
    slow = [each for each, row in zip(trace.ranks, ranks.rows, strict=True) if row is ranks.straggler]
    if slow:
        facts["verdict"] = f"{ranks.verdict} {facts['verdict']}"
    return {
        "rows": [vars(row) for row in ranks.rows],
        "transfer_ms": ranks.transfer_ms,
        "waiting_ms": ranks.waiting_ms,
        "straggler": ranks.straggler.name if ranks.straggler else None,
        "straggler_findings": [_finding(f) for f in slow[0].findings()]
        if slow and slow[0] is not trace
        else [],
        "reason": ranks.reason or None,
        "matched": ranks.matched,
    }
