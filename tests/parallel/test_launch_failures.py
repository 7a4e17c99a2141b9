from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from hotloop.parallel.failures import describe_failures, read_failures
from hotloop.parallel.shim import is_echo


def _rank(
    folder: Path, rank: int, code: int, time_ns: int, note: dict[str, Any] | None = None, **end: Any
) -> None:
    place = folder / f"rank{rank}"
    place.mkdir()
    record = {
        "rank": rank,
        "pid": 1,
        "code": code,
        "time_ns": time_ns,
        "stopped_by": 0,
        "killed": False,
    } | end
    (place / "end.json").write_text(json.dumps(record))
    if note is not None:
        (place / "failure.json").write_text(
            json.dumps({"kind": "E", "echo": False, "interrupt": False} | note)
        )
        (place / "traceback.txt").write_text(f"Traceback of {rank}\n")


def test_the_earliest_exception_is_the_cause(tmp_path: Path) -> None:
    _rank(tmp_path, 0, 1, 50, {"time_ns": 20})
    _rank(tmp_path, 1, 1, 40, {"time_ns": 10})
    _rank(tmp_path, 2, 0, 60)
    assert [failure.rank for failure in read_failures(tmp_path)] == [1, 0]


def test_an_echo_is_not_the_cause_even_if_it_was_noted_sooner(tmp_path: Path) -> None:
    # rank 1 takes its process group down in a `finally`, before its exception reaches the shim
    _rank(tmp_path, 0, 1, 50, {"time_ns": 9, "echo": True})
    _rank(tmp_path, 1, 1, 40, {"time_ns": 10})
    assert [failure.rank for failure in read_failures(tmp_path)] == [1, 0]


def test_a_kill_comes_before_its_echoes_and_the_agents_kills_after_them(tmp_path: Path) -> None:
    _rank(tmp_path, 0, 1, 50, {"time_ns": 11, "echo": True})
    _rank(tmp_path, 1, -signal.SIGKILL, 10)
    _rank(tmp_path, 2, -signal.SIGTERM, 30, stopped_by=signal.SIGTERM)
    failures = read_failures(tmp_path)
    assert [failure.rank for failure in failures] == [1, 0, 2]
    assert failures[0].exit_code == 137
    text = describe_failures(failures, 3)
    assert text.count("\n") == 1
    assert "rank 1 of 3 failed first, with signal SIGKILL" in text
    assert "then rank 0: E, rank 2: signal SIGTERM" in text


def test_only_the_first_traceback_is_told(tmp_path: Path) -> None:
    for rank in range(12):
        _rank(tmp_path, rank, 3, 100, {"time_ns": 50 - rank})
    (tmp_path / "rank11" / "traceback.txt").write_text("[rank11]: Traceback\n[rank11]:   line\n[rank11]:\n")
    lines = describe_failures(read_failures(tmp_path), 12).splitlines()
    assert lines[:3] == ["Traceback", "  line", ""]
    assert lines[3].startswith(
        "hotloop launch: rank 11 of 12 failed first, with exit code 3 (above); then rank 10: E"
    )
    assert lines[3].endswith(", 3 more")
    assert len(lines) == 4


def test_what_counts_as_an_echo() -> None:
    class DistError(RuntimeError):
        pass

    assert is_echo(DistError("any"))
    assert is_echo(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1"))
    assert not is_echo(ConnectionResetError("Connection reset by peer"))
    assert not is_echo(KeyError("x"))
    consequence = ValueError("so I give up")
    consequence.__cause__ = DistError("lost")
    assert is_echo(consequence)
