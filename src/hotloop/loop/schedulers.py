"""What a prepared scheduler's `step` does: advance once for each update that was applied."""

from __future__ import annotations

import functools
import operator
import warnings
from typing import Any

from hotloop.loop.host_updates import HostUpdates
from hotloop.loop.resident_updates import ResidentUpdates
from hotloop.loop.window import Window
from hotloop.optim.shadow import ShadowSchedule, is_metric_driven
from hotloop.optim.skipping import device_settings, takes_device_rate
from hotloop.state.tables import ScheduleTable

__all__ = ["HostSchedule", "ResidentSchedule", "bind_scheduler"]

# Methods that prepare puts into a scheduler's attributes.
_REPLACED = ("step", "get_last_lr", "state_dict", "load_state_dict")

# Rows of the table filled at a time: a few milliseconds of Python, then nothing for as many updates.
_ROWS_AHEAD = 1024


def bind_scheduler(
    scheduler: Any, updates: HostUpdates | ResidentUpdates | None, window: Window, *, alone: bool = True
) -> HostSchedule | ResidentSchedule:
    """Let calls on `scheduler` come to the schedule returned.

    A table on the device is for a scheduler that is `alone` with its optimizer: several change one learning rate in
    turns, which no one of them can foresee.
    """
    before = getattr(scheduler.step, "__self__", None)
    if isinstance(before, HostSchedule | ResidentSchedule):
        before.remove()
    if alone and isinstance(updates, ResidentUpdates) and not is_metric_driven(scheduler):
        schedule: HostSchedule | ResidentSchedule = ResidentSchedule(scheduler, updates, window)
    else:
        schedule = HostSchedule(scheduler, updates, window)
    schedule.install()
    return schedule


class HostSchedule:
    """A schedule stepped by Python, where whether an update was applied is known or does not matter."""

    def __init__(self, scheduler: Any, updates: HostUpdates | ResidentUpdates | None, window: Window) -> None:
        self.scheduler = scheduler
        self._updates = updates
        self._window = window
        self._step = scheduler.step
        self._state_dict = scheduler.state_dict
        self._load = scheduler.load_state_dict
        self._note_counts()

    def install(self) -> None:
        """Put `step` and the state methods in place of the scheduler's own."""
        self.scheduler.step = self.step
        self.scheduler.state_dict = self.state_dict
        self.scheduler.load_state_dict = self.load_state_dict

    def remove(self) -> None:
        """Give the scheduler its own methods back."""
        _remove(self.scheduler)

    def _note_counts(self) -> None:
        updates = self._updates
        self._attempted = updates.attempted if updates is not None else 0
        self._applied = updates.applied if isinstance(updates, HostUpdates) else 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, unless inside a window or after nothing but refused updates."""
        if self._window.inside:
            return
        updates = self._updates
        if isinstance(updates, HostUpdates) and not is_metric_driven(self.scheduler):
            refused = updates.attempted > self._attempted and updates.applied == self._applied
            self._note_counts()
            if refused:
                return
        if isinstance(updates, ResidentUpdates):
            updates.state.after_step(functools.partial(self._step, *args, **kwargs))
        else:
            self._step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """State of the scheduler."""
        return _plain_state(self._state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._load(state)
        self._note_counts()


def _remove(scheduler: Any) -> None:
    for name in _REPLACED:
        scheduler.__dict__.pop(name, None)


def _plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """`state` without what prepare put into the scheduler's attributes, which torch saves wholesale."""
    return {k: v for k, v in state.items() if k not in _REPLACED}


class ResidentSchedule:
    """A schedule as a table on the device, indexed there by the number of applied updates.

    The table is filled ahead from a shadow of the user's scheduler. That scheduler itself is moved only when
    somebody asks for its state, which waits for the device.

    Momentum, betas and weight decay of a schedule that moves them lie in the table too, for optimizers that read them
    there (hotloop's own). They are Python numbers to torch's fused kernels, and so is the learning rate to optimizers
    that are neither fused nor capturable: these follow the updates that the host knows to be applied, which after a
    refused one may lag by as many as the host runs ahead.
    """

    def __init__(self, scheduler: Any, updates: ResidentUpdates, window: Window) -> None:
        self.scheduler = scheduler
        self._updates = updates
        self._window = window
        self._optimizer = updates.optimizer
        self._step = scheduler.step
        self._state_dict = scheduler.state_dict
        self._load = scheduler.load_state_dict
        self._table: ScheduleTable | None = None
        self._start()

    def _start(self) -> None:
        """Build the table from where the user's scheduler stands."""
        replaced = {
            name: self.scheduler.__dict__.pop(name) for name in _REPLACED if name in self.scheduler.__dict__
        }
        self._shadow = ShadowSchedule(self.scheduler)
        self.scheduler.__dict__.update(replaced)
        self._shadow.run_to(_ROWS_AHEAD)
        groups = self._optimizer.param_groups
        self._on_device = takes_device_rate(self._optimizer)
        carried = self._shadow.moving & device_settings(self._optimizer) if self._on_device else frozenset()
        # a column of the table each, after those of the learning rates: number of the group, name of the setting
        self._others = [
            (g, name) for g, group in enumerate(groups) for name in sorted(carried) if name in group
        ]
        self._on_host = self._shadow.moving - carried
        columns = len(groups) + len(self._others)
        if self._table is None or self._table.columns != columns:
            self._table = ScheduleTable(self._updates.state.device, columns)
            self._views = [self._table.current[c] for c in range(columns)]
        else:
            self._table.restart()
        self._extend(0)
        self._calls = 0
        self._moved = 0
        self._heard_before = self._updates.verdict.heard
        self._issued = self._updates.issued
        self._updates.host_schedule = bool(self._on_host) or not self._on_device
        self._put_in_force()

    @property
    def _filled(self) -> ScheduleTable:
        assert self._table is not None
        return self._table

    def _extend(self, first: int) -> None:
        """Give the table the shadow's rows from number `first` on."""
        rows = []
        for number in range(first, len(self._shadow.rows)):
            others = self._shadow.others(number)
            values = [others[g][name] for g, name in self._others]
            rows.append(self._shadow.rows[number] + [v[0] if isinstance(v, tuple) else v for v in values])
        self._filled.extend(rows)

    def _put_in_force(self) -> None:
        if self._on_device:
            self._filled.put_in_force()
        self._set_groups(self._known())

    def _set_groups(self, known: int) -> None:
        """Let the groups hold the table's views, or the values of row `known` where they must be on the host."""
        groups = self._optimizer.param_groups
        rates: list[Any] = self._views if self._on_device else self._shadow.rows[known]
        for group, rate in zip(groups, rates, strict=False):
            group["lr"] = rate
        for (g, name), view in zip(self._others, self._views[len(groups) :], strict=True):
            if name != "betas":
                groups[g][name] = view
            elif groups[g]["betas"][0] is not view:
                # the very same tuple at every step: a captured step that finds another looks at everything
                groups[g]["betas"] = (view, *groups[g]["betas"][1:])
        if self._on_host:
            for group, others in zip(groups, self._shadow.others(known), strict=True):
                group.update({name: others[name] for name in self._on_host if name in others})

    @property
    def in_force(self) -> bool:
        """Whether the groups hold the table's views, and nothing that somebody put in their place."""
        if not self._on_device:
            return True
        groups = self._optimizer.param_groups
        held: list[Any] = [group["lr"] for group in groups]
        for g, name in self._others:
            value = groups[g][name]
            held.append(value[0] if name == "betas" else value)
        return all(map(operator.is_, held, self._views))

    def _set_plainly(self, row: int) -> None:
        """Give the groups the numbers of that row."""
        for group, lr, others in zip(
            self._optimizer.param_groups, self._shadow.rows[row], self._shadow.others(row), strict=True
        ):
            group["lr"] = lr
            group.update({name: others[name] for name in self._shadow.moving if name in others})

    def _known(self) -> int:
        """The row in force as far as the host has heard: refused updates reach it late."""
        return max(self._calls - (self._updates.verdict.heard - self._heard_before), 0)

    def install(self) -> None:
        """Put `step`, `get_last_lr` and the state methods in place of the scheduler's own."""
        self.scheduler.step = self.step
        self.scheduler.get_last_lr = self.get_last_lr
        self.scheduler.state_dict = self.state_dict
        self.scheduler.load_state_dict = self.load_state_dict

    def remove(self) -> None:
        """Give the scheduler its own methods back, where the applied updates have brought it; waits for the device."""
        self._catch_up()
        _remove(self.scheduler)
        self._set_plainly(self._moved)
        self._updates.host_schedule = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance if the update before was applied; the device decides."""
        if self._window.inside:
            return
        made = self._updates.issued - self._issued
        self._issued = self._updates.issued
        # a step after several updates (once an epoch) advances whatever became of the last of them
        refuse = self._updates.verdict.refuse if made == 1 and self._updates.watching else None
        advance = functools.partial(self._filled.advance, refuse)
        if self._updates.behind:
            # the step that is made after the replay reads the row in force until then
            self._updates.state.after_step(advance)
        else:
            advance()
        self._updates.state.after_step(self._advance_host)

    def _advance_host(self) -> None:
        self._calls += 1
        if self._calls + 2 >= self._filled.filled:
            first = len(self._shadow.rows)
            self._shadow.run_to(self._filled.filled + _ROWS_AHEAD)
            self._extend(first)
        self._set_groups(self._known())

    @property
    def cycles_others(self) -> bool:
        """True if the schedule moves more than the learning rate, as one-cycle schedules move the momentum."""
        return self._shadow.cycles_others

    def _catch_up(self) -> None:
        """Move the user's scheduler to where the device is; waits for it."""
        applied = self._filled.position()
        self._set_plainly(self._moved)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while self._moved < applied:
                self._step()
                self._moved += 1
        self._put_in_force()

    def get_last_lr(self) -> list[float]:
        """Learning rate of each group now in force; waits for the device."""
        return list(self._shadow.rows[self._filled.position()])

    def state_dict(self) -> dict[str, Any]:
        """State of the user's scheduler as of the applied updates; waits for the device."""
        self._catch_up()
        return _plain_state(self._state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned and fill the table anew from there, in the memory it has."""
        self._load(state)
        for group, lr in zip(self._optimizer.param_groups, self.scheduler._last_lr, strict=True):
            group["lr"] = float(lr)
        put_others = getattr(self.scheduler, "put_others", None)
        if put_others is not None:
            put_others()
        self._start()
