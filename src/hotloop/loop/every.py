"""How often: in updates, seconds or epochs, by name."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from hotloop.errors import SettingError

__all__ = ["Due", "Every"]

_UNITS = {
    "update": ("updates", 1.0),
    "step": ("updates", 1.0),
    "epoch": ("epochs", 1.0),
    "s": ("seconds", 1.0),
    "sec": ("seconds", 1.0),
    "second": ("seconds", 1.0),
    "min": ("seconds", 60.0),
    "minute": ("seconds", 60.0),
    "h": ("seconds", 3600.0),
    "hour": ("seconds", 3600.0),
}


@dataclass(frozen=True)
class Every:
    """An interval in one unit.

    >>> Every.parse("100 updates")
    Every(updates=100, seconds=None, epochs=None)
    >>> Every.parse("10 minutes").seconds
    600.0
    """

    updates: int | None = None
    seconds: float | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.updates, self.seconds, self.epochs) if value is not None]
        if len(given) != 1 or given[0] <= 0:
            raise SettingError(f"{self!r}: give exactly one of updates, seconds, epochs, greater than 0")

    @staticmethod
    def parse(text: str | Every) -> Every:
        """An interval from text such as "500 updates", "30 s", "10 minutes" or "2 epochs".

        Raises:
            SettingError: no such form; a bare number names no unit.
        """
        if isinstance(text, Every):
            return text
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", str(text).lower())
        unit = _UNITS.get(match[2]) or _UNITS.get(match[2] + "s") if match else None
        if match is None or unit is None:
            raise SettingError(
                f'every={text!r} is not understood; write for example "500 updates", "10 minutes" or "1 epoch"'
            )
        number = float(match[1]) * unit[1]
        if unit[0] == "seconds":
            return Every(seconds=number)
        if not number.is_integer():
            raise SettingError(f"every={text!r}: {unit[0]} are counted in whole numbers")
        return Every(**{unit[0]: int(number)})


class Due:
    """Says when an interval has passed since the last time it said so."""

    def __init__(self, every: Every, *, updates: int, epoch: int) -> None:
        self.every = every
        self._updates, self._epoch, self._time = updates, epoch, time.monotonic()

    def align(self, *, updates: int, epoch: int) -> None:
        """Set the last time to the last whole interval counted from zero; a clock counts from now."""
        if self.every.updates is not None:
            self._updates = (updates - 1) // self.every.updates * self.every.updates if updates else 0
        if self.every.epochs is not None:
            self._epoch = (epoch - 1) // self.every.epochs * self.every.epochs if epoch else 0

    def passed(self, *, updates: int, epoch: int) -> bool:
        """True if the interval has passed by now."""
        if self.every.updates is not None:
            return updates - self._updates >= self.every.updates
        if self.every.epochs is not None:
            return epoch - self._epoch >= self.every.epochs
        return time.monotonic() - self._time >= (self.every.seconds or 0.0)

    def reset(self, *, updates: int, epoch: int) -> None:
        """Count from here."""
        self._updates, self._epoch, self._time = updates, epoch, time.monotonic()
