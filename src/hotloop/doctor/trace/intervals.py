"""Sets of time as sorted, disjoint intervals: union, length inside a range, intersection."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Spans"]

Floats = npt.NDArray[np.float64]


class Spans:
    """A set of points in time, kept as disjoint intervals in order.

    Args:
        start, end: float64 arrays of any order, overlapping or not; the set is their union.
    """

    def __init__(self, start: npt.ArrayLike = (), end: npt.ArrayLike = ()) -> None:
        low = np.asarray(start, dtype=np.float64)
        high = np.asarray(end, dtype=np.float64)
        if len(low) > 1:
            order = np.argsort(low, kind="stable")
            low, high = low[order], np.maximum.accumulate(high[order])
            first = np.concatenate(([True], low[1:] > high[:-1]))
            last = np.concatenate((first[1:], [True]))
            low, high = low[first], high[last]
        self.start: Floats = low
        self.end: Floats = high
        self._before: Floats = np.concatenate(([0.0], np.cumsum(high - low)))

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> float:
        """Length of the set."""
        return float(self._before[-1])

    def until(self, time: npt.ArrayLike) -> Floats:
        """Length of the set before each of the given times."""
        at = np.asarray(time, dtype=np.float64)
        if not len(self.start):
            return np.zeros(at.shape)
        index = np.searchsorted(self.start, at, side="right")
        last = np.maximum(index - 1, 0)
        beyond = np.where(index > 0, np.maximum(self.end[last] - at, 0.0), 0.0)
        return self._before[index] - beyond

    def within(self, start: npt.ArrayLike, end: npt.ArrayLike) -> Floats:
        """Length of the set inside each range [start, end); 0 where end <= start."""
        low = np.asarray(start, dtype=np.float64)
        return np.maximum(self.until(np.maximum(end, low)) - self.until(low), 0.0)

    def clipped(self, start: float, end: float) -> Spans:
        """The part of the set inside [start, end]."""
        keep = (self.end > start) & (self.start < end)
        return Spans(np.maximum(self.start[keep], start), np.minimum(self.end[keep], end))

    def gaps(self, start: float, end: float) -> Spans:
        """What is missing from [start, end]."""
        inside = self.clipped(start, end)
        low = np.concatenate(([start], inside.end))
        high = np.concatenate((inside.start, [end]))
        keep = high > low
        return Spans(low[keep], high[keep])

    def joined(self, other: Spans) -> Spans:
        """The union of both sets."""
        return Spans(np.concatenate((self.start, other.start)), np.concatenate((self.end, other.end)))
