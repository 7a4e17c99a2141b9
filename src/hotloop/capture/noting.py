"""Which attributes of some objects are read while code runs?

A property, a method or a subscript of a class of the user's own may read what no name in a step's code tells.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["noting"]

_LOCK = threading.Lock()
# For each object that is looked at, by its address, names of the attributes read so far.
_READ: dict[int, list[set[str]]] = {}
# For each class of theirs, how many look at its objects, and what it had of its own in that place.
_NOTING: dict[type, tuple[int, Any]] = {}
_ABSENT = object()


@contextmanager
def noting(things: Iterable[Any]) -> Iterator[list[set[str]]]:
    """While it is open, names of attributes that are read of each of `things` are put into its set.

    `"__dict__"` among them says that any may have been read. Their classes are others meanwhile: asking for an
    attribute leads through Python, also where a compiled forward asks whether it still holds. Code that asks past that
    (`object.__getattribute__`) is not seen.

    Raises:
        TypeError: one of their classes cannot be changed.
    """
    listed = list(things)
    reads: list[set[str]] = [set() for _ in listed]
    entered: list[type] = []
    try:
        with _LOCK:
            for kind in {type(thing) for thing in listed}:
                _enter(kind)
                entered.append(kind)
            for thing, read in zip(listed, reads, strict=True):
                _READ.setdefault(id(thing), []).append(read)
        yield reads
    finally:
        with _LOCK:
            for thing, read in zip(listed, reads, strict=True):
                sets = _READ.get(id(thing), [])
                # by identity: sets of others may be equal
                sets[:] = [s for s in sets if s is not read]
                if not sets:
                    _READ.pop(id(thing), None)
            for kind in entered:
                _leave(kind)


def _enter(kind: Any) -> None:
    count, own = _NOTING.get(kind, (0, _ABSENT))
    if count == 0:
        own = vars(kind).get("__getattribute__", _ABSENT)
        before = kind.__getattribute__

        def noted(self: Any, name: str) -> Any:
            for read in _READ.get(id(self), ()):
                read.add(name)
            return before(self, name)

        kind.__getattribute__ = noted
    _NOTING[kind] = (count + 1, own)


def _leave(kind: Any) -> None:
    count, own = _NOTING[kind]
    if count > 1:
        _NOTING[kind] = (count - 1, own)
        return
    del _NOTING[kind]
    if own is _ABSENT:
        del kind.__getattribute__
    else:
        kind.__getattribute__ = own
