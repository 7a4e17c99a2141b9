"""What was run: a folder of plain files for each run, and the list of them."""

from typing import TYPE_CHECKING

from hotloop.deferred import deferred

if TYPE_CHECKING:
    from hotloop.runs.list import Run, RunSummary, list_runs, load_run
    from hotloop.runs.record import Record, runs_folder

__all__ = ["Record", "Run", "RunSummary", "list_runs", "load_run", "runs_folder"]

# a loop records, and seldom lists
__getattr__ = deferred(
    __name__,
    {
        "Record": "hotloop.runs.record",
        "Run": "hotloop.runs.list",
        "RunSummary": "hotloop.runs.list",
        "list_runs": "hotloop.runs.list",
        "load_run": "hotloop.runs.list",
        "runs_folder": "hotloop.runs.record",
    },
)
