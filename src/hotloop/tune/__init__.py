"""Try settings, keep what helps, prove that it is still the same training."""

from typing import TYPE_CHECKING

from hotloop.deferred import deferred

if TYPE_CHECKING:
    from hotloop.tune.climb import tune
    from hotloop.tune.report import make_report, write_report
    from hotloop.tune.result import Result, Tried
    from hotloop.tune.rung import Rung
    from hotloop.tune.tuned import tuned_path, write_tuned

__all__ = ["Result", "Rung", "Tried", "make_report", "tune", "tuned_path", "write_report", "write_tuned"]

__getattr__ = deferred(
    __name__,
    {
        "Result": "hotloop.tune.result",
        "Rung": "hotloop.tune.rung",
        "Tried": "hotloop.tune.result",
        "make_report": "hotloop.tune.report",
        "tune": "hotloop.tune.climb",
        "tuned_path": "hotloop.tune.tuned",
        "write_report": "hotloop.tune.report",
        "write_tuned": "hotloop.tune.tuned",
    },
)
