"""What the live line says, as text: pure formatting, no clock and no stream."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

__all__ = ["ProgressLine", "format_count", "format_duration"]

_BAR_CELLS = 12
_BAR_COLUMNS = 90
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True)
class ProgressLine:
    """The state of a run at one moment.

    Attributes:
        updates: optimizer updates done.
        total_updates: updates of the whole run; None if not known. One that is passed was a guess, and is not shown.
        epoch: number of the current epoch, from 0; None if not known.
        total_epochs: epochs of the whole run; None if not known.
        updates_per_s: recent rate; None before the second look.
        samples_per_s: recent rate; None if not known.
        elapsed_s: seconds since the line began.
        values: name -> last logged value.
    """

    updates: int
    total_updates: int | None
    epoch: int | None
    total_epochs: int | None
    updates_per_s: float | None
    samples_per_s: float | None
    elapsed_s: float
    values: dict[str, Any]

    @property
    def total(self) -> int | None:
        """`total_updates` while that can be true."""
        return self.total_updates if self.total_updates and self.updates <= self.total_updates else None

    @property
    def left_s(self) -> float | None:
        """Seconds still to go at the recent rate; None if that cannot be said."""
        if not self.total or not self.updates_per_s or self.updates_per_s <= 0:
            return None
        return (self.total - self.updates) / self.updates_per_s

    def text(self, columns: int | None = None) -> str:
        """The line without colour, cut to `columns` characters if given.

        >>> line = ProgressLine(50, 200, 0, 4, 25.0, None, 2.0, {"loss": 0.51234})
        >>> line.text()
        'epoch 1/4  50/200 25%  25.0 steps/s  0:06 left  loss 0.5123  0:02'
        >>> line.text(20)
        'epoch 1/4  50/200 2…'
        """
        parts = []
        total = self.total
        if columns is not None and columns >= _BAR_COLUMNS and total:
            parts.append(self._bar())
        if self.epoch is not None and (self.total_epochs or self.epoch):
            last = self.epoch + 1 if self.total_epochs is None else min(self.epoch + 1, self.total_epochs)
            parts.append(f"epoch {last}" + (f"/{self.total_epochs}" if self.total_epochs else ""))
        if total:
            parts.append(f"{self.updates:,}/{total:,} {100 * self.updates // total}%")
        else:
            parts.append(f"{self.updates:,} steps")
        if self.updates_per_s is not None:
            rate = self.updates_per_s
            slow = 0 < rate < 1
            parts.append(f"{1 / rate:.1f} s/step" if slow else f"{format_count(rate)} steps/s")
        if self.samples_per_s is not None:
            parts.append(f"{format_count(self.samples_per_s)} samples/s")
        if self.left_s is not None and total and self.updates < total:
            parts.append(f"{format_duration(self.left_s)} left")
        parts += [f"{name} {_format_value(value)}" for name, value in self.values.items()]
        parts.append(format_duration(self.elapsed_s))
        text = "  ".join(parts).replace("\n", " ")
        if columns is not None and len(text) > columns:
            text = text[: max(0, columns - 1)] + "…" if columns > 0 else ""
        return text

    def colour(self, text: str) -> str:
        """`text` with its bar in colour, unless NO_COLOR or a dumb terminal forbids it."""
        end = text.find("]")
        forbidden = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        if forbidden or end < 0 or not text.startswith("["):
            return text
        return f"{_GREEN}{text[: end + 1]}{_PLAIN}{text[end + 1 :]}"

    def _bar(self) -> str:
        """`[####--------]`."""
        assert self.total
        full = _BAR_CELLS * self.updates // self.total
        return f"[{'#' * full}{'-' * (_BAR_CELLS - full)}]"


def format_duration(seconds: float) -> str:
    """`seconds` as a clock shows them.

    >>> format_duration(61.7), format_duration(7325), format_duration(200_000)
    ('1:01', '2:02:05', '2d 07:33:20')
    """
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02}:{m:02}:{s:02}"
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def format_count(number: float) -> str:
    """`number` in three or four digits.

    >>> format_count(7.25), format_count(312.4), format_count(20_480), format_count(3.2e6)
    ('7.2', '312', '20.5k', '3.2M')
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def _format_value(value: Any) -> str:
    """A logged value in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:24]
