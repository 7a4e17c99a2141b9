from __future__ import annotations

import io
import os
import sys
import threading
import time
import types
import warnings
from typing import Any

import pytest

from hotloop.metrics import Progress, Sink
from hotloop.metrics import progress as progress_module
from hotloop.state.ring import Row


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and what would stand on its lines."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines = []
        for line in self.getvalue().split("\n"):
            cells: list[str] = []
            column = 0
            text = line.replace("\x1b[32m", "").replace("\x1b[0m", "")
            for character in text:
                if character == "\r":
                    column = 0
                    continue
                cells[column : column + 1] = [character]
                column += 1
            lines.append("".join(cells).rstrip())
        return lines


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOTLOOP_PROGRESS", "NO_COLOR", "TERM", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def wait_for(condition: Any, seconds: float = 30.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.005)
    return bool(condition())


def test_it_is_a_sink() -> None:
    assert isinstance(Progress(enabled=False), Sink)


def test_the_line_moves_on_a_terminal_without_any_log() -> None:
    stream = Terminal()
    updates = 0
    progress = Progress(stream, clock=lambda: (updates, 1))
    progress.set_totals(total_updates=400, total_epochs=4)
    assert "epoch 2/4  0/400 0%" in stream.screen()[-1]
    updates = 100
    assert wait_for(lambda: "100/400 25%" in stream.screen()[-1])
    assert "steps/s" in stream.screen()[-1]
    assert "left" in stream.screen()[-1]
    progress.write_rows([Row(99, 0.0, {"loss": 0.123456, "stage": "warm"}), Row(100, 0.0, {"accuracy": 0.5})])
    assert wait_for(lambda: "loss 0.1235  stage warm  accuracy 0.5" in stream.screen()[-1])
    updates = 400
    progress.close()
    progress.close()
    lines = stream.screen()
    assert len(lines) == 2
    assert lines[1] == ""
    assert "400/400 100%" in lines[0]
    assert "left" not in lines[0]
    assert lines[0].startswith("[############]")


@pytest.mark.parametrize("columns", [10, 40, 80, 120])
def test_the_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    progress = Progress(stream, clock=lambda: (12_345, 3))
    progress.write_rows([Row(1, 0.0, {f"metric{i}": float(i) for i in range(30)})])
    assert wait_for(lambda: "epoch 4" in stream.getvalue())
    progress.close()
    assert all(len(line) < columns for line in stream.screen())


def test_a_redraw_leaves_nothing_of_a_longer_line() -> None:
    stream = Terminal()
    progress = Progress(stream, clock=lambda: (1, 0))
    progress.write_rows([Row(1, 0.0, {"text": "a long text here"})])
    assert wait_for(lambda: "a long text here" in stream.screen()[-1])
    progress.write_rows([Row(2, 0.0, {"text": "b"})])
    assert wait_for(lambda: "text b" in stream.screen()[-1])
    assert "long" not in stream.screen()[-1]
    progress.close()


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value, coloured in ((None, "", True), ("NO_COLOR", "1", False), ("TERM", "dumb", False)):
        with monkeypatch.context() as patch:
            if variable:
                patch.setenv(variable, value)
            stream = Terminal()
            progress = Progress(stream, clock=lambda: (1, 0))
            progress.set_totals(total_updates=2)
            progress.close()
            assert ("\x1b" in stream.getvalue()) == coloured


def test_print_comes_above_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Terminal()
    progress = Progress(stream, clock=lambda: (5, 0))
    progress.print("before", "it", sep="-", file=stream)
    progress.start()
    assert wait_for(lambda: "5 steps" in stream.screen()[-1])
    progress.print("hello", 1, file=stream)
    lines = stream.screen()
    assert lines[0] == "before-it"
    assert lines[1] == "hello 1"
    assert "5 steps" in lines[2]
    progress.close()
    progress.print("after")
    assert capsys.readouterr().out == "after\n"


def test_elsewhere_plain_lines_come_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_PLAIN_PERIODS_S", (0.02, 0.05, 0.1))
    stream = io.StringIO()
    updates = 0

    def clock() -> tuple[int, int]:
        nonlocal updates
        updates += 1
        return updates, 0

    progress = Progress(stream, clock=clock)
    progress.set_totals(total_updates=10_000)
    assert stream.getvalue() == ""
    assert wait_for(lambda: stream.getvalue().count("\n") >= 3)
    progress.close()
    text = stream.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    assert all("/10,000 0%" in line for line in text.splitlines())


def test_a_short_run_in_a_pipe_says_one_final_line() -> None:
    stream = io.StringIO()
    progress = Progress(stream, clock=lambda: (20, 1))
    progress.set_totals(total_updates=20, total_epochs=2)
    progress.write_rows([Row(19, 0.0, {"loss": 1.0})])
    progress.end()
    progress.close()
    assert stream.getvalue().startswith("epoch 2/2  20/20 100%")
    assert stream.getvalue().count("\n") == 1


def test_after_its_end_the_line_starts_again() -> None:
    stream = Terminal()
    updates = 1
    progress = Progress(stream, clock=lambda: (updates, 0))
    progress.start()
    progress.end()
    updates = 2
    progress.start()
    progress.close()
    progress.start()
    assert [line.split(" step")[0] for line in stream.screen()] == ["1", "2", ""]


def test_without_a_total_there_is_count_and_rate_but_no_time_left() -> None:
    progress = Progress(io.StringIO(), clock=lambda: (50, 0), samples=lambda: 3200)
    progress.start()
    progress.line()
    time.sleep(0.01)
    line = progress.line()
    assert line.startswith("50 steps  0.0 steps/s  0.0 samples/s")
    assert "left" not in line
    progress.close()


def test_a_run_that_is_over_before_a_line_was_due_tells_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0, 0, 0]
    monkeypatch.setattr(progress_module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    stream = io.StringIO()
    progress = Progress(stream, clock=lambda: (int(now[1]), 0), samples=lambda: int(now[2]))
    progress.set_totals(100)
    now[:] = [12.0, 100, 3200]
    progress.close()
    # 100 steps and 3,200 samples in two seconds
    assert stream.getvalue().split("  ")[:3] == ["100/100 100%", "50.0 steps/s", "1600 samples/s"]


def test_without_a_clock_the_logged_step_is_shown() -> None:
    progress = Progress(io.StringIO())
    progress.write_rows([Row(41, 0.0, {})])
    assert progress.line().startswith("41 steps")
    progress.close()


@pytest.mark.parametrize("value", ["0", "off", "False", " no "])
def test_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOTLOOP_PROGRESS", value)
    stream = Terminal()
    progress = Progress(stream, clock=lambda: (1, 0))
    progress.set_totals(total_updates=2)
    progress.write_rows([Row(0, 0.0, {"a": 1.0})])
    progress.print("x", file=stream)
    progress.close()
    assert stream.getvalue() == "x\n"
    assert Progress(stream, enabled=True).enabled


def test_a_broken_stream_or_clock_stops_the_line_not_the_run() -> None:
    def broken() -> tuple[int, int]:
        raise RuntimeError("no clock")

    for stream, clock in ((Terminal(), broken), (Terminal(), lambda: (1, 0))):
        progress = Progress(stream, clock=clock)
        stream.close()
        progress.set_totals(total_updates=2)
        progress.write_rows([Row(0, 0.0, {"a": 1.0})])
        progress.close()
        assert progress._thread is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_draw_and_does_not_hang() -> None:
    stream = Terminal()
    progress = Progress(stream, clock=lambda: (1, 0))
    locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        with progress._lock:
            locked.set()
            release.wait(60)

    thread = threading.Thread(target=hold)  # does not exist in the child, where the lock stays taken
    thread.start()
    assert locked.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads, which is the point here
        child = os.fork()
    if child == 0:
        try:
            progress.set_totals(total_updates=3)
            progress.write_rows([Row(0, 0.0, {"a": 1.0})])
            progress.print("child", file=io.StringIO())
            progress.close()
            os._exit(0 if stream.getvalue() == "" else 1)
        finally:
            os._exit(2)
    release.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_in_a_notebook_one_output_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, dict[str, str]]] = []

    class Handle:
        def update(self, bundle: dict[str, str], raw: bool) -> None:
            shown.append(("update", bundle))

    def display(bundle: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(("display", bundle))
        return Handle()

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    ipython.display = types.SimpleNamespace(display=display)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    updates = 0
    progress = Progress(clock=lambda: (updates, 0))
    progress.set_totals(total_updates=10)
    progress.write_rows([Row(0, 0.0, {"note": "<b>"})])
    updates = 10
    progress.close()
    assert [kind for kind, _ in shown].count("display") == 1
    assert shown[0][0] == "display"
    last = shown[-1][1]
    assert last["text/plain"].startswith("10/10 100%")
    assert 'value="10" max="10"' in last["text/html"]
    assert "&lt;b&gt;" in last["text/html"]


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert not progress_module._in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not progress_module._in_notebook()
    assert "IPython" not in sys.modules
