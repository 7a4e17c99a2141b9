"""An optimizer that acts at the end of an accumulation window only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotloop.accelerate.state import GradientState
from hotloop.loop.updates import updates_of

__all__ = ["AcceleratedOptimizer"]


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Stands for a prepared optimizer: `step` and `zero_grad` do nothing on micro-batches without an update.

    Args:
        optimizer: the optimizer itself, prepared by the Accelerator's loop.
        device_placement: kept for its name.
        scaler: kept for its name; the loss scale belongs to the loop.
        before_step: called before each update that is made.

    Attributes:
        optimizer: the optimizer itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: Any = None,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.device_placement = device_placement
        self.scaler = scaler
        self.gradient_state = GradientState()
        self._before_step = before_step

    @property
    def state(self) -> Any:
        """State of the optimizer, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """Default settings of the optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's."""
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients after an update; keep them while a window fills."""
        if not self.gradient_state.sync_gradients:
            return
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the update if this micro-batch completes one."""
        if not self.gradient_state.sync_gradients:
            return None
        if self._before_step is not None:
            self._before_step()
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def train(self) -> None:
        """Tell an optimizer that has modes (schedule-free ones) that training goes on."""
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # type: ignore[attr-defined]

    def eval(self) -> None:
        """Tell an optimizer that has modes (schedule-free ones) that its weights are to be used."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()  # type: ignore[attr-defined]

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was refused (an fp16 overflow); waits for the device where that can be."""
        updates = updates_of(self.optimizer)
        if updates is None or not getattr(updates, "watching", False):
            return False
        return updates.attempted > 0 and not updates.was_applied()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_before_step": None, "gradient_state": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gradient_state = GradientState()

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"
