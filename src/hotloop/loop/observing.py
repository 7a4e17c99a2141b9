"""Who wants to see each `Loop` that this process makes: tools that measure a script without touching it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.loop.loop import Loop

__all__ = ["OBSERVERS"]

# called with each Loop at the end of its construction; empty while nobody watches
OBSERVERS: list[Callable[[Loop], None]] = []
