"""Trace files into columns, and what happened when: the tolerant reader, steps, idle time, source places."""

from hotloop.doctor.trace.columns import Category, Events
from hotloop.doctor.trace.idle import Idle, part_idle
from hotloop.doctor.trace.places import Place
from hotloop.doctor.trace.reading import Recording, Recovery, read_recordings
from hotloop.doctor.trace.stream import TraceError
from hotloop.doctor.trace.timeline import Timeline

__all__ = [
    "Category",
    "Events",
    "Idle",
    "Place",
    "Recording",
    "Recovery",
    "Timeline",
    "TraceError",
    "part_idle",
    "read_recordings",
]
