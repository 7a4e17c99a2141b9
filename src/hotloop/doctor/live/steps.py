"""The steps of a program, seen from outside: by the first optimizer that is used, or as a `Loop` marks them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hotloop.doctor.live.stall_log import users_frame
from hotloop.stalls import LISTENERS

__all__ = ["StepMarks"]


class StepMarks:
    """While it is entered, calls `after_step` at the end of each step.

    A program with several optimizers has one step for all of them: that of the first which is used. Steps that a
    `Loop` replays from a recording call no optimizer; once it has marked a step, its marks alone count.

    Attributes:
        place: file and line where the first step was made, None if no line of the program's own is known.
        optimizers: those that have stepped, by the name of their class.
    """

    def __init__(self, after_step: Callable[[], None]) -> None:
        self._after_step = after_step
        self._optimizer: int | None = None
        self._by_loop = self._counted = False
        self._hook: Any = None
        self.place: tuple[str, int] | None = None
        self.optimizers: dict[str, Any] = {}

    def __enter__(self) -> StepMarks:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hook = register_optimizer_step_post_hook(self._torch_step)
        LISTENERS.append(self._loop_step)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            LISTENERS.remove(self._loop_step)

    def _torch_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            self._optimizer = id(optimizer)
            frame = users_frame(sys._getframe(1))
            self.place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        self.optimizers.setdefault(type(optimizer).__name__, weakref.ref(optimizer))
        if not self._by_loop and id(optimizer) == self._optimizer:
            self._counted = True
            self._after_step()

    def _loop_step(self, optimizer: Any) -> None:
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        # a step that Python made was counted when the optimizer returned
        if not self._counted:
            self._after_step()
        self._by_loop, self._counted = True, False
