from __future__ import annotations

import argparse
import json
import os
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.errors import HotloopError
from hotloop.hardware.processes import Processes
from hotloop.metrics import JsonLines
from hotloop.runs import Record, list_runs, load_run
from hotloop.runs import record as record_module
from hotloop.state.ring import Row


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "runs"
    monkeypatch.setenv("HOTLOOP_RUNS", str(path))
    # on a busy machine too, a run that has ended here has seen its code and packages
    monkeypatch.setattr(record_module, "_END_PATIENCE_S", 60.0)
    return path


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train it.py"
    path.write_text("print(1)\n")
    return path


def on_disk(record: Record) -> dict[str, Any]:
    assert record.folder is not None
    return json.loads((record.folder / "run.json").read_text())


def test_a_run_is_a_folder_that_says_what_ran(base: Path, script: Path) -> None:
    record = Record.start(
        config=argparse.Namespace(lr=0.1, out=Path("x")),
        settings={"precision": "bf16"},
        seed=3,
        device=torch.device("cpu"),
        script=script,
        machine={"cores": 2},
    )
    assert record.folder is not None
    assert record.folder.parent == base
    assert re.fullmatch(r"\d{8}-\d{6}-train_it-[0-9a-f]{6}", record.folder.name)
    record.wait()
    found = on_disk(record)
    assert found == record.fields
    assert found["status"] == "running"
    assert found["config"] == {"lr": 0.1, "out": "x"}
    assert found["settings"] == {"precision": "bf16"}
    assert (found["seed"], found["device"], found["machine"]) == (3, "cpu", {"cores": 2})
    assert found["script"] == str(script)
    assert found["versions"]["torch"] == torch.__version__
    assert found["packages"]["torch"]
    assert found["process"]["pid"] == os.getpid()
    assert found["ranks"] == {"world": 1, "local_world": 1}
    assert found["code"]["archive"] == "untracked.tar.gz"
    record.note("fell back to eager")
    record.update(parameters=12, best=float("nan"))
    record.finish("finished", reason="all epochs done")
    found = on_disk(record)
    assert [note["text"] for note in found["notes"]] == ["fell back to eager"]
    assert (found["parameters"], found["best"]) == (12, "NaN")
    assert (found["status"], found["reason"]) == ("finished", "all epochs done")
    assert found["ended"] >= found["started"]


def test_how_a_run_ended_is_said_once() -> None:
    record = Record.start()
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as error:
        record.finish("failed", error)
    record.finish("finished")
    found = on_disk(record)
    assert found["status"] == "failed"
    assert found["error"] == "ZeroDivisionError: by zero"
    assert "test_record.py" in found["traceback"]
    with pytest.raises(HotloopError, match="finished, failed, interrupted, stopped"):
        record.finish("done")


def test_code_beside_a_chosen_folder_is_not_taken_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Path
) -> None:
    seen: list[Path] = []

    def look(folder: Path, script: Path | None, *, ignore: Path) -> dict[str, Any]:
        seen.append(ignore)
        return {}

    monkeypatch.setattr(record_module, "capture_source", look)
    monkeypatch.chdir(tmp_path)
    for options in ({}, {"folder": "mine"}, {"folder": "out/mine"}):
        Record.start(script=script, **options).finish()  # type: ignore[arg-type]
    assert seen == [tmp_path / "runs", tmp_path / "mine", tmp_path / "out"]


def test_two_runs_at_once_have_folders_of_their_own(base: Path) -> None:
    records = [Record.start() for _ in range(5)]
    assert len({record.folder for record in records}) == 5
    for record in records:
        record.finish()
    assert len(list_runs()) == 5


def test_resume_continues_the_same_record(script: Path) -> None:
    first = Record.start(config={"a": 1}, script=script)
    assert first.metrics_path is not None
    sink = JsonLines(first.metrics_path)
    sink.write_rows([Row(0, 0.0, {"loss": 1.0})])
    sink.close()
    first.note("first")
    first.finish("interrupted", reason="SIGTERM")
    script.write_text("print(2)\n")
    second = Record.resume(first.folder or "", script=script)
    assert second.folder == first.folder
    assert second.metrics_path is not None
    sink = JsonLines(second.metrics_path)
    sink.write_rows([Row(1, 0.0, {"loss": 0.5})])
    sink.close()
    second.wait()
    found = on_disk(second)
    assert (found["status"], found["config"]) == ("running", {"a": 1})
    assert "ended" not in found
    assert "reason" not in found
    assert len(found["resumed"]) == 1
    assert (second.folder / "resumed-1" / "untracked.tar.gz").exists()
    second.note("second")
    second.finish()
    third = Record.start(folder=first.folder, config={"b": 2})
    third.finish()
    run = load_run(first.folder or "")
    assert [row["loss"] for row in run.metrics()] == [1.0, 0.5]
    assert len(run.fields["resumed"]) == 2
    assert [note["text"] for note in run.fields["notes"]] == ["first", "second"]
    assert run.summary.status == "finished"


def test_resume_of_nothing_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(HotloopError, match=re.escape(str(tmp_path))):
        Record.resume(tmp_path)
    (tmp_path / "run.json").write_text('{"a": 1}')
    with pytest.raises(HotloopError, match="no record of this form"):
        Record.resume(tmp_path)


def test_a_folder_that_cannot_be_made_disables_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOTLOOP_RUNS", str(tmp_path / "file"))
    record = Record.start()
    assert (record.folder, record.enabled, record.metrics_path) == (None, False, None)
    record.note("x")
    record.update(a=1)
    record.wait()
    record.finish()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "training goes on" in said


def test_a_disk_that_fills_up_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record.start()
    record.wait()

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_module, "write_json", full)
    record.note("x")
    record.note("y")
    record.finish()
    assert not record.enabled
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert on_disk(record)["status"] == "running"


def test_other_ranks_write_nothing_and_learn_the_folder(base: Path) -> None:
    class Second(Processes):
        def broadcast_object(self, value: Any, **options: Any) -> Any:
            assert value is None
            return "/shared/runs/one"

    record = Record.start(processes=Second(rank=1, world=2))
    assert record.folder == Path("/shared/runs/one")
    assert not record.enabled
    record.note("x")
    record.finish()
    assert not base.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_nothing() -> None:
    record = Record.start()
    record.wait()
    before = on_disk(record)
    locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        with record._lock:
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
            record.note("x")
            record.update(a=1)
            record.finish("failed")
            os._exit(0)
        finally:
            os._exit(1)
    release.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert on_disk(record) == before


def test_git_may_be_slow_without_holding_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*arguments: Any, **options: Any) -> dict[str, Any]:
        assert release.wait(60)
        return {"commit": "abc", "dirty": True}

    monkeypatch.setattr(record_module, "capture_source", slow)
    record = Record.start()  # returns, or the test's time runs out
    assert "code" not in on_disk(record)
    release.set()
    record.finish()
    assert on_disk(record)["code"] == {"commit": "abc", "dirty": True}
    assert load_run(record.folder or "").summary.dirty is True


def test_a_run_that_goes_on_is_not_written_over_by_a_late_look_at_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()

    def slow(*arguments: Any, **options: Any) -> dict[str, Any]:
        assert release.wait(60)
        return {"commit": "abc"}

    monkeypatch.setattr(record_module, "capture_source", slow)
    monkeypatch.setattr(record_module, "_END_PATIENCE_S", 0.0)
    first = Record.start()
    first.finish()
    assert "code" not in on_disk(first)
    threading.Timer(0.5, release.set).start()
    second = Record.resume(first.folder or "")
    second.wait()
    first.wait()
    found = on_disk(second)
    assert (found["status"], len(found["resumed"])) == ("running", 1)
    assert found["code"] == found["resumed"][0]["code"] == {"commit": "abc"}
