"""What was run: a folder of plain files for each run, and the list of them."""

from hotloop.runs.list import Run, RunSummary, list_runs, load_run
from hotloop.runs.record import Record, runs_folder

__all__ = ["Record", "Run", "RunSummary", "list_runs", "load_run", "runs_folder"]
