"""What the loader asks of a kind of source: open an epoch, say where it is, remember it, take it up again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Any

from hotloop.data.order import Start
from hotloop.data.step import Step

__all__ = ["Epoch", "Feed", "draw_base_seed"]


class Epoch(ABC):
    """One pass over a source, opened at its start or in the middle.

    Attributes:
        start: the position that it was opened at.
        steps: the steps with their batches fetched, on the host.
    """

    start: Start
    steps: Iterator[Step]

    @abstractmethod
    def ended(self) -> bool:
        """True if nothing comes after the step delivered last; may read ahead to know."""

    def close(self) -> None:
        """Let go of what the steps hold, worker processes above all; it would wait for the collector."""
        steps, self.steps = self.steps, iter(())
        if isinstance(steps, Generator):
            steps.close()

    @abstractmethod
    def handed_out(self, step: Step) -> None:
        """`step` has reached the loop."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What is needed, beside the position, to continue after the steps handed out so far."""


class Feed(ABC):
    """A source of batches: index-based or a stream.

    Attributes:
        batch_size: samples in a batch of one process, -1 if that varies or is unknown.
        per_rank: each rank's state is its own; a checkpoint has to keep one for every rank.
        resident: batches are made on the device; they are neither fetched nor copied.
    """

    batch_size: int = -1
    per_rank: bool = False
    resident: bool = False

    @abstractmethod
    def open(self, resume: dict[str, Any] | None, skip: int) -> Epoch:
        """Open an epoch `skip` steps in, or where `resume` (a loader's state) says."""

    @abstractmethod
    def length(self) -> int:
        """Steps of an epoch; TypeError if the source cannot tell."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What is to be remembered between epochs."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned."""


def draw_base_seed(generator: Any) -> int:
    """The number that torch's loader draws once an epoch, from `generator` or torch's global stream."""
    import torch

    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
