"""A watch's two windows as one trace: prices from the one without stacks, lines and silencing from the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotloop.doctor.live.windows import Notes, read_windows
from hotloop.stalls import Sync


def windows(machine: Any, folder: Path, comment: str = "") -> tuple[list[Path], Path]:
    """A loop that reads a value each step: recorded without and with Python frames."""
    source = folder / "train.py"
    source.write_text(f"def step():\n    forward()\n    first.item()\n    second.item(){comment}\n")
    files = []
    for stacks in (False, True):
        m = machine()
        for _ in range(8):
            with m.step():
                for _ in range(10):
                    m.think(3)
                    m.launch(40)
                if stacks:
                    with (
                        m.span(f"{source}(1): step", "python_function"),
                        m.span("<built-in method item of Tensor object at 0x1>", "python_function"),
                    ):
                        m.item()
                else:
                    m.item()
                m.think(200)
        files.append(m.write(folder / f"window{int(stacks)}.json"))
    return files, source


@pytest.mark.parametrize("seen", [True, False])
def test_the_hooks_line_decides_between_candidates(seen: bool, machine, tmp_path: Path) -> None:
    files, source = windows(machine, tmp_path)
    syncs = [Sync(str(source), 4, "second.item()")] if seen else []
    trace = read_windows(files, Notes(syncs=syncs), "train.py")
    assert trace is not None
    (finding,) = trace.findings()
    assert finding.rule == "host-sync"
    assert finding.per_step == pytest.approx(200e-6, rel=0.25)
    assert finding.place is not None
    assert (finding.place.exact, finding.place.line) == ((True, 4) if seen else (False, 1))
    assert finding.place.candidates == [3, 4]


def test_a_comment_silences_what_a_watch_found(machine, tmp_path: Path) -> None:
    files, _ = windows(machine, tmp_path, comment="  # hotloop: ignore[host-sync]")
    trace = read_windows(files, Notes(), "train.py")
    assert trace is not None
    assert trace.findings() == []
    assert [finding.rule for finding in trace.diagnosis.silenced] == ["host-sync"]
    assert not trace.diagnosis.verdict.startswith("The host waits")


def test_one_window_alone_is_read(machine, tmp_path: Path) -> None:
    files, _ = windows(machine, tmp_path)
    trace = read_windows(files[:1], Notes(step_us=500.0), "train.py")
    assert trace is not None
    assert trace.name == "train.py"
    assert trace.timeline.pace.step_us == 500.0
    assert read_windows([], Notes(), "train.py") is None
