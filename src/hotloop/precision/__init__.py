"""Number formats: names, what a device can do, autocast."""

from hotloop.precision.casting import autocast_context, outputs_to_float32
from hotloop.precision.formats import Precision, find_precision

__all__ = ["Precision", "autocast_context", "find_precision", "outputs_to_float32"]
