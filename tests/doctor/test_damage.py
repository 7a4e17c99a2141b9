"""Traces with events and fields missing, moved and mixed up: told without an error, never with more than there is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hotloop.doctor import TraceError, read, report


def program(m: Any) -> None:
    with m.span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation"):
        m.think(300)
    m.copy(150, blocking=True)
    for index in range(12):
        m.think(8)
        with m.span("aten::mm", **{"External id": index}):
            m.launch(30, "ampere_sgemm_128x64_tn" if index % 2 else "vectorized_elementwise_kernel")
    m.launch(90, "ncclDevKernel_AllReduce", stream=20)
    m.item()
    with m.span("Optimizer.step#SGD.step", "user_annotation"):
        for _ in range(60):
            m.launch(2, "vectorized_elementwise_kernel")


def damaged(events: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    events = [dict(event) for event in events]
    kind = rng.choice(["drop", "category", "order", "field", "cut", "shift"])
    if kind == "drop":
        return [event for event in events if rng.random() < 0.7]
    if kind == "category":
        lost = rng.choice(sorted({event["cat"] for event in events}))
        return [event for event in events if event["cat"] != lost]
    if kind == "order":
        rng.shuffle(events)
    if kind == "field":
        field = rng.choice(["ts", "dur", "args", "tid", "pid", "name", "cat"])
        for event in events:
            if rng.random() < 0.3:
                event[field] = rng.choice([None, "x", -5, [1], {}, 1e30, 0])
    if kind == "cut":
        return events[: rng.randint(0, 40)]
    if kind == "shift":
        for event in events:
            event["ts"] += rng.uniform(-1e4, 1e4) * (event["cat"] == "kernel")
    return events


def test_damage_is_survived_and_savings_stay_below_the_whole(machine, tmp_path: Path) -> None:
    rng = random.Random(0)
    m = machine()
    for _ in range(6):
        with m.step():
            program(m)
    path = tmp_path / "a.json"
    told = 0
    for _ in range(80):
        path.write_text(json.dumps({**m.header, "traceEvents": damaged(m.events, rng)}))
        try:
            trace = read(path)
        except TraceError:
            continue
        facts = report.gather_facts(trace)
        json.dumps(facts, allow_nan=False)
        assert report.format_page(facts)
        assert report.make_html(trace, facts)
        assert report.make_overlay(trace)
        whole = facts["replay"]["measured_s"]
        assert sum(finding["saves_s"] or 0.0 for finding in facts["findings"]) <= whole * 1.0001
        idle = sum(facts["idle_s"].values()) + (facts["busy_share"] or 0.0) * facts["device_window_s"]
        assert abs(idle - facts["device_window_s"]) <= 1e-9 + 1e-6 * facts["device_window_s"]
        told += 1
    assert told > 60
