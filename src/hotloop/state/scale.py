"""The loss scale of fp16 training, on the device."""

from __future__ import annotations

import torch

__all__ = ["LossScale"]


class LossScale:
    """A power of two that keeps small fp16 gradients from vanishing.

    Halved when a gradient overflows, doubled after `interval` updates without one, as in Micikevicius et al.
    (2018), "Mixed Precision Training". It never falls below `floor`: an overflow there means that the
    numbers themselves are not finite.
    """

    def __init__(
        self, device: torch.device, *, initial: float = 65536.0, interval: int = 2000, floor: float = 1.0
    ) -> None:
        self.value = torch.full((), initial, device=device)
        self.interval = interval
        self.floor = floor
        self._quiet = torch.zeros((), dtype=torch.int32, device=device)

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to backpropagate."""
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
        torch._amp_update_scale_(self.value, self._quiet, overflow, 2.0, 0.5, self.interval)
        self.value.clamp_(min=self.floor)

    def state_dict(self) -> dict[str, float]:
        """Scale and updates since the last overflow; waits for the device."""
        return {"scale": self.value.item(), "quiet": int(self._quiet.item())}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Put back what `state_dict` returned."""
        self.value.fill_(state["scale"])
        self._quiet.fill_(int(state["quiet"]))
