"""Gradient accumulation: which micro-batch ends a window, and what its gradients must be multiplied by.

Each micro-batch backpropagates loss * n_i / n_ref; the sum N of the n_i over the window and all ranks gives the
factor world * n_ref / N that makes the sum of gradients the gradient of the mean over all N samples or tokens.
n_ref is fixed at the first batch, so that the loss keeps its size.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hotloop.errors import CaptureError, DataError
from hotloop.hardware.processes import Processes

__all__ = ["Window"]

Weight = float | torch.Tensor


@dataclass
class _Watched:
    loader: Callable[[], Any]
    seen: int


class Window:
    """The micro-batches between two updates.

    Attributes:
        boundary: the micro-batch now in work is the last before an update.
        forced: set to True or False to decide the boundary by hand; None lets the loader decide.
        weighted: False backpropagates losses as they are and leaves the factor at 1.
        plain: one process and no accumulation, so that nothing here is needed.
        tape: while a step is being captured, what the host has to do after each replay of it; None otherwise.
        flags: this rank's wishes (to stop, to save), carried to all ranks with the next sum.
        agreed: those wishes of any rank, as of the last sum (CPU).
        feed: the loader that training batches come from, once known.
    """

    def __init__(self, every: int, processes: Processes, device: torch.device) -> None:
        self.every = every
        self.boundary = True
        self.forced: bool | None = None
        self.weighted = True
        self.plain = every == 1 and processes.world == 1
        self.flags = [False, False]
        self.agreed = [False, False]
        self.feed: Any = None
        self.processes = processes
        self._device = device
        self._loaders: list[_Watched] = []
        self._micro = 0
        self._open = False
        self._by_hand = False
        self._ordinal = 0
        self._references: list[Weight] = []
        self._total: Weight = 0.0
        self._factor: float | torch.Tensor | None = None
        self.loss_bad = False
        self.probe: torch.Tensor | None = None
        self.flags_on_device: torch.Tensor | None = None
        self.tape: list[Callable[[], None]] | None = None

    @property
    def replaying(self) -> bool:
        """The batch in hand is a replay on a rank that has run dry: it must leave no trace."""
        return self.feed is not None and self.feed.is_replay

    def watch(self, loader: Any) -> None:
        """Let `loader` be one of those that may feed training."""
        self._loaders.append(_Watched(weakref.ref(loader), loader.handed_out))

    def enter(self) -> None:
        """A training forward or a backward begins: open a new micro-batch if the feed has moved on."""
        if self._by_hand:
            return
        moved = self._moved()
        if moved:
            feed = self._choose(moved)
            if feed is not None:
                self.feed = feed
                self.begin()
        elif not self._open:
            self.begin()

    def open_by_hand(self) -> None:
        """Open a micro-batch that lasts until `close_by_hand`, whatever loaders do meanwhile."""
        moved = self._moved()
        if moved:
            self.feed = self._choose(moved) or self.feed
        self._by_hand = True
        self.begin()

    def close_by_hand(self) -> None:
        """End a micro-batch opened by hand."""
        self._by_hand = False

    def _moved(self) -> list[Any]:
        """Loaders that handed out a batch for learning since the last time this was asked."""
        moved = []
        for entry in self._loaders:
            loader = entry.loader()
            if loader is None or loader.handed_out == entry.seen:
                continue
            entry.seen = loader.handed_out
            if loader.with_grad:
                moved.append(loader)
        return moved

    def _choose(self, moved: list[Any]) -> Any:
        """Which of the loaders that handed out a batch feeds training; None if none of them does.

        An evaluation between two training steps, or inside one, leaves the training loader in the lead, also
        when it was abandoned half way.
        """
        if any(loader is self.feed for loader in moved):
            return self.feed
        open_ones = [loader for loader in moved if loader.live]
        if open_ones:
            return open_ones[-1]
        return moved[-1] if self.feed is None else None

    def begin(self) -> None:
        """Open the next micro-batch."""
        if self.boundary or self._micro == 0:
            self._micro, self._total = 0, 0.0
        self._micro += 1
        self._ordinal = 0
        self._open = True
        self._factor = None
        last = self.feed is not None and self.feed.at_last
        self.boundary = self.forced if self.forced is not None else (self._micro >= self.every or last)

    def end(self) -> None:
        """An optimizer has stepped or would have: without a loader, the next backward is a new micro-batch."""
        if self.feed is None and not self._by_hand:
            self._open = False

    def weigh(self, loss: torch.Tensor, weight: Weight | None) -> torch.Tensor:
        """The loss to backpropagate for this micro-batch: loss * n_i / n_ref, and n_i counted once."""
        self._factor = None
        if not self.weighted:
            return loss
        if weight is None:
            weight = float(self.feed.batch_samples) if self.feed is not None else 1.0
        replay = self.replaying
        if replay:
            weight = 0.0
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().to(self._device, torch.float64, non_blocking=True).reshape(())
        elif not replay and not weight > 0:
            raise DataError(
                f"backward(weight={weight!r}): a batch is a mean over at least one sample or token"
            )
        ordinal = self._ordinal
        self._ordinal += 1
        if ordinal >= len(self._references):
            self._references.append(self._agree_reference(weight))
        if ordinal == 0:
            self._total = self._total + weight
            if self.tape is not None:
                if isinstance(weight, torch.Tensor):
                    raise CaptureError("a captured window needs weights that are numbers, or accumulation=1")
                self.tape.append(functools.partial(self._account, weight))
        if replay:
            # where, not a product: a replayed loss may be anything, and NaN * 0 is NaN
            return torch.where(
                torch.zeros((), dtype=torch.bool, device=loss.device), loss, torch.zeros_like(loss)
            )
        reference = self._references[ordinal]
        if isinstance(weight, torch.Tensor) or isinstance(reference, torch.Tensor):
            share = torch.as_tensor(weight / reference).to(loss.dtype)
            return loss * share
        return loss if weight == reference else loss * (weight / reference)

    def marks(self) -> tuple[Any, ...]:
        """What recording a micro-batch changes here, to be put back."""
        return (self._total, self._ordinal, self._factor)

    def put_marks(self, marks: tuple[Any, ...]) -> None:
        """Put `marks` back."""
        self._total, self._ordinal, self._factor = marks

    def _account(self, weight: Weight) -> None:
        """Count the weight of a replayed micro-batch."""
        self._total = self._total + weight
        self._factor = None

    def _agree_reference(self, weight: Weight) -> Weight:
        """n_ref: the first batch's weight on rank 0, the same on every rank."""
        if self.processes.world == 1:
            return weight
        import torch.distributed as dist

        box = torch.zeros(1, dtype=torch.float64, device=self._device)
        box.copy_(weight.reshape(1)) if isinstance(weight, torch.Tensor) else box.fill_(weight)
        # a rank that starts with a replay has no weight of its own; the largest is as good as the first
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return box[0] if self._device.type != "cpu" else box.item()

    def frozen(self) -> tuple[Any, ...]:
        """What a recording of the micro-batch now open freezes: its place, its weight, the window's sum before it."""
        feed = self.feed
        weight = feed.batch_samples if feed is not None else 1
        return (
            self.boundary,
            weight,
            self._total if self.boundary and self._micro > 1 else None,
            *self._references[:1],
        )

    def factor(self) -> float | torch.Tensor:
        """What this window's gradients are multiplied by: exactly 1.0 where nothing was weighed.

        Over several ranks it also carries a few flags to all of them (a non-finite loss, a wish to stop, a
        due checkpoint), in the same small sum.
        """
        if self._factor is not None:
            return self._factor
        if self.processes.world > 1:
            self._factor = self._reduce()
        elif self.weighted and self._references and self.every > 1:
            self._factor = self._divide(self._total)
        else:
            self._factor = 1.0
        return self._factor

    def _divide(self, total: Weight) -> float | torch.Tensor:
        reference = self._references[0]
        if isinstance(total, torch.Tensor) or isinstance(reference, torch.Tensor):
            factor = torch.as_tensor(self.processes.world * reference / total)
            return factor if self._device.type != "cpu" else factor.item()
        return self.processes.world * reference / total

    def _reduce(self) -> float | torch.Tensor:
        import torch.distributed as dist

        box = torch.zeros(4, dtype=torch.float64, device=self._device)
        if isinstance(self._total, torch.Tensor):
            box[0].copy_(self._total)
        elif self._total:
            box[0].fill_(self._total)
        if self._device.type == "cpu":
            box[1], box[2], box[3] = float(self.loss_bad), float(self.flags[0]), float(self.flags[1])
            dist.all_reduce(box)
            self.flags = [False, False]
            total, bad, stop, due = box.tolist()
            self.loss_bad, self.agreed = bad > 0, [stop > 0, due > 0]
            return self._divide(total) if self.weighted and self._references else 1.0
        if self.probe is not None:
            # NaN where a loss was not finite: the sum carries it to every rank
            box[1].copy_(self.probe)
        for i, flag in enumerate(self.flags):
            if flag:
                box[2 + i].fill_(1.0)
        dist.all_reduce(box)
        if self.probe is not None:
            self.probe.copy_(box[1])
        self.flags = [False, False]
        self.flags_on_device = box[2:4]
        return self._divide(box[0]) if self.weighted and self._references else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Where in the window training is; waits for the device if weights lie there."""
        references = [float(r) for r in self._references]
        return {
            "micro": 0 if self.boundary else self._micro,
            "total": float(self._total),
            "references": references,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._micro, self._total = int(state["micro"]), float(state["total"])
        self._references = list(state["references"])
        self.boundary = self._micro == 0
        self._open = False
        self._factor = None
