from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hotloop.errors import HotloopError
from hotloop.runs import Record, list_runs, load_run

START_AND_DIE = """
import os, signal
from hotloop.runs import Record
record = Record.start(config={"a": 1})
record.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_runs_are_listed_oldest_first_with_how_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTLOOP_RUNS", str(tmp_path / "runs"))
    assert list_runs() == []
    died = subprocess.run(
        [sys.executable, "-c", START_AND_DIE], capture_output=True, timeout=240, env=os.environ
    )
    assert died.returncode == -signal.SIGKILL
    failed = Record.start()
    failed.finish("failed", "out of memory")
    running = Record.start()
    damaged = tmp_path / "runs" / "99999999-damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text('{"status": "fini')
    (tmp_path / "runs" / "something else").mkdir()
    found = {run.name: run for run in list_runs()}
    assert {run.status for run in found.values()} == {"died", "failed", "running", "damaged"}
    assert failed.folder is not None
    assert running.folder is not None
    one = found[failed.folder.name]
    assert (one.status, one.error) == ("failed", "out of memory")
    assert one.duration_s is not None
    assert one.duration_s >= 0
    assert found[running.folder.name].status == "running"
    in_order = [run for run in list_runs() if run.status != "damaged"]
    assert [run.status for run in in_order] == ["died", "failed", "running"]
    assert load_run(in_order[0].folder).fields["config"] == {"a": 1}
    running.finish()
    assert load_run(running.folder).summary.status == "finished"
    assert load_run(running.folder).metrics() == []


def test_what_is_no_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(HotloopError, match=r"run\.json"):
        load_run(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(HotloopError, match="no status"):
        load_run(tmp_path)
