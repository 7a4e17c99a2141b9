"""A running script watched from outside, or a stretch of code recorded: the steps of a program as it runs."""

from hotloop.doctor.live.block import Window, window
from hotloop.doctor.live.script import Watched, run_virtually, run_watched
from hotloop.doctor.live.virtual import Stall, VirtualDevice
from hotloop.doctor.live.watch import Watch

__all__ = [
    "Stall",
    "VirtualDevice",
    "Watch",
    "Watched",
    "Window",
    "run_virtually",
    "run_watched",
    "window",
]
