"""The range test on a Loop: a few steps with growing rates, after which everything is as it was before."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop.errors import NonFiniteError, SettingError
from hotloop.optim.range_test import RangeTest, Sweep

__all__ = ["find_rate", "proportions_of", "put_rate"]


class _Trains(Protocol):
    """What is used of a Loop."""

    def backward(self, loss: torch.Tensor) -> None: ...

    def update(self, optimizer: Any) -> Any: ...

    def reduce(self, data: Any, how: str = "sum") -> Any: ...

    def read(self, value: Any) -> Any: ...

    def _trial(self) -> AbstractContextManager[Callable[[], bool]]: ...


def find_rate(
    loop: _Trains,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    loader: Iterable[Any] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    step: Callable[..., torch.Tensor] | None = None,
    low: float = 1e-7,
    high: float = 10.0,
    steps: int = 100,
    smoothing: float = 0.9,
    stop: float = 4.0,
) -> RangeTest:
    """Range test (Smith 2017): make `steps` updates while the learning rate grows from `low` to `high`.

    Model, optimizer and loader are prepared; pass the loss function `loss(model(x), y)` for batches (x, y), or instead
    of model and loss your own `step(*batch)`, which makes one update and returns its loss (captured or not, with
    a scheduler or not). With accumulation an update takes several batches, and its loss is their mean. Afterwards
    everything prepared is as it was, bit for bit: weights, buffers, optimizer, schedules, random streams, the loader's
    position.

    Args:
        loop: the Loop.
        optimizer: whose rate grows. Groups with other rates keep their proportion; `low` and `high` are those of the
            group with the highest.
        loader: gives the batches, over and over if it is short.
        low, high, steps: the rates that are tried: they grow by the same factor each step.
        smoothing: share of the running mean of the loss that stays each step.
        stop: the test ends early once the smoothed loss is this many times its lowest value.

    Raises:
        SettingError: arguments that do not go together.
        DataError: the loader is in the middle of an epoch, or gives no batch.
    """
    if optimizer is None or loader is None:
        raise SettingError("find_rate needs the optimizer and the loader")
    if (step is None) == (model is None or loss is None):
        raise SettingError("find_rate needs either model and loss, or step")
    sweep = Sweep(low, high, steps, smoothing, stop)
    proportions = proportions_of(optimizer)
    ended = ""
    losses: list[float] = []
    with loop._trial() as inside:
        if model is not None:
            model.train()
        batches = _over_and_over(loader)
        try:
            for batch in batches:
                put_rate(optimizer, [sweep.next_rate() * share for share in proportions])
                if step is not None:
                    value = step(*batch) if isinstance(batch, list | tuple) else step(batch)
                    now = _mean_over_ranks(loop, value)
                else:
                    assert model is not None
                    assert loss is not None
                    x, y = batch
                    value = loss(model(x), y)
                    now = _mean_over_ranks(loop, value)
                    if math.isfinite(now):
                        loop.backward(value)
                        loop.update(optimizer)
                losses.append(now)
                if inside() and math.isfinite(now):
                    continue
                if sweep.note(sum(losses) / len(losses)):
                    break
                losses.clear()
            else:
                ended = "the loader gave no batch"
        except NonFiniteError:
            # the loop's guard was first: gradients that are not finite, or a loss
            sweep.note(math.nan)
        finally:
            # it must not be open when its position is put back
            batches.close()
    return sweep.result(ended=ended)


def _mean_over_ranks(loop: _Trains, loss: torch.Tensor) -> float:
    """Every process must take the same loss for its own, or some would stop before the others."""
    return float(loop.read(loop.reduce(loss.detach(), "mean")))


def put_rate(optimizer: Optimizer, rates: list[float]) -> None:
    """Set each group's learning rate, in place where it is a tensor."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def proportions_of(optimizer: Optimizer) -> list[float]:
    """Each group's learning rate as a share of the highest; a schedule that begins at 0 counts by what it leads to."""
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    highest = max(rates)
    return [rate / highest for rate in rates] if highest > 0.0 else [1.0] * len(rates)


def _over_and_over(loader: Iterable[Any]) -> Generator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            return
