"""Batches and their order: samplers, fetching, prefetch to the device, position and resume."""

from hotloop.data.loader import Loader
from hotloop.data.move import count_samples, move

__all__ = ["Loader", "count_samples", "move"]
