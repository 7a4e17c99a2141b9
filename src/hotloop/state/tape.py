"""What the host has to do for a recorded step: after each replay, and before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.nested import memory_of, tensors_of

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
        self._guards = ExitStack()
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None, str]] = []

    def guard(self, parameters: Iterable[torch.Tensor], optimizer: str) -> None:
        """An update of `parameters` is made after each replay: until `close`, what would come after it is an error."""
        listed = list(parameters)
        self._gradients += [(p, p.grad, optimizer) for p in listed]
        touched = [*listed, *(p.grad for p in listed if p.grad is not None)]
        self._guards.enter_context(_Guard(touched, optimizer))

    def close(self) -> None:
        """The step is recorded to its end.

        Raises:
            RuntimeError: it took gradients away that an update after each replay needs.
        """
        self.release()
        waiting, self._gradients = self._gradients, []
        for p, gradient, optimizer in waiting:
            if p.grad is not gradient:
                raise RuntimeError(
                    f"{_told(optimizer)}, and gradients are cleared before that: leave it to loop.update"
                )

    def release(self) -> None:
        """Nothing is an error any more."""
        self._guards.close()


class _Guard(TorchDispatchMode):
    """Refuses operations that touch the memory of `tensors`."""

    def __init__(self, tensors: Iterable[torch.Tensor], optimizer: str) -> None:
        super().__init__()
        self._memory = {memory_of(t) or id(t) for t in tensors}
        self._optimizer = optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any((memory_of(t) or id(t)) in self._memory for t in tensors_of((args, kwargs))):
            raise RuntimeError(
                f"{_told(self._optimizer)}, and the step goes on with its parameters: end the step with the update"
            )
        return func(*args, **kwargs)


def _told(optimizer: str) -> str:
    return f"{optimizer} steps after each launch, since its step cannot be recorded"
