"""The older place of `find_executable_batch_size`."""

from __future__ import annotations

from hotloop.accelerate.memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
