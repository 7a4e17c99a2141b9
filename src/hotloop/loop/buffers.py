"""Buffers of a module (batch-norm statistics and counters) as they were before a forward whose update is refused."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["BufferKeeper"]


class BufferKeeper:
    """Saves a module's buffers before the first forward of a window and puts them back on demand.

    Attributes:
        fresh: no forward since the last update: the next one saves.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (owner._buffers, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._saved: list[torch.Tensor] = []
        self._replay: list[torch.Tensor] = []
        self.fresh = True

    def __bool__(self) -> bool:
        return bool(self._places)

    def live(self) -> list[torch.Tensor]:
        """The buffers as they are now; a forward may have replaced the objects."""
        return [buffer for holder, name in self._places if (buffer := holder.get(name)) is not None]

    def save(self, *, again: bool = False) -> None:
        """Keep the buffers if this is the window's first forward; `again`: keep them for a replayed batch too."""
        if again:
            self._replay = [b.detach().clone() for b in self.live()]
        if not self.fresh:
            return
        self.fresh = False
        live = self.live()
        if len(self._saved) != len(live) or any(
            s.shape != b.shape or s.dtype != b.dtype for s, b in zip(self._saved, live, strict=True)
        ):
            self._saved = [torch.empty_like(b) for b in live]
        with torch.no_grad():
            torch._foreach_copy_(self._saved, live)

    def undo_replay(self) -> None:
        """Put back what a replayed batch changed."""
        if self._replay:
            with torch.no_grad():
                torch._foreach_copy_(self.live(), self._replay)
            self._replay = []

    def accept(self) -> None:
        """The window's update was made: the next forward starts a new one."""
        self.fresh = True

    def restore(self, refuse: torch.Tensor | None = None) -> None:
        """Put the saved buffers back; on a device, where the flag `refuse` (0-d) says so."""
        if self.fresh:
            return
        self.fresh = True
        # `.data` has a version counter of its own: a backward of the same micro-batch may be still to come, for another
        # optimizer, through a forward that saved these buffers; what changed them in training it does not read
        live = [buffer.data for buffer in self.live()]
        with torch.no_grad():
            if refuse is None:
                torch._foreach_copy_(live, self._saved)
                return
            flag = refuse.bool()
            for saved, buffer in zip(self._saved, live, strict=True):
                torch.where(flag, saved, buffer, out=buffer)
