"""A rate as a torch scheduler: learning rate, momentum and weight decay of each group, one step for each update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hotloop.errors import OptimizerError, SettingError
from hotloop.optim.rates import ROUNDING, Rate

__all__ = ["RateScheduler"]


class RateScheduler(LRScheduler):
    """Gives the groups of `optimizer` what `rates` say, at the time that has passed after each `step`.

    It is a torch scheduler: call `step` after each update, save and load its state, put it into SequentialLR or
    ChainedScheduler, prepare it with a Loop. There its values lie in a table on the device.

    Args:
        rates: one for all groups, or one for each group, in their order.
        per_step: how much time one update takes: for a rate in epochs `1 / len(loader)`, in samples the batch size, in
            tokens the tokens of a batch; a function of the update's number where that changes. Steps need none.
        factor: what the learning rate of the update with this number is multiplied by, as where batches change size;
            `hotloop.data.Resizing.scheduler` gives that.
        relative: the rates are factors of what each group's learning rate is now. Such schedulers chain: another one
            on the same optimizer, or a change by hand, goes on to count as a factor, but not while the rate is 0 or is
            a tensor on another device than the CPU. Otherwise a rate is the learning rate itself, whatever it was.

    Raises:
        SettingError: a rate that is not in steps comes without `per_step`, that is not above 0, units differ, or what
            is given is no Rate or no function.
        OptimizerError: there are not as many rates as groups, also after a group was added, or one has a momentum and
            its group has none.

    >>> from hotloop.optim import rates
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    >>> scheduler = RateScheduler(optimizer, rates.linear(0.0, 0.4, 4))
    >>> for _ in range(4):
    ...     optimizer.step(); scheduler.step()
    >>> scheduler.get_last_lr()
    [0.4]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rates: Rate | Sequence[Rate],
        *,
        per_step: float | Callable[[int], float] | None = None,
        factor: Callable[[int], float] | None = None,
        relative: bool = False,
        last_epoch: int = -1,
    ) -> None:
        groups = optimizer.param_groups
        several: list[Any] = list(rates) if isinstance(rates, Iterable) else [rates] * len(groups)
        if any(not isinstance(rate, Rate) for rate in several):
            raise SettingError(f"rates={rates!r}: give a Rate, or one for each group; constant(0.1) is one")
        if factor is not None and not callable(factor):
            raise SettingError(
                f"factor={factor!r} must be a function of the update's number: rate.scaled multiplies"
            )
        self.rates: list[Rate] = several
        if len(self.rates) != len(groups):
            raise OptimizerError(
                f"{len(self.rates)} rates for the {len(groups)} groups of {type(optimizer).__name__}: give one, or one "
                "for each group in order"
            )
        units = sorted({rate.unit for rate in self.rates})
        if len(units) > 1:
            raise SettingError(
                f"rates in {' and '.join(units)} cannot share one scheduler; convert with counted_in"
            )
        if per_step is None and units != ["steps"]:
            raise SettingError(
                f"a rate in {units[0]} needs per_step: how many {units[0]} one update takes"
                + (", such as 1 / len(loader)" if units == ["epochs"] else "")
            )
        for rate, group in zip(self.rates, groups, strict=True):
            if rate.momentum is not None and not {"momentum", "betas"} & group.keys():
                raise OptimizerError(
                    f"{type(optimizer).__name__} has neither momentum nor betas to cycle: leave the momentum "
                    "alone with rate.with_momentum(None)"
                )
            if rate.weight_decay is not None and "weight_decay" not in group:
                raise OptimizerError(f"{type(optimizer).__name__} has no weight decay to change")
        if per_step is not None and not callable(per_step) and not 0.0 < per_step < math.inf:
            raise SettingError(f"per_step={per_step} must be above 0: how much time one update takes")
        self.per_step = 1.0 if per_step is None else per_step
        self.factor = factor
        self.relative = relative
        # where a variable per_step has brought it: update number, time, and what the sum has lost to rounding
        self._at = (0, 0.0, 0.0)
        # updates, and time, by which a state of other batches was further than as many updates of these
        self._ahead, self._shift = 0, 0.0
        self._factors = [1.0] * len(groups)
        self._set: list[float | None] = [None] * len(groups)
        # learning rates in force when a state was loaded: where they still are, nobody has changed them since
        self._stale: list[Any] = [None] * len(groups)
        super().__init__(optimizer, last_epoch)

    @property
    def moves(self) -> frozenset[str]:
        """What it moves beside the learning rate: of "momentum", "betas" and "weight_decay"."""
        pairs = list(zip(self.rates, self._groups(), strict=True))
        found = {
            "betas" if "betas" in group else "momentum" for rate, group in pairs if rate.momentum is not None
        }
        return frozenset(found | {"weight_decay" for rate, _ in pairs if rate.weight_decay is not None})

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        if len(groups) != len(self.rates):
            raise OptimizerError(
                f"the {type(self.optimizer).__name__} has {len(groups)} groups now, and had {len(self.rates)} when its "
                "RateScheduler was made: add groups first, or make a new one"
            )
        return groups

    @property
    def time(self) -> float:
        """The time now, in the unit of the rates."""
        return self._time(self._place) + self._shift

    @property
    def _place(self) -> int:
        """The number of the update to come, counted in batches as they are now."""
        return max(self.last_epoch, 0) + self._ahead

    def _time(self, step: int) -> float:
        if not callable(self.per_step):
            return step * self.per_step
        done, time, lost = self._at
        if done > step:
            done, time, lost = 0, 0.0, 0.0
        while done < step:
            # compensated (Kahan 1965): a million batches add up to whole epochs
            more = self.per_step(done) + lost
            total = time + more
            time, lost, done = total, more - (total - time), done + 1
        self._at = (done, time, lost)
        return time

    def get_lr(self) -> list[float | torch.Tensor]:
        """Learning rates for the time now; sets momentum and weight decay on the way, as torch's OneCycleLR does."""
        return self._rates_now(chained=self.relative)

    def _get_closed_form_lr(self) -> list[float | torch.Tensor]:
        if self.last_epoch == 0:
            self._ahead, self._shift = 0, 0.0
        return self._rates_now(chained=False)

    def _rates_now(self, *, chained: bool) -> list[float | torch.Tensor]:
        time = self.time
        more = 1.0 if self.factor is None else self.factor(self._place)
        found: list[float | torch.Tensor] = []
        for i, (rate, group) in enumerate(zip(self.rates, self._groups(), strict=True)):
            value = rate(time) * more
            if self.relative:
                base = float(self.base_lrs[i])
                if not chained or self._is_initial:
                    # SequentialLR begins its first part twice, and each later one with the rates first given
                    self._factors[i], self._set[i] = 1.0, None
                    if chained and self.last_epoch == 0 and _read(group["lr"]):
                        self._set[i] = base
                value *= base
                if chained:
                    self._factors[i] *= self._by_others(i, group["lr"])
                    value *= self._factors[i]
                self._stale[i], self._set[i] = None, value
            found.append(value)
        self.put_others()
        return found

    def put_others(self) -> None:
        """Set momentum and weight decay of the groups to what they are at the time now."""
        time = self.time
        for rate, group in zip(self.rates, self._groups(), strict=True):
            if rate.momentum is not None:
                _set_momentum(group, rate.momentum(time))
            if rate.weight_decay is not None:
                _set(group, "weight_decay", rate.weight_decay(time))

    def _by_others(self, i: int, lr: Any) -> float:
        """What anybody else has multiplied the learning rate by since it was set here."""
        mine, now = self._set[i], _read(lr)
        # after a zero nothing can be told
        if not mine or now is None or now in (mine, self._stale[i]) or not math.isfinite(now):
            return 1.0
        if isinstance(lr, torch.Tensor) and abs(now - mine) <= torch.finfo(lr.dtype).eps * abs(mine):
            return 1.0
        return now / mine

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as plain numbers; the rates themselves are the program's."""
        # what others did since the last step counts here, or it would be lost with the optimizer loaded first
        groups = self._groups()
        others = [self._by_others(i, group["lr"]) for i, group in enumerate(groups)]
        return {
            "last_epoch": self.last_epoch,
            "time": self.time,
            "ahead": self._ahead,
            "shift": self._shift,
            "_step_count": self._step_count,
            "_last_lr": [float(lr) for lr in self._last_lr],
            "base_lrs": [float(lr) for lr in self.base_lrs],
            "factors": [mine * other for mine, other in zip(self._factors, others, strict=True)],
            "set": [
                mine if other == 1.0 else float(group["lr"])
                for mine, other, group in zip(self._set, others, groups, strict=True)
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` returned; the groups keep their rates until the next `step`, as in torch.

        The time goes on from where it was, also where an update takes more or less of it now, as with another batch
        size; a `per_step` or `factor` that depends on the update's number is then asked for that of this time.

        Raises:
            OptimizerError: it is another scheduler's, or one of another number of groups.
        """
        if "factors" not in state_dict or len(state_dict["factors"]) != len(self.rates):
            found = f"{len(state_dict['factors'])} groups" if "factors" in state_dict else "another scheduler"
            raise OptimizerError(f"the state is that of {found}, not of a RateScheduler of {len(self.rates)}")
        self._stale = [_read(group["lr"]) for group in self.optimizer.param_groups]
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["_step_count"]
        self._last_lr = list(state_dict["_last_lr"])
        self.base_lrs = list(state_dict["base_lrs"])
        self._factors = list(state_dict["factors"])
        self._set = list(state_dict["set"])
        self._at = (0, 0.0, 0.0)
        self._ahead, self._shift = state_dict.get("ahead", 0), state_dict.get("shift", 0.0)
        self._go_on_from(state_dict.get("time", self.time))

    def _go_on_from(self, time: float) -> None:
        """Count from the first update that begins at `time` or later."""
        slack = ROUNDING * time
        if abs(self.time - time) <= slack:
            return
        made = max(self.last_epoch, 0)
        if callable(self.per_step):
            place, furthest = 0, 1000 * (made + 1)
            while self._time(place) < time - slack and place < furthest:
                place += 1
        else:
            place = math.ceil((time - slack) / self.per_step)
        self._ahead, self._shift = place - made, time - self._time(place)


def _read(lr: Any) -> float | None:
    """A learning rate as a number; None for a tensor on a device that reading it would wait for."""
    return float(lr) if not isinstance(lr, torch.Tensor) or lr.device.type == "cpu" else None


def _set_momentum(group: dict[str, Any], value: float) -> None:
    if "betas" in group:
        first, *others = group["betas"]
        if isinstance(first, torch.Tensor):
            first.fill_(value)
        else:
            group["betas"] = (value, *others)
    else:
        _set(group, "momentum", value)


def _set(group: dict[str, Any], name: str, value: float) -> None:
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value
