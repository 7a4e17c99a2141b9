"""Averages of the weights over the course of training, kept and counted on the device.

Exponential: Polyak & Juditsky (1992), "Acceleration of Stochastic Approximation by Averaging". Equal weights: Izmailov
et al. (2018), "Averaging Weights Leads to Wider Optima and Better Generalization".
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.errors import OptimizerError
from hotloop.optim.masters import is_sixteen_bit, masters_of

__all__ = ["EMA", "AveragedWeights"]

_BUFFERS = ("copy", "average")


class _Average(ABC):
    """Averages of a model's parameters, and what one update of them does; the share of the newest differs."""

    def __init__(self, model: nn.Module, *, optimizer: Any, every: int, buffers: str) -> None:
        if buffers not in _BUFFERS:
            raise OptimizerError(f"buffers={buffers!r} is not known; valid: {', '.join(map(repr, _BUFFERS))}")
        if every < 1 or every != int(every):
            raise OptimizerError(f"every={every} must be a whole number, at least 1")
        self._model = model
        self._optimizer = optimizer
        self._average_buffers = buffers == "average"
        self._seen = _issued(optimizer)
        parameters = dict(model.named_parameters())
        if not parameters:
            raise OptimizerError(f"{type(model).__name__} has no parameters to average")
        device = next(iter(parameters.values())).device
        self.averages = {name: _wide_copy(p) for name, p in parameters.items()}
        self.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        # where they are found anew: a forward may put another buffer in the place
        self._places = [_place(model, name, "_parameters") for name in self.averages]
        self._buffer_places = [_place(model, name, "_buffers") for name in self.buffers]
        # one line of numbers: averaged so far, and calls; float64 counts exactly for longer than any run
        wide = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        self._numbers = torch.zeros(3, dtype=wide, device=device)
        self._averaged, self._calls, self._every = self._numbers
        self._every.fill_(float(every))

    def __getstate__(self) -> dict[str, Any]:
        # pickle keeps no two tensors in one memory
        return {k: v for k, v in self.__dict__.items() if k not in ("_averaged", "_calls", "_every")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._averaged, self._calls, self._every = self._numbers

    @abstractmethod
    def _share(self, averaged: Tensor) -> Tensor:
        """The share of the newest weights when `averaged` have been averaged before, 0-d; 1 copies them."""

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's weights as they are now; call it after `optimizer.step()`.

        Nothing is waited for and no number is frozen, so it may stand in a captured step. With `optimizer` given, an
        update that was refused, and a step inside an accumulation window, are no updates.

        Raises:
            OptimizerError: a parameter or buffer has another shape than when its average was made.
        """
        refuse = self._refused()
        if refuse is True:
            return
        made = torch.ones_like(self._calls)
        if isinstance(refuse, Tensor):
            made = made - refuse.reshape(())
        # 1 where this call averages
        turn = torch.where(self._calls % self._every == 0, made, 0.0)
        share = self._share(self._averaged) * turn
        newest = [holder[key] for holder, key in self._places]
        masters = None if self._optimizer is None else masters_of(self._optimizer)
        if masters is not None:
            newest = [p if (master := masters.get(p)) is None else master for p in newest]
        parameters = [
            (name, mine, live) for (name, mine), live in zip(self.averages.items(), newest, strict=True)
        ]
        buffers = [
            (name, mine, live)
            for (name, mine), (holder, key) in zip(self.buffers.items(), self._buffer_places, strict=True)
            if (live := holder.get(key)) is not None
        ]
        averaged: list[tuple[Tensor, Tensor]] = []
        copied: list[tuple[Tensor, Tensor]] = []
        for taken, average in ((parameters, True), (buffers, self._average_buffers)):
            for name, mine, live in taken:
                _check_shape(name, mine, live)
                # integers, such as quantized weights, have no average
                blends = average and (mine.is_floating_point() or mine.is_complex())
                (averaged if blends else copied).append((mine, live))
        _blend([mine for mine, _ in averaged], [live for _, live in averaged], share)
        flag = turn.bool()
        for mine, live in copied:
            torch.where(flag, live, mine, out=mine)
        self._averaged.add_(turn)
        self._calls.add_(made)

    def _refused(self) -> Tensor | bool:
        """Whether there is nothing to average now: True, or a flag on the device."""
        updates = getattr(self._optimizer, "_hotloop_updates", None)
        if updates is None:
            return False
        issued = _issued(self._optimizer)
        before, self._seen = self._seen, issued
        if issued == before:
            return True
        verdict = getattr(updates, "verdict", None)
        if verdict is None:
            return bool(updates.refused)
        return verdict.refuse if updates.watching else False

    @property
    def averaged(self) -> int:
        """How many times weights were taken in; waits for the device."""
        return int(self._averaged.item())

    # -------------------------------------------------------------------------------------------- used

    @torch.no_grad()
    def copy_to(self, model: nn.Module | None = None) -> None:
        """Write the averages, and the buffers that belong to them, into `model` (default: the one averaged).

        Raises:
            OptimizerError: the model lacks one of them, or has it in another shape.
        """
        target = self._model if model is None else model
        live = {**dict(target.named_parameters()), **dict(target.named_buffers())}
        mine = {**self.averages, **self.buffers}
        missing = sorted(mine.keys() - live.keys())
        if missing:
            raise OptimizerError(
                f"{type(target).__name__} has no {missing[0]!r}: the averages are of a {type(self._model).__name__}"
            )
        for name, value in mine.items():
            _check_shape(name, value, live[name])
        for name, value in mine.items():
            live[name].copy_(value)

    @contextmanager
    def applied(self, model: nn.Module | None = None) -> Iterator[nn.Module]:
        """The model with averaged weights inside, with its own, to the bit, afterwards; for evaluation.

        Values are exchanged in place: addresses, optimizers and captured steps stay valid.
        """
        target = self._model if model is None else model
        live = [*target.parameters(), *target.buffers()]
        kept = [t.detach().clone() for t in live]
        try:
            self.copy_to(target)
            yield target
        finally:
            with torch.no_grad():
                for tensor, value in zip(live, kept, strict=True):
                    tensor.copy_(value)

    def model(self) -> nn.Module:
        """An independent copy of the model with averaged weights, in evaluation mode."""
        made = copy.deepcopy(self._model)
        self.copy_to(made)
        return made.eval()

    # -------------------------------------------------------------------------------------------- saved

    def state_dict(self) -> dict[str, Any]:
        """Averages (float32 for 16-bit parameters), buffers and counts."""
        return {
            "averages": dict(self.averages),
            "buffers": dict(self.buffers),
            "counts": self._numbers[:2].clone(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned, in place.

        Raises:
            OptimizerError: it is of another model.
        """
        if missing := {"averages", "buffers", "counts"} - state.keys():
            raise OptimizerError(f"this is not the state of averages: it has no {min(missing)!r}")
        for kind, mine in (("averages", self.averages), ("buffers", self.buffers)):
            saved = state[kind]
            if saved.keys() != mine.keys() or any(saved[n].shape != mine[n].shape for n in mine):
                odd = sorted(saved.keys() ^ mine.keys()) or [
                    n for n in mine if saved[n].shape != mine[n].shape
                ]
                raise OptimizerError(
                    f"the saved {kind} are of another model than this: they differ in {odd[0]!r}"
                )
            for name, value in mine.items():
                value.copy_(saved[name])
        self._numbers[:2].copy_(state["counts"])
        self._seen = _issued(self._optimizer)


class EMA(_Average):
    """Exponential moving average of a model's weights: average <- d average + (1 - d) weights.

    The first update copies the weights. With `warmup`, update number n takes d = min(decay, n / (n + 9)) for n counted
    from 1, so that an average of few updates is not mostly the first weights.

    Args:
        model: whose parameters are averaged; it stays as it is.
        decay: d, in [0, 1).
        warmup: begin with a smaller d.
        optimizer: the model's, prepared by a loop or not: updates that were refused are not averaged, and where it
            keeps masters, those are averaged.
        every: average at every so many calls of `update`.
        buffers: "copy" keeps those of the model as of the last update; "average" averages floating ones, such as the
            statistics of batch norm.

    Raises:
        OptimizerError: a setting out of its range.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> ema = EMA(model, decay=0.5)
    >>> for value in (1.0, 3.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     ema.update()
    >>> with ema.applied():
    ...     model.weight.item()
    2.0
    >>> model.weight.item()
    3.0
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        warmup: bool = False,
        optimizer: Any = None,
        every: int = 1,
        buffers: str = "copy",
    ) -> None:
        super().__init__(model, optimizer=optimizer, every=every, buffers=buffers)
        self._warmup = warmup
        self._decay = torch.zeros_like(self._calls)
        self.decay = decay

    @property
    def decay(self) -> float:
        """d; may be set at any time, also between replays of a captured step. Reading it waits for the device."""
        return float(self._decay.item())

    @decay.setter
    def decay(self, value: float) -> None:
        if not 0.0 <= value < 1.0:
            raise OptimizerError(f"EMA: decay={value!r} must be in [0, 1)")
        self._decay.fill_(value)

    def _share(self, averaged: Tensor) -> Tensor:
        decay = self._decay
        if self._warmup:
            # the n of the docstring is averaged + 1; the first one copies below
            decay = torch.minimum(decay, (averaged + 1.0) / (averaged + 10.0))
        return torch.where(averaged == 0, 1.0, 1.0 - decay)


class AveragedWeights(_Average):
    """Mean, with equal weights, of a model's weights at each call of `update`: stochastic weight averaging.

    Statistics of batch norm do not average: renew them with a pass over the data, as
    `torch.optim.swa_utils.update_bn(loader, averaged.model())` does. Arguments are those of `EMA`.
    """

    def __init__(
        self, model: nn.Module, *, optimizer: Any = None, every: int = 1, buffers: str = "copy"
    ) -> None:
        super().__init__(model, optimizer=optimizer, every=every, buffers=buffers)

    def _share(self, averaged: Tensor) -> Tensor:
        return 1.0 / (averaged + 1.0)


def _place(model: nn.Module, name: str, table: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    return getattr(model.get_submodule(path), table), key


def _check_shape(name: str, mine: Tensor, live: Tensor) -> None:
    if mine.shape != live.shape:
        raise OptimizerError(
            f"{name!r} has shape {list(live.shape)}, and its average {list(mine.shape)}: make the averages once a "
            "tensor that grows has its size"
        )


def _wide_copy(parameter: Tensor) -> Tensor:
    dtype = torch.float32 if is_sixteen_bit(parameter) else parameter.dtype
    return parameter.detach().to(dtype, memory_format=torch.preserve_format, copy=True)


def _issued(optimizer: Any) -> int:
    """Updates that a prepared optimizer has made, refused or put into a recording; 0 for one that is not prepared."""
    updates = getattr(optimizer, "_hotloop_updates", None)
    return int(getattr(updates, "issued", getattr(updates, "attempted", 0)))


def _blend(averages: list[Tensor], newest: list[Tensor], share: Tensor) -> None:
    """averages += share (newest - averages); 0 leaves them to the bit."""
    by_kind: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for average, new in zip(averages, newest, strict=True):
        mine, theirs = by_kind.setdefault(average.dtype, ([], []))
        mine.append(average)
        theirs.append(new.detach() if new.dtype == average.dtype else new.detach().to(average.dtype))
    for dtype, (mine, theirs) in by_kind.items():
        weight = share.to(dtype)
        if weight.device.type == "cpu":
            torch._foreach_lerp_(mine, theirs, [weight] * len(mine))
            continue
        # multi-tensor lerp takes no tensor for a number; this form has no bias, whatever 1 - share rounds to
        moves = torch._foreach_sub(theirs, mine)
        torch._foreach_mul_(moves, weight)
        torch._foreach_add_(mine, moves)
