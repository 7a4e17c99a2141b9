"""Processes: launching them, and data parallelism over them."""

from typing import TYPE_CHECKING

from hotloop.deferred import deferred

if TYPE_CHECKING:
    from hotloop.parallel.launch import Launch, launch_processes
    from hotloop.parallel.plan import Plan

__all__ = ["Launch", "Plan", "launch_processes"]

# a training script does not launch
__getattr__ = deferred(
    __name__,
    {
        "Launch": "hotloop.parallel.launch",
        "Plan": "hotloop.parallel.plan",
        "launch_processes": "hotloop.parallel.launch",
    },
)
