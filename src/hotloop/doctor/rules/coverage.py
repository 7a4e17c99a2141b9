"""coverage: what the trace does not hold, so that nothing is concluded from its absence."""

from __future__ import annotations

import re

import numpy as np

from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.trace.columns import Category

__all__ = ["FEWEST", "RULE", "judge"]

FEWEST = 10  # pieces of device work; with less nothing is typical
_HEAVY = (
    r"^aten::(?:mm|bmm|addmm|baddbmm|linear|conv\w*|_convolution|matmul|mkldnn_\w+|_scaled_dot_\w*|lstm|gru)$"
)


def judge(case: Case) -> list[Finding]:
    """Notes, each without a price: a GPU that was never used, device events that are lost, a trace without a host.

    "Never used" needs a GPU in the file's header, operators, and neither device work nor launches; a GPU of which
    launches or waits are in the trace, but no work, was used, and its events are lost.
    """
    timeline = case.timeline
    events = timeline.events
    ops = events.rows(Category.OP)
    if not len(timeline.work_rows):
        return [_without_work(case)]
    if not len(ops) and not len(timeline.call_rows[timeline.launch[timeline.launch >= 0]]):
        return [
            _note(
                "Only the device was recorded: nothing can be traced back to a source line or priced.",
                [f"the device works {case.busy_share:.0%} of the time"],
                "record with ProfilerActivity.CPU as well, and with_stack=True",
            )
        ]
    if not len(ops):
        return [
            _note(
                "No operators were recorded: nothing can be traced back to a source line.",
                [f"the device works {case.busy_share:.0%} of the time"],
                "record with ProfilerActivity.CPU as well, and with_stack=True",
            )
        ]
    if len(case.work) < FEWEST:
        return [
            _note(
                f"The trace is too short to judge: {len(case.work)} pieces of device work in its window.",
                [f"the device works {case.busy_share:.0%} of {timeline.window_us / 1000:.4g} ms"],
                "record at least a few whole steps",
            )
        ]
    graphs = timeline.call_named(r"GraphLaunch")
    started = timeline.launch[case.work]
    from_graphs = float(graphs[started[started >= 0]].sum()) / len(started) if len(graphs) else 0.0
    if from_graphs > 0.5:
        notes = int(graphs[case.calls].sum())
        return [
            _note(
                "The work comes from captured graphs: the device sets the pace, and no kernel leads to a source line.",
                [f"{from_graphs:.0%} of the device's work was started by {notes} graph launches"],
                "",
            )
        ]
    if timeline.unmatched_share > 0.02:
        return [
            _note(
                f"The trace is incomplete: {timeline.unmatched_share:.0%} of the device's work has no launch.",
                ["events were dropped, or removed afterwards; findings have no seconds"],
                "record fewer steps",
            )
        ]
    return []


def _without_work(case: Case) -> Finding:
    """A trace without device work: other hardware, lost events, a GPU left alone, or a program of the CPU."""
    timeline = case.timeline
    events = timeline.events
    ops = events.rows(Category.OP)
    device = timeline.device_name
    starts = int((timeline.is_launch | timeline.is_copy).sum())
    waited = float(case.call_us[timeline.is_sync].sum())
    foreign = sorted(
        {k[2:].partition("_")[0] for k in events.counts if re.match(r"X:\w+_(?:runtime|ccp_events)", k)}
    )
    if foreign:
        return _note(
            f"The device is of a kind that these rules do not know ({', '.join(foreign)}): nothing is concluded.",
            [
                f"{len(ops)} operators, {sum(n for k, n in events.counts.items() if k.startswith('X:'))} other events"
            ],
            "",
        )
    if starts or waited > 1000.0:
        return _note(
            "The device's own events are missing: nothing can be said about it.",
            [
                f"{starts} launches and {waited / 1000:.4g} ms of waiting, but no kernel"
                + (f", on {device}" if device else "")
            ],
            "record with ProfilerActivity.CUDA, and close other profilers (CUPTI serves one at a time)",
        )
    heavy = ops[events.names_matching(_HEAVY)[events.name[ops]]] if len(ops) else ops
    if device and float(events.duration_us[heavy].sum()) > 0.25 * timeline.window_us:
        return Finding(
            RULE.id,
            f"There is a GPU ({device}), and it was never used: everything ran on the CPU.",
            [
                f"{len(ops)} operators, {len(heavy)} of them matrix products or convolutions, not one kernel or copy"
            ],
            "+ model.to('cuda'); x = x.to('cuda', non_blocking=True)",
            case.place(int(heavy[np.argmax(events.duration_us[heavy])])),
            weight_us=timeline.window_us,
        )
    if not len(ops):
        names = sorted({events.names[n] for n in np.unique(events.name[:2000])})[:3] if events.count else []
        return _note(
            "There are no PyTorch operators and no device work in this trace: nothing can be concluded.",
            [
                f"{events.count} slice{'' if events.count == 1 else 's'}"
                + (f", such as {', '.join(names)}" if names else "")
            ],
            "",
        )
    evidence = [f"{len(ops):,} operators"]
    loading = timeline.loader.clipped(*timeline.window).total
    if loading > 0.1 * timeline.window_us > 0.0:
        evidence.append(f"{loading / timeline.window_us:.0%} of the time goes by in the data loader")
    return _note(
        "No device took part: this is a recording of the CPU alone.",
        evidence,
        "`hotloop doctor --virtual-gpu SCRIPT.py` lists the lines that would make a GPU wait",
    )


def _note(title: str, evidence: list[str], fix: str) -> Finding:
    return Finding(RULE.id, title, evidence, fix, kind="note")


RULE = Rule("coverage", "what the trace does not hold", judge)
