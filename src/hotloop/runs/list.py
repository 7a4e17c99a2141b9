"""What was run: the records in a folder, and how each ended, also those that had no time to say so."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.errors import HotloopError
from hotloop.metrics.jsonlines import read_metrics
from hotloop.runs.environment import process_lives
from hotloop.runs.record import METRICS_FILE, RECORD_FILE, runs_folder

__all__ = ["Run", "RunSummary", "list_runs", "load_run"]


@dataclass(frozen=True)
class RunSummary:
    """One run in a line.

    Attributes:
        folder: where its record is.
        name: the folder's name.
        status: "running", "finished", "failed", "interrupted", "stopped"; "died" if it never said how it
            ended and its process is gone; "damaged" if its record cannot be read.
        script: the file that ran; None in a notebook.
        started: time of the start (UTC, ISO 8601); empty if damaged.
        ended: time of the end; None if it never said.
        duration_s: seconds from start to end; None without an end.
        commit: git commit of the code; None outside git.
        dirty: whether the code differed from it; None if not known.
        error: text of the error that ended it.
    """

    folder: Path
    name: str
    status: str
    script: str | None = None
    started: str = ""
    ended: str | None = None
    duration_s: float | None = None
    commit: str | None = None
    dirty: bool | None = None
    error: str | None = None


@dataclass(frozen=True)
class Run:
    """A run's whole record: `summary`, and `fields` as `run.json` has them."""

    summary: RunSummary
    fields: dict[str, Any]

    def metrics(self) -> list[dict[str, Any]]:
        """Rows logged by the run, oldest first (see `read_metrics`); none if it logged nothing."""
        path = self.summary.folder / METRICS_FILE
        return read_metrics(path) if path.exists() else []


def list_runs(base: str | os.PathLike[str] | None = None) -> list[RunSummary]:
    """The runs kept in `base` (default: `runs_folder()`), oldest first; none if there is no such folder."""
    folder = runs_folder(base)
    if not folder.is_dir():
        return []
    found = []
    for entry in sorted(folder.iterdir()):
        if (entry / RECORD_FILE).is_file():
            try:
                found.append(load_run(entry).summary)
            except HotloopError as error:
                found.append(RunSummary(entry, entry.name, "damaged", error=str(error)))
    return sorted(found, key=lambda run: (run.started, run.name))


def load_run(folder: str | os.PathLike[str]) -> Run:
    """The record in `folder`.

    Raises:
        HotloopError: there is none, or it cannot be read; the text names the file.
    """
    folder = Path(folder)
    try:
        fields = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HotloopError(f"{folder / RECORD_FILE} is no readable record of a run: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("status"), str):
        raise HotloopError(f"{folder / RECORD_FILE} is no record of a run: it has no status")
    status = fields["status"]
    if status == "running" and process_lives(fields.get("process") or {}) is False:
        status = "died"
    code = fields.get("code") or {}
    summary = RunSummary(
        folder=folder,
        name=folder.name,
        status=status,
        script=fields.get("script"),
        started=fields.get("started", ""),
        ended=fields.get("ended"),
        duration_s=_seconds_between(fields.get("started"), fields.get("ended")),
        commit=code.get("commit"),
        dirty=code.get("dirty"),
        error=fields.get("error"),
    )
    return Run(summary, fields)


def _seconds_between(started: str | None, ended: str | None) -> float | None:
    """Seconds from one ISO time to another; None if either is missing."""
    if not started or not ended:
        return None
    return (datetime.datetime.fromisoformat(ended) - datetime.datetime.fromisoformat(started)).total_seconds()
