"""`Loop`: the five lines, and what they rest on."""

from hotloop.loop.every import Every
from hotloop.loop.loop import Loop

__all__ = ["Every", "Loop"]
