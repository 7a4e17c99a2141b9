from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hotloop.errors import HotloopError
from hotloop.metrics import JsonLines, Log, read_metrics
from hotloop.metrics import log as log_module
from hotloop.state.ring import DeviceRing, Row

CPU = torch.device("cpu")


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.batches = 0
        self.flushes = 0
        self.closed = 0
        self.threads: set[str] = set()

    def write_rows(self, rows: Sequence[Row]) -> None:
        self.batches += 1
        self.threads.add(threading.current_thread().name)
        self.rows.extend(rows)

    def flush(self) -> None:
        self.flushes += 1

    def close(self) -> None:
        self.closed += 1


def wait_for(condition: object, seconds: float = 30.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:  # type: ignore[operator]
        time.sleep(0.005)
    return bool(condition())  # type: ignore[operator]


def over_device_ring(sinks: list[Kept], capacity: int = 1024) -> Log:
    """A log whose ring goes the accelerator's way, on the CPU."""
    log = Log(CPU, sinks)
    log._ring = DeviceRing(CPU, capacity)
    log._write_row = log._ring.write
    return log


def test_the_thread_delivers_without_being_asked() -> None:
    sink = Kept()
    log = Log(CPU, [sink])
    assert log._thread is None
    for step in range(100):
        log.write(step, {"loss": torch.tensor(float(step)), "text": "x"})
    assert wait_for(lambda: len(sink.rows) == 100)
    assert sink.threads == {"hotloop-log"}
    assert [(row.step, row.values) for row in sink.rows] == [
        (s, {"loss": float(s), "text": "x"}) for s in range(100)
    ]
    log.close()


def test_flush_returns_when_all_rows_before_it_are_in_the_sinks() -> None:
    for make in (lambda sink: Log(CPU, [sink]), lambda sink: over_device_ring([sink])):
        sink = Kept()
        log = make(sink)
        for step in range(200):
            log.write(step, {"a": torch.tensor(float(step)), "b": step})
            if step % 7 == 0:
                log.flush()
                assert [row.step for row in sink.rows] == list(range(step + 1))
        log.close()
        log.close()
        assert [row.values["a"] for row in sink.rows] == [float(step) for step in range(200)]
        assert sink.closed == 1
        assert sink.flushes > 0
        assert log.dropped == 0


def test_rows_are_delivered_in_bulk_at_most_twenty_times_a_second() -> None:
    sink = Kept()
    log = Log(CPU, [sink])
    begin = time.monotonic()
    for step in range(30):
        log.write(step, {"a": 1.0})
        time.sleep(0.01)
    wait_for(lambda: len(sink.rows) == 30)
    spent_s = time.monotonic() - begin
    assert sink.batches <= spent_s / 0.05 + 1
    log.close()


def test_an_idle_log_has_no_thread_and_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_LINGER_S", 0.05)
    sink = Kept()
    logs = [Log(CPU, [sink])]
    logs[0].write(0, {"a": 1.0})
    assert wait_for(lambda: logs[0]._thread is None)
    logs[0].write(1, {"a": 1.0})
    assert wait_for(lambda: len(sink.rows) == 2)
    assert wait_for(lambda: logs[0]._thread is None)
    reference = weakref.ref(logs.pop())

    def collected() -> bool:
        gc.collect()
        return reference() is None

    assert wait_for(collected)


def test_writing_after_close_does_nothing() -> None:
    sink = Kept()
    log = Log(CPU, [sink])
    log.write(0, {"a": 1.0})
    log.close()
    log.write(1, {"a": 1.0})
    log.flush()
    assert [row.step for row in sink.rows] == [0]


def test_names_are_checked() -> None:
    log = Log(CPU, [])
    for name in ("step", "time", 3):
        with pytest.raises(HotloopError, match=repr(name)):
            log.write(0, {name: 1.0})  # type: ignore[dict-item]
    with pytest.raises(HotloopError, match="mean"):
        log.write(0, {"loss": torch.zeros(3)})
    log.close()


def test_a_failing_sink_is_said_once_counted_and_harms_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing:
        def __init__(self) -> None:
            self.failing = True
            self.rows: list[Row] = []

        def write_rows(self, rows: Sequence[Row]) -> None:
            if self.failing:
                raise OSError(28, "No space left on device")
            self.rows.extend(rows)

        def close(self) -> None:
            raise RuntimeError("cannot close either")

    failing, good = Failing(), Kept()
    log = Log(CPU, [failing, good])
    for step in range(6):
        log.write(step, {"a": 1.0})
        log.flush()
    failing.failing = False
    log.write(6, {"a": 1.0})
    log.close()
    assert [row.step for row in good.rows] == list(range(7))
    assert [row.step for row in failing.rows] == [6]
    assert log.lost == 6
    assert [type(error) for error in log.errors] == [OSError] * 6 + [RuntimeError]
    assert log.dropped == 0
    said = capsys.readouterr().err
    assert said.count("training goes on: OSError: [Errno 28] No space left on device") == 1
    assert "6 logged rows were lost" in said


def test_a_full_disk_does_not_stop_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    good = Kept()
    log = Log(CPU, [JsonLines("/dev/full"), good])
    for step in range(50):
        log.write(step, {"a": 1.0})
    log.close()
    assert log.lost == 50
    assert len(good.rows) == 50
    assert capsys.readouterr().err.count("logging to /dev/full failed") == 1


def test_overflow_is_counted_exactly_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Kept()
    log = over_device_ring([sink], capacity=16)
    with log.pause():
        for step in range(50):
            log.write(step, {"a": torch.tensor(float(step))})
    log.close()
    assert [row.values["a"] for row in sink.rows] == [float(step) for step in range(16)]
    assert log.dropped == 34
    assert "34 logged rows were dropped" in capsys.readouterr().err


def test_a_pause_keeps_the_thread_off_the_device_and_flush_does_not_hang() -> None:
    sink = Kept()
    log = over_device_ring([sink])
    log.write(0, {"a": torch.tensor(1.0)})
    log.flush()
    with log.pause():
        log.write(1, {"a": torch.tensor(2.0)})
        log.flush()  # of the pausing thread: returns, with the row still on the device
        other = threading.Thread(target=log.flush)  # of another: waits
        other.start()
        time.sleep(0.15)
        assert [row.step for row in sink.rows] == [0]
        log.flush()
        assert other.is_alive()
    other.join(30)
    assert not other.is_alive()
    assert [row.step for row in sink.rows] == [0, 1]
    log.close()


def test_a_failing_device_is_said_once_and_its_rows_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(DeviceRing):
        broken = True

        def _fetch(self, rows: list, streams: list) -> None:
            if self.broken:
                raise RuntimeError("device-side assert")
            super()._fetch(rows, streams)

    sink = Kept()
    log = Log(CPU, [sink])
    log._ring = Broken(CPU, 8)
    log._write_row = log._ring.write
    for step in range(4):
        log.write(step, {"a": torch.tensor(1.0)})
    log.flush()
    log.write(4, {"a": torch.tensor(1.0)})
    log.flush()
    log._ring.broken = False
    log.write(5, {"a": torch.tensor(1.0)})
    log.close()
    assert [row.step for row in sink.rows] == [5]
    assert log.dropped == 5
    assert capsys.readouterr().err.count("device-side assert") == 1


def test_many_threads_may_write_flush_and_close() -> None:
    sink = Kept()
    log = Log(CPU, [sink])

    def write(first: int) -> None:
        for step in range(first, first + 200):
            log.write(step, {"a": step})
            if step % 50 == 0:
                log.flush()

    threads = [threading.Thread(target=write, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert sorted(row.step for row in sink.rows) == sorted(1000 * i + j for i in range(4) for j in range(200))
    assert all(row.values["a"] == row.step for row in sink.rows)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_rows_reach_the_file_at_interpreter_exit_and_after_an_exception(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    done = run(
        """
        import sys, torch
        from hotloop.metrics import JsonLines, Log
        log = Log(torch.device("cpu"), [JsonLines(sys.argv[1])])
        for step in range(5):
            log.write(step, {"a": torch.tensor(1.0)})
        raise SystemExit("stopped")
        """,
        str(path),
    )
    assert done.returncode == 1
    assert done.stderr == "stopped\n"
    assert [row["step"] for row in read_metrics(path)] == list(range(5))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_nothing_and_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    done = run(
        """
        import os, sys, torch
        from hotloop.metrics import JsonLines, Log
        log = Log(torch.device("cpu"), [JsonLines(sys.argv[1])])
        log.write(0, {"a": 1.0})
        with log._delivery:                    # as the thread holds it while it delivers
            log.write(1, {"a": 1.0})
            child = os.fork()
        if child == 0:
            log.write(100, {"a": 1.0})
            log.flush()
            sys.exit(0)                        # runs the handlers of the interpreter's exit
        assert os.waitpid(child, 0)[1] == 0
        log.write(2, {"a": 1.0})
        """,
        str(path),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]


def test_a_killed_process_keeps_what_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    done = run(
        """
        import os, signal, sys, torch
        from hotloop.metrics import JsonLines, Log
        log = Log(torch.device("cpu"), [JsonLines(sys.argv[1])])
        for step in range(3):
            log.write(step, {"a": 1.0})
        log.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        str(path),
    )
    assert done.returncode == -9
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]
