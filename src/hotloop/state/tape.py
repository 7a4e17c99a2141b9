"""What the host has to do for a recorded step: after each replay, and before it."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Landing", "Tape"]


class Landing:
    """A recorded copy of an update's counters to the host; into which row, is said before each replay.

    Attributes:
        counts: what is copied.
        spare: where the recording had it copied to.
        single: it is of one number, which arrives whole.
        ahead: how many updates of the same step come before this one.
        aim: says the address of the row for the next replay; None until the recording can be told.
    """

    def __init__(self, counts: torch.Tensor, spare: torch.Tensor, ahead: int) -> None:
        self.counts = counts
        self.single = counts.dim() == 0
        self.spare = spare
        self.ahead = ahead
        self.aim: Callable[[int], None] | None = None


class Tape(list[Callable[[], None]]):
    """Effects of a step on the host, done after each replay, in order.

    Args:
        lands: counters may be copied to the host inside the recording.

    Attributes:
        landings: those copies.
        updates: updates of the step so far.
    """

    def __init__(self, *, lands: bool = False) -> None:
        super().__init__()
        self.lands = lands
        self.landings: list[Landing] = []
        self.updates = 0
