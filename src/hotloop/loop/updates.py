"""What a prepared optimizer's `step` and `zero_grad` do: step at a window's end, and only if all is finite."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hotloop.loop.buffers import BufferKeeper
from hotloop.loop.window import Window
from hotloop.optim.gradients import as_real_dense
from hotloop.optim.masters import clears_as_torch

if TYPE_CHECKING:
    from hotloop.loop.host_updates import HostUpdates
    from hotloop.loop.resident_updates import ResidentUpdates

__all__ = ["Updates", "updates_of"]


class Updates(ABC):
    """The updates of one optimizer; `install` puts its `step` and `zero_grad` in place of the optimizer's own.

    Attributes:
        attempted: updates made or refused so far.
        pending: micro-batches backpropagated since the last update.
        folding: a step follows the next clipping at once, and may take the factor along.
    """

    def __init__(self, optimizer: Optimizer, window: Window, keepers: list[BufferKeeper]) -> None:
        self.optimizer = optimizer
        self.window = window
        self.keepers = keepers
        self.attempted = 0
        self.pending = 0
        self.folding = False
        self.judged = False
        self._noted = -1
        self._scaled: set[int] = set()
        self._stepped_in = -1
        self._dense: bool | None = None
        self._step: Callable[..., Any] = optimizer.step
        self._zero: Callable[..., None] = optimizer.zero_grad
        if clears_as_torch(optimizer):
            self._zero = self._forget_gradients
        self._zero_plainly = self._forgetting(self._zero)

    def install(self) -> None:
        """Let calls on the optimizer come here; pickling and deep copies of it do not carry this along."""
        self.optimizer.step = self.step  # type: ignore[method-assign]
        self.optimizer.zero_grad = self._zero_plainly if self.window.plain else self.zero_grad  # type: ignore[method-assign]
        self.optimizer._hotloop_updates = self  # type: ignore[attr-defined]
        self.window.optimizers += 1

    def remove(self) -> None:
        """Give the optimizer its own methods back."""
        self.window.optimizers -= 1
        for name in ("step", "zero_grad", "_hotloop_updates", "found_inf"):
            self.optimizer.__dict__.pop(name, None)

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, or nothing inside a window."""

    @abstractmethod
    def clip(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        known: set[int] | None = None,
    ) -> torch.Tensor:
        """Make gradients of `parameters` true and clip them; returns their norm before clipping, 0-d.

        `known` has the ids of parameters whose gradients are true already; None for those that this optimizer knows of.
        """

    @abstractmethod
    def judge_later(self, total: torch.Tensor) -> None:
        """Let the next update obey `total` too, a norm over gradients of which some are this optimizer's."""

    @abstractmethod
    def make_true(self) -> None:
        """Multiply the gradients by the window's factor now, so that `p.grad` is what the update will use."""

    @abstractmethod
    def was_applied(self) -> bool:
        """Whether the last update was made; waits for the device."""

    def _forget_gradients(self, set_to_none: bool = True) -> None:
        """torch's `zero_grad` by its usual argument: it does this and little else, in four times the host's time."""
        if not set_to_none:
            Optimizer.zero_grad(self.optimizer, set_to_none=False)
            return
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None

    def _forgetting(self, zero: Callable[..., None]) -> Callable[..., None]:
        """`zero`, and what is known of the gradients that it clears goes with them."""
        optimizer, own = self.optimizer, vars(self.optimizer)

        def clear(set_to_none: bool = True) -> None:
            if self._is_marked():
                self.forget_marks()
            if "_hotloop_masters" in own:
                own["_hotloop_masters"].put_back(optimizer)
            zero(set_to_none)

        return clear

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, unless some of the window now open are waiting in them.

        At the end of a window, after its last backward and instead of a step, it gives the window up.
        """
        window = self.window
        # with several optimizers it may as well make room for the next loss of the same micro-batch
        if window.boundary and window.learned and not window.stepped and window.optimizers == 1:
            window.give_up()
        elif self.pending or (window.waiting and self._stepped_in != window.number):
            return
        self.pending = 0
        self._zero_plainly(set_to_none)

    def note_clipped(self, parameters: list[torch.Tensor], by: Updates, total: torch.Tensor) -> None:
        """A clipping `by` one optimizer took some of this one's parameters along: they are true, their norm `total`."""
        mine = {id(p) for p in self.parameters()}
        if by is self:
            # whose step comes first forgets: what it knew of others' gradients would outlive them
            self._scaled &= mine
            return
        self._scaled |= mine & by._scaled
        if not mine.isdisjoint(map(id, parameters)):
            self.judge_later(total)

    @property
    def scaled(self) -> set[int]:
        """Ids of the parameters whose gradients are true already, where they have to be made so."""
        return self._scaled

    def restart(self, counts: dict[str, int]) -> None:
        """Go on from counts that were saved; what belonged to a step in progress is forgotten."""
        for name, value in counts.items():
            if hasattr(self, name):
                setattr(self, name, value)
        self.forget_marks()

    def parameters(self) -> Iterator[torch.Tensor]:
        """All parameters of the optimizer."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _postpone(self) -> None:
        self.pending += 1
        self.window.postpone(self)

    def _remaining(self) -> list[torch.Tensor]:
        """Gradients that no clipping has made true yet."""
        listed: Iterable[torch.Tensor] = self.parameters()
        if self._scaled:
            listed = (p for p in listed if id(p) not in self._scaled)
        return self._gradients(listed)

    def _gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Their gradients; what kind each is, is looked at once, since asking costs more than all else here."""
        found = [g for p in parameters if (g := p.grad) is not None]
        if self._dense is None and found:
            self._dense = not any(g.is_sparse or g.is_complex() for g in found)
        return found if self._dense else [as_real_dense(g) for g in found]

    def _covers(self, parameters: list[torch.Tensor]) -> bool:
        """Whether `parameters` hold every gradient of this optimizer."""
        # never remembered: a layer that was not used at one step has a gradient at the next
        mine = [p for p in self.parameters() if p.grad is not None]
        if len(mine) == len(parameters) and all(map(operator.is_, mine, parameters)):
            return True
        return {id(p) for p in mine} <= {id(p) for p in parameters}

    def _finish(self) -> None:
        # torch's schedulers warn where they cannot see that the optimizer stepped first
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.attempted += 1
        self._stepped_in = self.window.number
        self._clear()
        self.window.end()

    def _clear(self) -> None:
        self.pending = 0
        self.forget_marks()

    def reopen(self) -> None:
        """A backward begins: it may make gradients that no clipping before it has seen."""
        if not self.judged and not self._scaled:
            return
        self.judged = False
        kept = {id(p) for p in self.parameters() if p.grad is not None}
        if kept:
            self._scaled &= kept
        else:
            # the update that was clipped is given up, by whoever cleared its gradients
            self.forget_marks()

    @abstractmethod
    def _is_marked(self) -> bool:
        """Whether there is anything that `forget_marks` would forget."""

    def forget_marks(self) -> None:
        """What clippings found out of the gradients is of no use any more."""
        self.judged = False
        if self._scaled:
            self._scaled = set()


def updates_of(optimizer: Any) -> HostUpdates | ResidentUpdates | None:
    """The updates of a prepared optimizer; None if it is not prepared."""
    return getattr(optimizer, "_hotloop_updates", None)
