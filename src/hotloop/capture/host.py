"""What a captured step needs of the loop that it belongs to."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from hotloop.capture.graphs import Recorder
from hotloop.state import Landing, Tape

__all__ = ["StepHost"]


class StepHost(Protocol):
    """What a captured step needs of the loop that it belongs to.

    Attributes:
        device: where steps run.
        eager: captured steps run as plain Python while it is True.
        warm_calls: so many real steps are run eagerly before the first recording: lazy state of optimizers, libraries
            and autograd is made in them.
    """

    device: torch.device
    eager: bool
    warm_calls: int

    def modules(self) -> list[nn.Module]:
        """Prepared modules."""

    def optimizers(self) -> list[Any]:
        """Prepared optimizers whose steps are recorded."""

    def parameters(self) -> list[torch.Tensor]:
        """Parameters of all prepared optimizers."""

    def recorder(self) -> Recorder | None:
        """What records on this device; None where nothing can."""

    def say(self, text: str) -> None:
        """Say a line once."""

    def enter(self) -> tuple[Any, ...]:
        """A step begins; returns what of its place in the accumulation window a recording freezes."""

    def ready(self) -> tuple[int, ...]:
        """Make optimizers fit to be recorded and replayed; called before each step.

        Returns numbers that are others where an optimizer writes other tensors than it did: recordings made before do
        not count.
        """

    def settled(self) -> bool:
        """Whether optimizers hold the numbers of their schedules; not after somebody set or loaded others."""

    def hold_gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Let gradients that wait in `parameters` lie where all recordings look for them; returns them."""

    def recording(self, *, ports: bool = False) -> AbstractContextManager[Tape]:
        """While it is open, host effects of the step go to the tape given instead of being done.

        With `ports` the recording itself may send counters to the host: the tape's landings.
        """

    def aim(self, landings: list[Landing]) -> None:
        """Before a replay: say where the counters that it sends to the host land."""

    def remaining(self) -> int | None:
        """How many updates are still to come, as far as that is known."""

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of optimizers and of the loop itself that a step writes, by name."""

    def generators(self) -> list[torch.Generator]:
        """The default generators that a step draws from."""
