"""A running script watched from outside, or a stretch of code recorded: the steps of a program as it runs."""

from hotloop.doctor.live.block import Window, window
from hotloop.doctor.live.script import Virtual, Watched, run_virtually, run_watched
from hotloop.doctor.live.stall_log import Stall
from hotloop.doctor.live.virtual import VirtualDevice
from hotloop.doctor.live.watch import Watch

__all__ = [
    "Stall",
    "Virtual",
    "VirtualDevice",
    "Watch",
    "Watched",
    "Window",
    "run_virtually",
    "run_watched",
    "window",
]
