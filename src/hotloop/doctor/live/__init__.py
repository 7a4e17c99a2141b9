"""A running script watched from outside: a short window of its steps recorded, its code and output untouched."""

from hotloop.doctor.live.script import Watched, run_watched
from hotloop.doctor.live.watch import Watch

__all__ = ["Watch", "Watched", "run_watched"]
