"""Why a run is slow, on which line, and what a repair is worth: read traces, replay them, judge them, tell."""

from hotloop.doctor.live import window
from hotloop.doctor.recorded import Trace, WhatIf, read
from hotloop.doctor.replay import Edit, Replay
from hotloop.doctor.rules import Diagnosis, Finding
from hotloop.doctor.trace import Events, TraceError

__all__ = [
    "Diagnosis",
    "Edit",
    "Events",
    "Finding",
    "Replay",
    "Trace",
    "TraceError",
    "WhatIf",
    "read",
    "window",
]
