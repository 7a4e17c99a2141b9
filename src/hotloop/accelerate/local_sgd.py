"""Ranks that train by themselves for some updates, then average their weights."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import torch

from hotloop.accelerate.kinds import DistributedType

__all__ = ["LocalSGD"]


class LocalSGD:
    """Within the block gradients stay on their rank; every `local_sgd_steps` calls of `step` weights are averaged.

    See Stich (2019), "Local SGD Converges Fast and Communicates Little".

    Args:
        accelerator: that of the run.
        model: a prepared model.
        local_sgd_steps: updates between two averages.
        enabled: False makes it do nothing.
    """

    def __init__(
        self, accelerator: Any, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        self.enabled = enabled and accelerator.distributed_type != DistributedType.NO
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self._context: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            context = self._context = self.accelerator.no_sync(self.model)
            context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        if kind is None:
            self._average()
        assert self._context is not None
        self._context.__exit__(kind, error, trace)

    def step(self) -> None:
        """Count one update; average when it is time."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(self.accelerator.reduce(parameter.detach(), reduction="mean"))
