"""A learning-rate schedule run ahead of the training that it belongs to."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["ShadowSchedule", "is_metric_driven"]


def is_metric_driven(scheduler: Any) -> bool:
    """True for a scheduler whose next value depends on a metric, so that it cannot be run ahead."""
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def _told_moves(scheduler: Any) -> set[str]:
    """What a schedule, or a part of a sequence or chain, knows that it will move beside the rate: it may begin late."""
    found = set(getattr(scheduler, "moves", ()))
    if getattr(scheduler, "cycle_momentum", False):  # torch's OneCycleLR and CyclicLR
        found |= {"betas" if "betas" in group else "momentum" for group in scheduler.optimizer.param_groups}
    return found.union(*map(_told_moves, getattr(scheduler, "_schedulers", ())))


class _Stand(Optimizer):
    """An optimizer in name only: the groups' settings of another, without its parameters."""

    def __init__(self, model: Optimizer) -> None:
        groups = [
            {key: copy.copy(value) for key, value in group.items() if key != "params"}
            | {"params": [torch.zeros(0)]}
            for group in model.param_groups
        ]
        super().__init__(groups, dict(model.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing to step."""


class ShadowSchedule:
    """A copy of a torch scheduler on a stand-in optimizer, stepped ahead to see what comes.

    The user's scheduler, its optimizer and the parameters are not touched. Values are float64 as the
    scheduler computes them.
    """

    def __init__(self, scheduler: Any) -> None:
        optimizer = scheduler.optimizer
        self._stand = _Stand(optimizer)
        for group in self._stand.param_groups:
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and value.numel() == 1 and key != "params":
                    group[key] = value.item()
                elif key == "betas":
                    group[key] = tuple(float(beta) for beta in value)
        # the memo makes every reference to the optimizer, also inside chained schedulers, point to the stand-in
        self._scheduler = copy.deepcopy(scheduler, {id(optimizer): self._stand})
        self._stand._opt_called = True  # type: ignore[attr-defined]
        self.rows: list[list[float]] = []
        self._others: list[list[dict[str, Any]]] = []
        self._moving = _told_moves(scheduler)
        self._note_row()

    @property
    def cycles_others(self) -> bool:
        """True if the schedule moves more than the learning rate (momentum, betas, weight decay)."""
        return bool(self._moving)

    @property
    def moving(self) -> frozenset[str]:
        """What moves beside the learning rate: of "momentum", "betas" (the first one) and "weight_decay"."""
        return frozenset(self._moving)

    def run_to(self, length: int) -> list[list[float]]:
        """Step ahead until `rows` has at least `length` entries; returns the new ones.

        rows[k][g] is the learning rate of group g after k steps of the schedule. A schedule that refuses to
        go on (OneCycleLR past its end) keeps its last value.
        """
        before = len(self.rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while len(self.rows) < length:
                # past its end; the user's own scheduler says so when it is asked to go there
                with contextlib.suppress(ValueError):
                    self._scheduler.step()
                self._note_row()
        return self.rows[before:]

    def others(self, row: int) -> list[dict[str, Any]]:
        """Momentum, betas and weight decay of each group at `row`, as far as the group has them."""
        return self._others[row]

    def _note_row(self) -> None:
        groups = self._stand.param_groups
        self.rows.append([float(group["lr"]) for group in groups])
        self._others.append(
            [{k: group[k] for k in ("momentum", "betas", "weight_decay") if k in group} for group in groups]
        )
        for now, first in zip(self._others[-1], self._others[0], strict=True):
            if now != first:
                self._moving |= {name for name in now if now[name] != first[name]}
