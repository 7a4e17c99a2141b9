"""The state that a step reads and writes: on the device, or on the host where that is the same thing."""

from hotloop.state.host import HostState
from hotloop.state.resident import Pace, ResidentState, Seen, Verdict
from hotloop.state.scale import LossScale
from hotloop.state.tables import ScheduleTable
from hotloop.state.tape import Landing, Tape

__all__ = [
    "HostState",
    "Landing",
    "LossScale",
    "Pace",
    "ResidentState",
    "ScheduleTable",
    "Seen",
    "Tape",
    "Verdict",
]
