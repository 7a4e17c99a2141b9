"""One step, one launch: recording, what is frozen, fallbacks that say why."""

from hotloop.capture.buckets import Buckets
from hotloop.capture.effects import find_effects
from hotloop.capture.fingerprint import Fingerprint
from hotloop.capture.graphs import CudaRecorder, Recorder, Recording
from hotloop.capture.host import StepHost
from hotloop.capture.step import CapturedStep

__all__ = [
    "Buckets",
    "CapturedStep",
    "CudaRecorder",
    "Fingerprint",
    "Recorder",
    "Recording",
    "StepHost",
    "find_effects",
]
