"""The what-if simulator: a timeline played again with some of its events changed."""

from hotloop.doctor.replay.simulate import Edit, Replay

__all__ = ["Edit", "Replay"]
