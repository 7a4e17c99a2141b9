from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hotloop.doctor.live import pace
from hotloop.doctor.live.pace import Cost, RecordingCost, StepClock
from hotloop.doctor.live.recorder import without_notices


def test_a_hiccup_is_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.010, 0.022, 0.500, 0.510])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = StepClock()
    for _ in range(5):
        clock.mark()
    # 10, 12 and 10 ms; one of 478 ms is left out
    assert clock.step_us() == pytest.approx((10_000 + 12_000 + 10_000) / 3)


def test_two_marks_are_no_pace() -> None:
    clock = StepClock()
    assert clock.step_us() is None
    clock.mark()
    clock.mark()
    assert clock.step_us() is None


def test_the_cost_is_what_recording_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing is measured; with one, two events for each operator and its launch."""
    monkeypatch.setattr(RecordingCost, "known", None)
    cost = RecordingCost()
    cost.before()
    assert cost.after(last=True) is None
    seen: list[str | None] = []

    def recorded() -> tuple[float, float]:
        seen.append(os.environ.get("TEARDOWN_CUPTI"))
        return 17.0, 11.5

    monkeypatch.setattr(pace, "_time_recorded", recorded)
    cost._plain = (7.0, 10.0)
    assert cost.after(last=True) == Cost(event_us=5.0, kernel_us=1.5)
    assert cost.after(last=False) == Cost(event_us=5.0, kernel_us=1.5)
    assert seen == ["1", None]
    assert "TEARDOWN_CUPTI" not in os.environ
    # once for a process
    cost._plain = (20.0, 12.0)
    assert cost.after(last=False) == Cost(event_us=5.0, kernel_us=1.5)
    RecordingCost.known = None
    assert cost.after(last=False) == Cost(0.0, 0.0)


def test_only_the_profilers_notices_are_kept_off_stderr(tmp_path: Path) -> None:
    kept = os.dup(2)
    with (tmp_path / "stderr").open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            with without_notices():
                os.write(2, b"USDT:2026-11-29 x.cpp:52] profiler_start\nthe program's own\n")
            os.write(2, b"after\n")
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    assert (tmp_path / "stderr").read_text() == "the program's own\nafter\n"
