"""Updates that are the gradient of all samples of a window, though each loss was divided by the number of steps.

With `weighting="samples"` each micro-batch backpropagates loss / steps * n_i / n_ref. The window's factor
steps * world * n_ref / N, with N the samples of all its micro-batches on all ranks, is applied just before the
update: to copies, so that `p.grad` keeps the value that scripts expect to find after it.
"""

from __future__ import annotations

from typing import Any

import torch

from hotloop.hardware import Processes

__all__ = ["SampleWeighting"]


class SampleWeighting:
    """Counts the samples of the window now open and corrects its update."""

    def __init__(self, processes: Processes, device: torch.device) -> None:
        self._processes = processes
        self._device = device
        self._reference = 0.0
        self._samples = 0.0
        self._steps = 1
        self._factor: torch.Tensor | float | None = None
        self._made_true: set[int] = set()

    def weigh(self, loss: torch.Tensor, steps: int, loader: Any) -> torch.Tensor:
        """The loss to backpropagate for a micro-batch of the loader being iterated."""
        samples = float(getattr(loader, "batch_samples", 0) or 1)
        if not self._reference:
            # the largest of all ranks is the same number on all of them
            self._reference = max(self._processes.gather_object(samples))
        if self._factor is not None:
            self._samples, self._factor = 0.0, None
            self._made_true.clear()
        self._steps = steps
        self._samples += samples
        return loss if samples == self._reference else loss * (samples / self._reference)

    def make_true(self, parameters: list[torch.Tensor]) -> None:
        """Multiply the gradients of `parameters` by the window's factor in place, once."""
        fresh = [p for p in parameters if p.grad is not None and id(p) not in self._made_true]
        factor = self._find_factor()
        if factor is None or not fresh:
            return
        torch._foreach_mul_([p.grad for p in fresh if p.grad is not None], factor)
        self._made_true.update(id(p) for p in fresh)

    def correct(self, optimizer: Any) -> None:
        """Let the update about to be made use true gradients, and put back those that are there now after it."""
        factor = self._find_factor()
        if factor is None:
            return
        parameters = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and id(p) not in self._made_true
        ]
        kept = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = parameter.grad * factor

        def put_back(*_: Any) -> None:
            handle.remove()
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient

        handle = optimizer.register_step_post_hook(put_back)

    def _find_factor(self) -> torch.Tensor | float | None:
        """The window's factor; None if it is exactly 1 or nothing was weighed."""
        if not self._samples:
            return None
        if self._factor is None:
            total: torch.Tensor | float = self._samples
            if self._processes.world > 1:
                import torch.distributed as dist

                total = torch.full((), self._samples, dtype=torch.float32, device=self._device)
                dist.all_reduce(total)
            self._factor = self._steps * self._processes.world * self._reference / total
        return None if isinstance(self._factor, float) and self._factor == 1.0 else self._factor
