"""The loop's fp16 loss scale, as scripts know it: `accelerator.scaler`."""

from __future__ import annotations

from typing import Any

import torch

from hotloop.accelerate.kinds import GradScalerKwargs
from hotloop.accelerate.unsupported import refuse
from hotloop.loop.loop import Loop
from hotloop.state import LossScale

__all__ = ["ScaleView"]


class ScaleView:
    """Reads and sets the loss scale; scaling, unscaling and updating it are the loop's work."""

    def __init__(self, loop: Loop) -> None:
        self._scale: LossScale = loop._state.scale  # type: ignore[union-attr, assignment]

    def configure(self, options: GradScalerKwargs) -> None:
        """Start as a torch GradScaler with these arguments would.

        Raises:
            UnsupportedError: factors other than 2 and 1/2, or a scaler that is switched off.
        """
        if options.growth_factor != 2.0 or options.backoff_factor != 0.5 or not options.enabled:
            refuse("GradScalerKwargs with other factors than 2 and 0.5", "the scale is halved and doubled")
        self._scale.value.fill_(options.init_scale)
        self._scale.interval = options.growth_interval

    def get_scale(self) -> float:
        """The scale now; waits for the device."""
        return float(self._scale.value.item())

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """`outputs` times the scale."""
        return self._scale.apply(outputs)

    def is_enabled(self) -> bool:
        """True."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Scale and updates since the last overflow, by a torch GradScaler's names; waits for the device."""
        found = self._scale.state_dict()
        return {
            "scale": found["scale"],
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": self._scale.interval,
            "_growth_tracker": found["quiet"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict`, or a torch GradScaler's, returned."""
        self._scale.load_state_dict({"scale": state_dict["scale"], "quiet": state_dict["_growth_tracker"]})
        self._scale.interval = state_dict["growth_interval"]
