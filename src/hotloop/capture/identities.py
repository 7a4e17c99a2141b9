"""Which object is it? Marks that are equal exactly where a step would freeze the same.

An object's address says that only as long as the object lives: another one may lie there afterwards.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import types
import weakref
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import torch

__all__ = ["CONTAINERS", "MOST_ITEMS", "SCALARS", "Identities", "Mark", "alike"]

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
# A longer container is known by which one it is alone: looking at each item would take longer than the launch.
MOST_ITEMS = 1024
# Objects that do not tell of their end are kept alive meanwhile, so many of them.
_MOST_HELD = 32
_DEPTH = 8


class Mark:
    """Stands for one object for ever: equal to itself alone."""

    _numbers = itertools.count()

    def __init__(self, kind: str) -> None:
        self._text = f"{kind} {next(self._numbers)}"

    def __repr__(self) -> str:
        return self._text


class Identities:
    """Gives marks; keeps no object alive that can tell of its end."""

    def __init__(self) -> None:
        self._weak: dict[int, tuple[Any, Mark]] = {}
        self._held: collections.OrderedDict[int, tuple[Any, Mark]] = collections.OrderedDict()
        self._last: dict[Hashable, tuple[Any, Mark]] = {}

    def mark(self, value: Any, depth: int = 0) -> Any:
        """What `value` is to a step: a scalar itself, a container its items, any other object which one it is."""
        if isinstance(value, SCALARS):
            return value
        if isinstance(value, CONTAINERS):
            if len(value) > MOST_ITEMS or depth > _DEPTH:
                return self.of(value)
            return self._items(value, depth + 1)
        if isinstance(value, types.MethodType):
            # made anew whenever it is asked for
            return (self.of(value.__self__), self.of(value.__func__))
        if isinstance(value, functools.partial):
            parts = (value.args, value.keywords)
            return (self.mark(value.func, depth + 1), *(self.mark(part, depth + 1) for part in parts))
        if isinstance(value, range | slice | np.generic):
            return (type(value).__name__, repr(value))
        return self.of(value)

    def _items(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return {self._key(k): self.mark(v, depth) for k, v in value.items()}
        marks = (self.mark(v, depth) for v in value)
        if isinstance(value, set | frozenset):
            return frozenset(marks)
        return tuple(marks) if isinstance(value, tuple) else list(marks)

    def _key(self, key: Any) -> Any:
        return key if isinstance(key, (*SCALARS, tuple)) else self.of(key)

    def of(self, value: Any) -> Mark:
        """Which object `value` is."""
        at = id(value)
        known = self._weak.get(at)
        if known is not None and known[0]() is value:
            return known[1]
        held = self._held.get(at)
        if held is not None:
            self._held.move_to_end(at)
            return held[1]
        mark = Mark(type(value).__name__)
        try:
            self._weak[at] = (weakref.ref(value, functools.partial(self._forget, at)), mark)
        except TypeError:
            self._held[at] = (value, mark)
            if len(self._held) > _MOST_HELD:
                self._held.popitem(last=False)
        return mark

    def _forget(self, at: int, reference: Any) -> None:
        known = self._weak.get(at)
        if known is not None and known[0] is reference:
            del self._weak[at]

    def latest(self, place: Hashable, value: Any) -> Mark:
        """Which object lies at `place`: a new mark for each that comes there, also for one that comes back.

        For large objects that do not tell of their end: only the one that lies there is kept.
        """
        known = self._last.get(place)
        if known is not None and known[0] is value:
            return known[1]
        mark = Mark(type(value).__name__)
        self._last[place] = (value, mark)
        return mark


def alike(a: Any, b: Any) -> bool:
    """Whether a step would freeze the same of two values: 1, 1.0 and True are three, and so are 0.0 and -0.0.

    >>> alike([1, {"a": 0.0}], [1, {"a": 0.0}]), alike(1, 1.0), alike(0.0, -0.0), alike(math.nan, math.nan)
    (True, False, False, True)
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1.0, a) == math.copysign(1.0, b)) or (a != a and b != b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and _all_alike(a.values(), (b[key] for key in a))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and _all_alike(a, b)
    return bool(a == b)


def _all_alike(a: Iterable[Any], b: Iterable[Any]) -> bool:
    return all(map(alike, a, b))
