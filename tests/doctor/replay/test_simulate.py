"""The replay against programs that are run both ways on a machine whose times are exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotloop.doctor import Edit, TraceError, read
from hotloop.doctor.trace.intervals import Spans


def ran(machine: Any, program: Callable[[Any], None], steps: int = 8) -> Any:
    m = machine()
    for _ in range(steps):
        with m.step():
            program(m)
    return m


def window_of(m: Any, path: Path) -> tuple[Any, float]:
    trace = read(m.write(path))
    return trace, trace.case.replay.measured_us


def test_the_unedited_replay_is_the_measured_time(machine, tmp_path: Path) -> None:
    def program(m: Any) -> None:
        for _ in range(20):
            m.think(3)
            m.launch(12)
        m.copy(40, blocking=True)
        m.launch(30, stream=9)
        m.item()

    trace = read(ran(machine, program).write(tmp_path / "a.json"))
    assert trace.case.replay.usable
    assert abs(trace.case.replay.error) < 1e-6


@pytest.mark.parametrize(("kernel", "think"), [(10, 20), (40, 5), (15, 12), (100, 1)])
def test_removing_syncs_takes_as_long_as_the_program_without_them(
    kernel: float, think: float, machine, tmp_path: Path
) -> None:
    def program(m: Any, sync: bool) -> None:
        for index in range(20):
            m.think(think)
            m.launch(kernel)
            if index % 5 == 4 and sync:
                m.sync()

    trace, before = window_of(ran(machine, lambda m: program(m, True), 10), tmp_path / "a.json")
    _, after = window_of(ran(machine, lambda m: program(m, False), 10), tmp_path / "b.json")
    syncs = np.flatnonzero(trace.timeline.is_sync)
    told = trace.what_if([Edit(drop=syncs)])
    # the windows begin with the first step's work still queued, a little more of it in one than in the other
    assert told.before_s * 1e6 == pytest.approx(before)
    assert told.after_s * 1e6 == pytest.approx(after, rel=0.03)


def test_a_stall_behind_a_busy_device_saves_nothing(machine, tmp_path: Path) -> None:
    def program(m: Any) -> None:
        m.launch(1000)
        m.launch(1000)
        m.correlation += 1
        # waits for the first kernel only, while the second one keeps the device busy
        end = m.free[7] - 1001 + 2
        m._add("cuda_runtime", "cudaEventSynchronize", m.now, end - m.now, correlation=m.correlation)
        m.now = end

    trace = read(ran(machine, program).write(tmp_path / "a.json"))
    syncs = np.flatnonzero(trace.timeline.is_sync)
    assert trace.case.replay.waited_us(syncs) > 6000
    assert trace.what_if([Edit(unblock=syncs)]).saved_s * 1e6 < 40


def test_loading_in_workers_takes_as_long_as_a_program_without_loading(machine, tmp_path: Path) -> None:
    def program(m: Any, load: float) -> None:
        with m.span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation"):
            m.think(load)
        for _ in range(10):
            m.think(2)
            m.launch(25)

    trace, before = window_of(ran(machine, lambda m: program(m, 400)), tmp_path / "a.json")
    _, after = window_of(ran(machine, lambda m: program(m, 0)), tmp_path / "b.json")
    told = trace.what_if([Edit(host=(trace.timeline.loader, 0.0))])
    assert told.after_s * 1e6 == pytest.approx(after, rel=0.03)
    # subtracting the loader's time would be wrong: much of it was hidden
    assert told.saved_s * 1e6 < 0.8 * 400 * 7
    assert told.saved_s * 1e6 == pytest.approx(before - after, rel=0.1)


def test_a_faster_host_meets_the_device_as_its_limit(machine, tmp_path: Path) -> None:
    def program(m: Any) -> None:
        for _ in range(50):
            m.think(10)
            m.launch(6)

    trace = read(ran(machine, program).write(tmp_path / "a.json"))
    everything = Edit(host=(Spans([0.0], [1e9]), 0.0))
    told = trace.what_if([everything])
    assert told.after_s * 1e6 >= trace.timeline.busy.clipped(*trace.timeline.window).total * 0.99
    assert told.after_s < 0.6 * told.before_s


def test_shorter_kernels_save_only_where_the_device_is_the_limit(machine, tmp_path: Path) -> None:
    def program(m: Any, kernel: float) -> None:
        for _ in range(20):
            m.think(2)
            m.launch(kernel)

    slow, _ = window_of(ran(machine, lambda m: program(m, 40)), tmp_path / "a.json")
    _, fast = window_of(ran(machine, lambda m: program(m, 20)), tmp_path / "b.json")
    work = np.arange(len(slow.timeline.work_rows))
    assert slow.what_if([Edit(work=(work, 0.5))]).after_s * 1e6 == pytest.approx(fast, rel=0.15)
    late, _ = window_of(ran(machine, lambda m: program(m, 3)), tmp_path / "c.json")
    work = np.arange(len(late.timeline.work_rows))
    assert late.what_if([Edit(work=(work, 0.5))]).saved_s < 0.02 * late.what_if([]).before_s


def test_copies_on_a_stream_of_their_own_overlap(machine, tmp_path: Path) -> None:
    def program(m: Any, apart: bool) -> None:
        m.copy(300, blocking=not apart, stream=9 if apart else 7)
        for _ in range(5):
            m.launch(100)

    trace, before = window_of(ran(machine, lambda m: program(m, False)), tmp_path / "a.json")
    _, after = window_of(ran(machine, lambda m: program(m, True)), tmp_path / "b.json")
    calls = np.flatnonzero(trace.timeline.is_copy)
    told = trace.what_if([Edit(unblock=calls, free=(trace.timeline.first_work[calls],))])
    assert told.saved_s * 1e6 == pytest.approx(before - after, rel=0.2)
    assert told.after_s * 1e6 >= 7 * 500


def test_work_without_launches_is_not_priced(machine, tmp_path: Path) -> None:
    m = machine()
    for _ in range(30):
        m.launch(20)
    lost = {12, 17, 23}
    m.events = [e for e in m.events if e["cat"] == "kernel" or e["args"]["correlation"] not in lost]
    replay = read(m.write(tmp_path / "a.json")).case.replay
    assert not replay.usable
    assert "10% of the device's work has no launch" in replay.why_not


def test_a_large_skew_is_not_priced(machine, tmp_path: Path) -> None:
    m = machine()
    for _ in range(30):
        m.launch(20)
    for event in m.events:
        event["ts"] -= 5000 * (event["cat"] == "kernel")
    assert "clocks" in read(m.write(tmp_path / "a.json")).case.replay.why_not


def test_a_trace_without_work_cannot_be_replayed(machine, tmp_path: Path) -> None:
    m = machine()
    with m.span("aten::add"):
        m.think(5)
    with pytest.raises(TraceError, match="no device work"):
        read(m.write(tmp_path / "a.json")).what_if([])


def test_an_unknown_finding_is_named_with_those_there_are(machine, tmp_path: Path) -> None:
    m = machine()
    for _ in range(30):
        m.launch(20)
    with pytest.raises(TraceError, match=r"no finding 'fusion' to fix in .*; there are: none"):
        read(m.write(tmp_path / "a.json")).what_if(["fusion"])


def test_real_traces_are_recreated(traces: Path) -> None:
    from hotloop.doctor.trace.stream import TraceError as Refused

    errors = []
    for path in sorted(
        p for p in traces.rglob("*json*") if p.is_file() and p.parent.name not in ("repairs", "odd")
    ):
        try:
            replay = read(path).case.replay
        except Refused:
            continue
        if (
            replay.measured_us > 0
            and len(replay.timeline.work_rows)
            and replay.timeline.unmatched_share <= 0.02
        ):
            errors.append(abs(replay.error))
    assert len(errors) >= 30
    assert np.mean(np.array(errors) <= 0.02) >= 0.95


PAIRS = [("2d19c63", "7bd25bd"), ("d3fb407", "29dba67")]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_real_loader_fix_is_predicted(before: str, after: str, traces: Path) -> None:
    folder = traces / "pytorch__kineto" / "_history"
    slow = read(next((folder / before).rglob("*.gz")))
    fast = read(next((folder / after).rglob("*.gz")))
    real = fast.case.replay.measured_us / fast.timeline.steps / 1e6
    assert slow.what_if(["data-loading"]).step_after_s == pytest.approx(real, rel=0.05)
