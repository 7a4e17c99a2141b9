"""Where a step of training ends: whoever drives the steps says so, whoever watches them listens.

Torch's own hook sees an optimizer's `step` as Python calls it. A step that was recorded and is replayed calls no
Python at all; `Loop` marks those here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["LISTENERS", "mark_step"]

# called with the optimizer that made the step; empty while nobody watches, which costs a step nothing
LISTENERS: list[Callable[[Any], None]] = []


def mark_step(optimizer: Any) -> None:
    """Tell the listeners that `optimizer` has made a step, or has had it made by a recording."""
    for listener in tuple(LISTENERS):
        listener(optimizer)
