"""A schedule that advances with updates that are made."""

from __future__ import annotations

import warnings
from typing import Any

from hotloop.accelerate.state import AcceleratorState, GradientState

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler:
    """Stands for a prepared scheduler: `step` does nothing without an update.

    For each update it advances by as many steps as there are ranks, unless `split_batches`: scripts count a
    schedule in batches of one process (`max_train_steps * accelerator.num_processes`).

    Args:
        scheduler: the torch scheduler.
        optimizers: those whose updates it follows.
        step_with_optimizer: False: `step` always advances, by one.
        split_batches: advance by one whatever the number of ranks.
        resident: the scheduler itself knows, on the device, whether the update was made.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        resident: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = GradientState()
        self._resident = resident

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance if this micro-batch completed an update and it was made."""
        if not self.step_with_optimizer:
            self._advance(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
            return
        if not self._resident and any(opt.step_was_skipped for opt in self.optimizers):
            return
        for _ in range(1 if self.split_batches else AcceleratorState().num_processes):
            # a one-cycle schedule refuses to go past its end, which padding of the last batches may reach
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                self._advance(*args, **kwargs)

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        if getattr(self.scheduler, "_step_count", 2) > 1:
            self.scheduler.step(*args, **kwargs)
            return
        with warnings.catch_warnings():
            # at its first step torch looks for the wrapper that it put around optimizer.step, now inside ours
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.optim\.lr_scheduler")
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Learning rate of each group now in force."""
        return list(self.scheduler.get_last_lr())

    def get_lr(self) -> Any:
        """As the scheduler's."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """As the scheduler's."""
        return self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """As the scheduler's."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the scheduler's."""
        self.scheduler.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "gradient_state": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gradient_state = GradientState()
