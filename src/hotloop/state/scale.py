"""The loss scale of fp16 training, on the device."""

from __future__ import annotations

import torch

__all__ = ["LossScale"]


class LossScale:
    """A power of two that keeps small fp16 gradients from vanishing.

    Halved when a gradient overflows, doubled after `interval` updates without one, as in Micikevicius et al.
    (2018), "Mixed Precision Training". It never falls below `floor`: an overflow there means that the
    numbers themselves are not finite.

    Attributes:
        value: the scale in force, float32 0-d.
        deferred: change the scale at the next backward only: gradients of several optimizers may be waiting, all scaled
            by the value in force.
    """

    def __init__(
        self, device: torch.device, *, initial: float = 65536.0, interval: int = 2000, floor: float = 1.0
    ) -> None:
        self.value = torch.full((), initial, dtype=torch.float32, device=device)
        self.interval = interval
        self.floor = floor
        self.deferred = False
        self._waiting = False
        self._overflow = torch.zeros((), dtype=torch.float32, device=device)
        self._quiet = torch.zeros((), dtype=torch.int32, device=device)

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to backpropagate."""
        self._catch_up()
        return loss.float() * self.value

    def inverse(self, factor: float | torch.Tensor) -> torch.Tensor:
        """`factor` / scale, float32 0-d."""
        if isinstance(factor, torch.Tensor):
            return factor.reshape(()).float() / self.value
        return self.value.reciprocal().mul_(factor) if factor != 1.0 else self.value.reciprocal()

    def blame(self, overflow: torch.Tensor, bad: torch.Tensor) -> None:
        """Count an overflow as non-finite where the scale cannot be lowered any more."""
        torch.maximum(bad, overflow * (self.value <= self.floor), out=bad)

    def update(self, overflow: torch.Tensor) -> None:
        """Lower or raise the scale after an update; `overflow` is 0. or 1., 0-d."""
        if not self.deferred:
            self._move(overflow)
        elif self._waiting:
            torch.maximum(self._overflow, overflow, out=self._overflow)
        else:
            self._overflow.copy_(overflow)
            self._waiting = True

    def _catch_up(self) -> None:
        if self._waiting:
            self._move(self._overflow)
            self._waiting = False

    def _move(self, overflow: torch.Tensor) -> None:
        torch._amp_update_scale_(self.value, self._quiet, overflow, 2.0, 0.5, self.interval)
        self.value.clamp_(min=self.floor)

    def state_dict(self) -> dict[str, float]:
        """Scale and updates since the last overflow; waits for the device."""
        self._catch_up()
        return {"scale": self.value.item(), "quiet": int(self._quiet.item())}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Put back what `state_dict` returned."""
        self._waiting = False
        self.value.fill_(state["scale"])
        self._quiet.fill_(int(state["quiet"]))
