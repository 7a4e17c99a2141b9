"""A program's learning rate taken over from outside: a range test on whatever training loop it runs.

The program is not changed: hooks of torch see each backward's loss and each step of its first optimizer, set the rate
before it, and end the program once the test is over. Loops of hotloop and plain ones are seen alike.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from hotloop.optim.range_test import RangeTest, Sweep
from hotloop.optim.rate_finder import proportions_of, put_rate
from hotloop.state import LossScale

__all__ = ["Takeover", "TestOver"]


class TestOver(BaseException):
    """The range test has seen enough: ends the program. No `except Exception` of the program's catches it."""


class Takeover:
    """While it is entered, the steps of one optimizer of this process are the steps of a range test.

    The loss of a step is the sum of what is backpropagated for it, so that losses divided by the micro-batches of an
    accumulation window add up; where several optimizers step in turn, of what is backpropagated since another one
    stepped. Where a Loop divides the gradients instead, the sum is divided as they are. A loss that a GradScaler or
    a Loop in fp16 has scaled counts as it was before. Scheduling goes on, and is overruled at each step.

    Args:
        sweep: the rates to try.
        optimizer: which one, in the order of their first steps, from 0.

    Attributes:
        steps: steps of that optimizer. optimizers: how many were seen to step.
    """

    def __init__(self, sweep: Sweep, optimizer: int = 0) -> None:
        self.sweep = sweep
        self.steps = 0
        self._number = optimizer
        self._seen: list[weakref.ref[Any]] = []
        self._shares: list[float] = []
        self._loss = 0.0
        self._noted = False
        self._taken = False
        self._unscaled: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
        self._hooks: list[Any] = []
        self._backward: Any = None
        self._scales: list[tuple[Any, str, Any]] = []

    @property
    def optimizers(self) -> int:
        """How many optimizers were seen to step."""
        return len(self._seen)

    def __enter__(self) -> Takeover:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._note_backward
        self._watch_scaling(torch.amp.GradScaler, "scale")
        self._watch_scaling(LossScale, "apply")
        return self

    def _watch_scaling(self, kind: Any, name: str) -> None:
        before = getattr(kind, name)

        def scale(scaler: Any, outputs: Any) -> Any:
            result = before(scaler, outputs)
            if isinstance(result, torch.Tensor) and isinstance(outputs, torch.Tensor):
                self._unscaled = (weakref.ref(result), outputs.detach())
            return result

        self._scales.append((kind, name, before))
        setattr(kind, name, scale)

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        torch.autograd.backward = self._backward
        for kind, name, before in self._scales:
            setattr(kind, name, before)
        self._scales.clear()

    def _note_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 and not self.sweep.over:
            loss = tensors
            if self._unscaled is not None and self._unscaled[0]() is tensors:
                loss = self._unscaled[1]
            value = float(loss.detach())
            if not math.isfinite(value):
                # a scaler or a guard may never let such a step through
                self._end(value)
            if self._taken:
                # what was backpropagated before was for the other one
                self._loss, self._taken = 0.0, False
            self._loss += value
            self._noted = True
        return self._backward(tensors, *args, **kwargs)

    def _is_watched(self, optimizer: Any) -> bool:
        known = [reference() for reference in self._seen]
        if not any(optimizer is one for one in known):
            self._seen.append(weakref.ref(optimizer))
            known.append(optimizer)
        return len(known) > self._number and known[self._number] is optimizer

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_watched(optimizer):
            return
        if len(self._shares) != len(optimizer.param_groups):
            self._shares = proportions_of(optimizer)
        put_rate(optimizer, [self.sweep.next_rate() * share for share in self._shares])

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_watched(optimizer):
            self._taken = True
            return
        self.steps += 1
        loss, noted = self._loss * _factor_of(optimizer), self._noted
        self._loss, self._noted, self._taken = 0.0, False, False
        # a program that never calls backward on a number would run to its end for nothing
        blind = not self.sweep.losses and self.steps >= self.sweep.steps
        if blind or (noted and self.sweep.note(loss)):
            raise TestOver

    def _end(self, value: float) -> None:
        self.sweep.note(value)
        raise TestOver

    def result(self, ended: str = "") -> RangeTest:
        """What was found so far."""
        if not self.sweep.over and not ended:
            ended = f"the program made {self.steps} of {self.sweep.steps} steps"
        return self.sweep.result(ended=ended)


def _factor_of(optimizer: Any) -> float:
    """What the Loop that prepared the optimizer has multiplied this update's gradients by."""
    window = getattr(getattr(optimizer, "_hotloop_updates", None), "window", None)
    return 1.0 if window is None or window.plain else float(window.factor())
