"""What recording costs the host is taken off: a recorded program is priced as it runs unrecorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotloop.doctor import Edit, read

COST_US = 5.0
STEPS = 10


def run(machine: Any, *, recorded: bool, sync: bool, kernel: float) -> Any:
    """Twenty operators of one launch a step; a recorded one costs the host `COST_US` for itself and for its call."""
    m = machine()
    for _ in range(STEPS):
        with m.step():
            for _ in range(20):
                with m.span("aten::mul"):
                    m.think(8.0 + (2 * COST_US if recorded else 0.0))
                    m.launch(kernel)
            if sync:
                m.sync()
            m.think(60.0)
    return m


@pytest.mark.parametrize("kernel", [5.0, 16.0, 40.0])
@pytest.mark.parametrize("known", ["step_us", "event_us", "both"])
def test_a_recorded_program_is_priced_as_the_unrecorded_one(
    known: str, kernel: float, machine, tmp_path: Path
) -> None:
    before = read(run(machine, recorded=False, sync=True, kernel=kernel).write(tmp_path / "a.json"))
    after = read(run(machine, recorded=False, sync=False, kernel=kernel).write(tmp_path / "b.json"))
    trace = read(run(machine, recorded=True, sync=True, kernel=kernel).write(tmp_path / "c.json"))
    plain_us = before.case.replay.measured_us
    header = {"step_us": before.timeline.step_us, "event_us": COST_US}
    trace.header["hotloop"] = {k: v for k, v in header.items() if known in (k, "both")}
    replay = trace.case.replay
    assert replay.error == pytest.approx(0.0, abs=1e-9)
    if known == "step_us" and kernel > 5.0:
        # where the device is the limit, the step tells how much the host has to lose at least
        assert replay.event_us < COST_US
        return
    assert replay.event_us == pytest.approx(COST_US, rel=0.05)
    assert replay.replayed_us == pytest.approx(plain_us, rel=0.02)
    told = trace.what_if([Edit(drop=np.flatnonzero(trace.timeline.is_sync))])
    assert told.after_s * 1e6 == pytest.approx(after.case.replay.measured_us, rel=0.03)


def test_without_such_knowledge_the_recording_is_taken_as_it_is(machine, tmp_path: Path) -> None:
    trace = read(run(machine, recorded=True, sync=True, kernel=5.0).write(tmp_path / "a.json"))
    replay = trace.case.replay
    assert replay.event_us == 0.0
    assert replay.replayed_us == pytest.approx(replay.measured_us)


@pytest.mark.parametrize("given", [None, "x", {"step_us": "x"}, {"step_us": -1.0}, {"event_us": True}, []])
def test_a_header_that_says_nonsense_says_nothing(given: Any, machine, tmp_path: Path) -> None:
    trace = read(run(machine, recorded=True, sync=True, kernel=5.0).write(tmp_path / "a.json"))
    trace.header["hotloop"] = given
    assert trace.case.replay.event_us == 0.0
