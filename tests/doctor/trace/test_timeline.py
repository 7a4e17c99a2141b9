from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotloop.doctor import read
from hotloop.doctor.trace import part_idle


def test_work_is_joined_to_its_calls_and_operators(machine, tmp_path: Path) -> None:
    m = machine()
    with m.span("aten::linear"), m.span("aten::addmm"):
        m.launch(50)
    m.think(5)
    m.launch(20)
    timeline = read(m.write(tmp_path / "a.json")).timeline
    assert timeline.launch.tolist() == [0, 1]
    row = int(timeline.call_rows[0])
    assert timeline.events.name_of(timeline.op_of(row)) == "aten::addmm"
    assert timeline.events.name_of(timeline.outermost_op(row)) == "aten::linear"
    assert timeline.op_of(int(timeline.call_rows[1])) == -1
    assert timeline.unmatched_share == 0


def test_repeated_correlations_go_to_the_call_before(machine, tmp_path: Path) -> None:
    m = machine()
    m.launch(5)
    m.think(100)
    m.correlation = 0
    m.launch(5)
    assert read(m.write(tmp_path / "a.json")).timeline.launch.tolist() == [0, 1]


def test_kernels_of_a_graph_share_its_launch(traces: Path) -> None:
    (path,) = (traces / "repairs").glob("14_*")
    assert read(path).timeline.launch.tolist() == [0] * 5


def test_skew_moves_the_device(machine, tmp_path: Path) -> None:
    m = machine()
    for _ in range(20):
        m.launch(10)
        m.think(20)
    for event in m.events:
        if event["cat"] == "kernel":
            event["ts"] -= 95
    timeline = read(m.write(tmp_path / "a.json")).timeline
    assert timeline.skew_us == pytest.approx(95 - m.delay_us)
    assert (timeline.work_start >= timeline.call_start).all()


def test_steps_leave_out_warm_up_and_stubs(machine, tmp_path: Path) -> None:
    m = machine()
    for number in range(6):
        with m.step():
            m.think(10_000 if number == 0 else 100)
            m.launch(50)
    m.events.append(
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "ProfilerStep#7",
            "pid": 10,
            "tid": 1,
            "ts": m.now,
            "dur": 3,
        }
    )
    timeline = read(m.write(tmp_path / "a.json")).timeline
    assert timeline.steps == 5
    assert timeline.step_us == pytest.approx(104)
    assert timeline.step_note == "5 steady steps (1 left out: warming up)"


def test_steps_from_the_optimizer_where_none_are_marked(machine, tmp_path: Path) -> None:
    m = machine()
    for _ in range(4):
        m.think(100)
        m.launch(50)
        with m.span("Optimizer.step#SGD.step", "user_annotation"):
            m.launch(5)
    assert read(m.write(tmp_path / "a.json")).timeline.steps == 2


def test_work_from_before_the_recording_is_no_missing_launch(machine, tmp_path: Path) -> None:
    m = machine()
    for _ in range(10):
        m.launch(200)
    m.events = [event for event in m.events if event["args"]["correlation"] > 3 or event["cat"] == "kernel"]
    timeline = read(m.write(tmp_path / "a.json")).timeline
    assert timeline.prologue.tolist() == [True] * 3 + [False] * 7
    assert timeline.unmatched_share == 0


def test_idle_time_is_parted_to_all_of_it(machine, tmp_path: Path) -> None:
    m = machine()
    for _ in range(5):
        with m.step():
            with m.span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation"):
                m.think(300)
            m.launch(100)
            m.item()
            m.think(40)
            m.launch(100)
    idle = read(m.write(tmp_path / "a.json")).idle
    assert idle.busy_us + sum(idle.parts.values()) == pytest.approx(idle.window_us)
    assert idle.cause.count("loader") == 4
    # the loader starts while the second kernel of the step before still runs
    assert idle.parts["loader"] == pytest.approx(4 * (300 - 102), rel=0.02)
    assert idle.parts["after-sync"] == pytest.approx(4 * (40 + 4 + 2), rel=0.1)


def test_the_union_of_streams_counts_once(machine, tmp_path: Path) -> None:
    m = machine()
    for _ in range(10):
        m.launch(100, stream=7)
        m.launch(100, stream=9)
        m.think(150)
    trace = read(m.write(tmp_path / "a.json"))
    assert trace.case.busy_share < 0.75
    assert trace.timeline.busy.total == pytest.approx(10 * 104)


def test_every_real_trace_is_parted_to_all_of_it(traces: Path) -> None:
    from hotloop.doctor.trace.reading import read_recordings
    from hotloop.doctor.trace.stream import TraceError
    from hotloop.doctor.trace.timeline import Timeline

    for path in sorted(p for p in traces.rglob("*json*") if p.is_file()):
        try:
            recordings = read_recordings(path)
        except TraceError:
            continue
        idle = part_idle(Timeline(recordings[0]))
        total = idle.busy_us + sum(idle.parts.values())
        assert total == pytest.approx(idle.window_us, rel=1e-6, abs=1e-3), path.name
        assert min(idle.parts.values(), default=0.0) >= -1e-6
        assert np.all(idle.gaps.end > idle.gaps.start)


def test_of_two_recordings_in_one_file_the_longer_is_taken(machine, tmp_path: Path) -> None:
    m = machine()
    for number, pause in ((10, 0), (11, 0), (12, 0), (40, 10**6), (41, 0), (42, 0), (43, 0)):
        m.think(pause)
        with m.span(f"ProfilerStep#{number}", "user_annotation"):
            for _ in range(10):
                m.think(20)
                m.launch(10)
    timeline = read(m.write(tmp_path / "a.json")).timeline
    assert timeline.step_note == "3 steady steps (1 left out: warming up)"
    assert timeline.step_us == pytest.approx(240)
