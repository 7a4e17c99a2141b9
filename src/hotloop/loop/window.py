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

    A window ends with the batch that fills it or that is the last of its loader, and is over once an optimizer has
    stepped. Where none did, its gradients and weights go on into the next one. Of several loaders that hand out
    batches for one micro-batch, the one asked last feeds training; the first to end ends the window.

    Attributes:
        boundary: the micro-batch now in work is the last before an update.
        forced: set to True or False to decide the boundary by hand; None lets the loader decide.
        weighted: False backpropagates losses as they are and leaves the factor at 1.
        plain: one process and no accumulation, so that nothing here is needed.
        tape: while a step is being captured, what the host has to do after each replay of it; None otherwise.
        flags: this rank's wishes (to stop, to save), carried to all ranks with the next sum.
        agreed: those wishes of any rank, as of the last sum (CPU).
        feed: the loader that training batches come from, once known.
        latest: the loader asked last for a batch, for whatever purpose.
        optimizers: how many take part.
        number: windows begun.
        learned: the micro-batch in work was backpropagated.
        stepped: an optimizer has stepped (or would have, before the boundary) since the micro-batch began.
        replaying: the batch in hand is a replay on a rank that has run dry: it must leave no trace.
    """

    def __init__(self, every: int, processes: Processes, device: torch.device, *, resident: bool) -> None:
        self.every = every
        self.boundary = True
        self.forced: bool | None = None
        self.weighted = True
        self.plain = every == 1 and processes.world == 1
        self.flags = [False, False]
        self.agreed = [False, False]
        self.feed: Any = None
        self.latest: Any = None
        self.number = 0
        self.optimizers = 0
        self.learned = False
        self.stepped = False
        self.replaying = False
        self.processes = processes
        self._device = device
        self._resident = resident
        self._loaders: list[_Watched] = []
        self._micro = 0
        self._open = False
        self._by_hand = False
        self._postponed: set[int] = set()
        self._ordinal = 0
        self._references: list[Weight] = []
        self._totals: list[Weight] = []
        self._share: float | None = None
        self._sources: list[Any] = []
        self._given_up = False
        self._earlier = False
        self._drained = False
        self._samples = 1.0
        self._factor: float | torch.Tensor | None = None
        self.loss_bad = False
        self.probe: torch.Tensor | None = None
        self.flags_on_device: torch.Tensor | None = None
        self._wishes: torch.Tensor | None = None
        self.tape: list[Callable[[], None]] | None = None

    @property
    def inside(self) -> bool:
        """More micro-batches are to come before the next update; not so once the training loader was left."""
        return not self.boundary and (self._by_hand or self.feed is None or self.feed.live)

    @property
    def waiting(self) -> bool:
        """Gradients of this window's earlier micro-batches lie in the parameters.

        With several optimizers, a backward of the micro-batch in work may have been for another one.
        """
        if self._earlier or not self.learned or self.boundary:
            return self._earlier
        return self.optimizers == 1 or any(
            loader.live and loader.with_grad and loader.handed_out != entry.seen
            for entry in self._loaders
            if (loader := entry.loader()) is not None
        )

    @property
    def at_rest(self) -> bool:
        """Nothing waits for an update."""
        # with one micro-batch a window, who steps more rarely sums gradients up by hand, as in plain PyTorch
        over = self.every == 1 or self.stepped or self._given_up
        return self._micro == 0 or (self.boundary and over)

    def watch(self, loader: Any) -> None:
        """Let `loader` be one of those that may feed training."""
        self._loaders.append(_Watched(weakref.ref(loader), loader.handed_out))

    def come_forward(self, loader: Any) -> None:
        """`loader` is asked for a batch: it is the latest, and last in the list."""
        self.latest = loader
        self._loaders.sort(key=lambda entry: entry.loader() is loader)

    def in_hand(self) -> Any:
        """The loader whose batch the script is working on: of those now iterated over, the one asked last."""
        if self.latest is not None and self.latest.live:
            return self.latest
        found = [loader for entry in self._loaders if (loader := entry.loader()) is not None and loader.live]
        return found[-1] if found else None

    def enter(self) -> None:
        """A training forward or a backward begins: open a new micro-batch if the feed has moved on."""
        if self._by_hand:
            return
        if self._follow(self._moved()) or not self._open or (self._drained and self.stepped):
            self.begin()

    def open_by_hand(self) -> None:
        """Open a micro-batch that lasts until `close_by_hand`, whatever loaders do meanwhile."""
        self._follow(self._moved())
        self._by_hand = True
        self.begin()

    def close_by_hand(self) -> None:
        """End a micro-batch opened by hand."""
        self._by_hand = False

    def _moved(self) -> list[Any]:
        """Loaders that handed out a batch for learning since this was asked last; the one asked last comes last."""
        moved = []
        for entry in self._loaders:
            loader = entry.loader()
            if loader is None or loader.handed_out == entry.seen:
                continue
            entry.seen = loader.handed_out
            if loader.with_grad:
                moved.append(loader)
        return moved

    def _follow(self, moved: list[Any]) -> bool:
        """Note which of the loaders that handed out a batch feeds training; False if none of them does.

        An evaluation between two training steps, or inside one, leaves the training loader in the lead, also
        when it was abandoned half way.
        """
        live = [loader for loader in moved if loader.live]
        feed = self.feed
        if not live:
            if feed is not None and not feed.live and self._sources:
                # a script that fetches ahead has batches in hand after the loader has ended: the next one is its last
                self._sources, self._drained = [], True
            return False
        if not any(loader is feed for loader in live):
            if feed is not None and feed.live and not self.stepped:
                return False
            self.feed = live[-1]
        self._sources, self._drained = live, False
        return True

    def begin(self) -> None:
        """Open the next micro-batch."""
        if self.at_rest:
            self._micro, self._totals = 0, []
            self.number += 1
            self._earlier = False
            self._postponed.clear()
        elif self.learned:
            self._earlier = True
        self._micro += 1
        self._ordinal, self._share = 0, None
        self._open = True
        self.learned = self.stepped = self._given_up = False
        self._factor = None
        self._samples = float(self.feed.batch_samples) if self._sources or self._drained else 1.0
        last, self._drained = self._drained, False
        self.replaying = False
        for loader in self._sources:
            last = last or loader.at_last
            self.replaying = self.replaying or loader.is_replay
        self.boundary = self.forced if self.forced is not None else (self._micro >= self.every or last)

    def end(self) -> None:
        """An optimizer has stepped or would have: without a loader, the next backward is a new micro-batch."""
        self.stepped = True
        self._share = None
        if not self._by_hand and (self.feed is None or not self.feed.live):
            self._open = False

    def postpone(self, updates: object) -> None:
        """An optimizer would have stepped, but more micro-batches are to come."""
        self._postponed.add(id(updates))
        self.end()

    def take_turn(self, updates: object) -> None:
        """One of several optimizers is about to step at the end of a window.

        Raises:
            DataError: others had their turn in the micro-batches before, and nothing says where a batch ends.
        """
        unmarked = self.feed is None and self.forced is None and not self._by_hand
        if unmarked and self._postponed and id(updates) not in self._postponed:
            raise DataError(
                f"accumulation={self.every} with several optimizers that step in turn: each backward was taken for a "
                "batch of its own, and some optimizer would never step. Take batches from a prepared loader, or put "
                "`with loop.accumulate():` around each batch"
            )

    def give_up(self) -> None:
        """The gradients of this window were cleared at its end instead of being used."""
        self._given_up = True

    def weigh(self, loss: torch.Tensor, weight: Weight | None) -> torch.Tensor:
        """The loss to backpropagate for this micro-batch: loss * n_i / n_ref.

        The k-th backward of each micro-batch has a sum of weights and a reference of its own, for scripts with
        several losses and optimizers.
        """
        self._factor = None
        self.learned = True
        if not self.weighted:
            return loss
        if weight is None:
            weight = self._samples
        replay = self.replaying
        if replay:
            weight = 0.0
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().to(self._device, torch.float64, non_blocking=True).reshape(())
        elif not weight >= 0:
            raise DataError(
                f"backward(weight={weight!r}): a batch cannot be a mean over that many samples or tokens"
            )
        ordinal = self._ordinal
        self._ordinal += 1
        if ordinal >= len(self._references):
            self._references.append(self._agree_reference(weight))
        self._account(ordinal, weight)
        if self.tape is not None:
            if isinstance(weight, torch.Tensor):
                raise CaptureError("a captured window needs weights that are numbers, or accumulation=1")
            self.tape.append(functools.partial(self._account, ordinal, weight))
        if replay:
            # where, not a product: a replayed loss may be anything, and NaN * 0 is NaN
            return torch.where(
                torch.zeros((), dtype=torch.bool, device=loss.device), loss, torch.zeros_like(loss)
            )
        reference = self._references[ordinal]
        if isinstance(weight, torch.Tensor) or isinstance(reference, torch.Tensor):
            return loss * torch.as_tensor(weight / reference).to(loss.dtype)
        share = weight / reference
        if self._share is not None and abs(share - self._share) > 1e-12 * max(share, self._share):
            raise DataError(
                f"backward(weight={weight!r}): the backward before it in this micro-batch had a weight in another "
                "proportion to its first one, so that no one factor makes the sum of both gradients a mean; add the "
                "losses and backpropagate once, or step the optimizer of the first before the second backward"
            )
        self._share = share
        return loss if weight == reference else loss * share

    def marks(self) -> tuple[Any, ...]:
        """What recording a micro-batch changes here, to be put back."""
        return (list(self._totals), self._ordinal, self._factor, self.learned, self._share)

    def put_marks(self, marks: tuple[Any, ...]) -> None:
        """Put `marks` back."""
        self._totals, self._ordinal, self._factor, self.learned, self._share = marks

    def _account(self, ordinal: int, weight: Weight) -> None:
        """Count the weight of a micro-batch."""
        self._totals += [0.0] * (ordinal + 1 - len(self._totals))
        self._totals[ordinal] = self._totals[ordinal] + weight
        self._ordinal = max(self._ordinal, ordinal + 1)
        self.learned = True
        self._factor = None

    def _agree_reference(self, weight: Weight) -> Weight:
        """n_ref: the weight of the first batch, the same on every rank; 1 if that is a mean over nothing."""
        if self.processes.world == 1:
            return _or_one(weight)
        import torch.distributed as dist

        box = torch.zeros(1, dtype=torch.float64, device=self._device)
        box.copy_(weight.reshape(1)) if isinstance(weight, torch.Tensor) else box.fill_(weight)
        # a rank that starts with a replay has no weight of its own; the largest is as good as the first
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return _or_one(box[0] if self._resident else box.item())

    def frozen(self) -> tuple[Any, ...]:
        """What a recording of the micro-batch now open freezes: its place, its weight, the window's sum before it."""
        return (
            self.boundary,
            self.replaying,
            self._samples,
            tuple(self._totals) if self.boundary and self._micro > 1 else None,
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
            self._factor = self._divide(self._total())
        else:
            self._factor = 1.0
        return self._factor

    def _total(self) -> Weight:
        """The sum of weights of the backward made last, over the window so far."""
        at = max(self._ordinal, 1) - 1
        return self._totals[at] if at < len(self._totals) else 0.0

    def _divide(self, total: Weight) -> float | torch.Tensor:
        reference = self._references[max(self._ordinal, 1) - 1]
        if isinstance(total, torch.Tensor) or isinstance(reference, torch.Tensor):
            # a window of nothing but empty batches has gradients of 0, whatever they are multiplied by
            factor = torch.as_tensor(self.processes.world * reference / _or_one(total))
            return factor if self._resident else factor.item()
        return self.processes.world * reference / _or_one(total)

    def _reduce(self) -> float | torch.Tensor:
        import torch.distributed as dist

        box = torch.zeros(4, dtype=torch.float64, device=self._device)
        mine = self._total()
        if isinstance(mine, torch.Tensor):
            box[0].copy_(mine)
        elif mine:
            box[0].fill_(mine)
        if not self._resident:
            box[1], box[2], box[3] = float(self.loss_bad), float(self.flags[0]), float(self.flags[1])
            dist.all_reduce(box)
            self.flags = [False, False]
            total, bad, stop, due = box.tolist()
            self.loss_bad = bad > 0
            self.agreed = [self.agreed[0] or stop > 0, self.agreed[1] or due > 0]
            return self._divide(total) if self.weighted and self._references else 1.0
        if self.probe is not None:
            # NaN where a loss was not finite: the sum carries it to every rank
            box[1].copy_(self.probe)
        if self._wishes is not None:
            box[2:4].copy_(self._wishes)
        for i, flag in enumerate(self.flags):
            # a recording has them sent by `send_wishes`: what is written here it would write for ever
            if flag and self.tape is None:
                box[2 + i].fill_(1.0)
        dist.all_reduce(box)
        if self._wishes is not None:
            self._wishes.zero_()
        if self.probe is not None:
            self.probe.copy_(box[1])
        if self.tape is None:
            self.flags = [False, False]
        self.flags_on_device = box[2:4]
        return self._divide(box[0]) if self.weighted and self._references else 1.0

    def send_wishes(self) -> None:
        """Put this rank's flags where a recorded sum finds them, before it is replayed."""
        if self._wishes is None:
            self._wishes = torch.zeros(2, dtype=torch.float64, device=self._device)
        for i, flag in enumerate(self.flags):
            if flag:
                self._wishes[i].fill_(1.0)
        self.flags = [False, False]

    def state_dict(self) -> dict[str, Any]:
        """Where in the window training is; waits for the device if weights lie there."""
        references = [float(r) for r in self._references]
        return {
            "micro": 0 if self.at_rest else self._micro,
            "totals": [float(total) for total in self._totals],
            "references": references,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._micro, self._totals = int(state["micro"]), list(state["totals"])
        self._references = list(state["references"])
        self.boundary = self._micro == 0
        self._earlier = self._micro > 1
        self.learned = self._micro > 0
        self.stepped = self._given_up = False
        self._open = False
        self._factor = None
        self._share = None


def _or_one(weight: Weight) -> Weight:
    """`weight`, or 1 where it is 0."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, weight, torch.ones_like(weight))
    return weight or 1.0
