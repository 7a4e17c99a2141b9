"""Reports that were kept: beside the record of the run that was watched, or as what `--json` printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotloop.doctor.trace.stream import TraceError
from hotloop.errors import HotloopError
from hotloop.runs.environment import identify_process
from hotloop.runs.jsonfile import write_json
from hotloop.runs.list import list_runs, load_run
from hotloop.runs.record import RECORD_FILE, runs_folder

__all__ = ["REPORT_FILE", "keep_in_runs", "load_report"]

REPORT_FILE = "doctor.json"
_LARGEST_BYTES = 16 * 2**20


def keep_in_runs(facts: Mapping[str, Any]) -> list[Path]:
    """Write a report beside the records of the runs that this process has kept; returns the files."""
    me = identify_process()
    written = []
    for run in list_runs():
        try:
            mine = load_run(run.folder).fields.get("process") == me
        except HotloopError:
            continue
        if mine:
            write_json(run.folder / REPORT_FILE, dict(facts))
            written.append(run.folder / REPORT_FILE)
    return written


def load_report(name: str) -> dict[str, Any] | None:
    """The report that `name` stands for: a run's folder or name, or a file that `--json` wrote; None if it is a trace.

    Raises:
        TraceError: it is a run that no doctor has watched.
    """
    for path in (Path(name), runs_folder() / name):
        if (path / RECORD_FILE).is_file():
            if not (path / REPORT_FILE).is_file():
                raise TraceError(
                    f"the run {path.name} has no doctor's report: `hotloop doctor {_script(path)}` leaves one"
                )
            path = path / REPORT_FILE
        if path.is_file() and path.suffix == ".json" and path.stat().st_size < _LARGEST_BYTES:
            return _as_report(path)
    return None


def _script(folder: Path) -> str:
    try:
        return load_run(folder).summary.script or "SCRIPT"
    except HotloopError:
        return "SCRIPT"


def _as_report(path: Path) -> dict[str, Any] | None:
    with path.open("rb") as file:
        # a trace may be long: its head shows already that it is none of these
        if b'"verdict"' not in file.read(4096):
            return None
    try:
        facts = json.loads(path.read_bytes())
    except ValueError:
        return None
    needed = ("version", "verdict", "findings", "kernels", "replay")
    return facts if isinstance(facts, dict) and all(key in facts for key in needed) else None
