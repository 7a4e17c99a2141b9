"""The step's state where the device is the host itself: reading a value costs nothing, so Python decides."""

from __future__ import annotations

import math

import torch

__all__ = ["HostState"]


class HostState:
    """Verdicts on a CPU: was the loss finite, were the gradients, how many updates were refused.

    Args:
        nonfinite: "stop", "skip" or "ignore".
    """

    resident = False

    def __init__(self, nonfinite: str) -> None:
        self.nonfinite = nonfinite
        self.watching = nonfinite != "ignore"
        self.loss_bad = False
        self.skipped = 0
        self._stepped = False
        self._found = torch.zeros(1)
        self._one = torch.ones(1)
        self._factor = torch.ones(1)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Remember whether the loss of a micro-batch is finite, until the update that it leads to."""
        if self._stepped:
            self._stepped = self.loss_bad = False
        value = loss.item() if loss.numel() == 1 else loss.sum().item()
        if not math.isfinite(value):
            self.loss_bad = True

    def close_losses(self) -> None:
        """The losses noted so far have been judged; the next one starts afresh."""
        self._stepped = True

    def judge(self, gradients: list[torch.Tensor], factor: float) -> bool:
        """Multiply `gradients` by `factor` in place and return whether all are finite, in one pass."""
        if not gradients:
            return True
        if factor == 1.0:
            inverse = self._one
        else:
            inverse = self._factor.fill_(factor)
        # one pass for both; the name comes from its use after fp16 loss scaling
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, inverse)
        if self._found.item() == 0.0:
            return True
        self._found.zero_()
        return False
