"""Places in Python's memory that hold an object each: does each still hold the same one?

The question is asked of a hundred places at every step, so it is asked in C: iterators over getters, compared by
identity. What is the same object is the same value, for everything that cannot be changed in place.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["Places", "Registrations", "forward_names", "registrations"]

# What getters raise where a place is no longer there: a key, a closure's cell, an attribute.
_GONE = (KeyError, ValueError, AttributeError)


class Places:
    """Getters with what they are applied to.

    Getters that give a new object each time, and a small number, are welcome: numbers up to 256 are always the same
    objects.
    """

    def __init__(self) -> None:
        self._sources: dict[Any, tuple[Callable[[Any], Any], list[Any]]] = {}
        self._dicts: list[dict[Any, Any]] = []
        self._sequences: list[Any] = []

    def add(self, get: Callable[[Any], Any], of: Any) -> None:
        """Watch `get(of)`."""
        self._sources.setdefault(get, (get, []))[1].append(of)

    def add_key(self, key: str, table: dict[str, Any]) -> None:
        """Watch `table[key]`."""
        self._sources.setdefault(key, (operator.itemgetter(key), []))[1].append(table)

    def add_all(self, container: Any) -> None:
        """Watch each value of a dict, or item of a sequence, and their number."""
        self.add(len, container)
        (self._dicts if isinstance(container, dict) else self._sequences).append(container)

    def watch(self) -> Callable[[], bool]:
        """A function that says whether every place still holds the object that it holds now."""
        sources, dicts, sequences = list(self._sources.values()), list(self._dicts), list(self._sequences)
        flat, starmap, same = itertools.chain.from_iterable, itertools.starmap, operator.is_

        def single() -> Iterator[Any]:
            return flat(starmap(map, sources))

        try:
            known = list(single())
        except _GONE:
            # something watched is not there: never the same until it is watched anew
            return lambda: False
        values, items = list(flat(map(dict.values, dicts))), list(flat(sequences))

        def unchanged() -> bool:
            try:
                # the number of values is among the first
                return (
                    all(map(same, flat(starmap(map, sources)), known))
                    and all(map(same, flat(map(dict.values, dicts)), values))
                    and (not items or all(map(same, flat(sequences), items)))
                )
            except _GONE:
                return False

        return unchanged


@functools.cache
def forward_names(kind: type[nn.Module]) -> frozenset[str] | None:
    """Names that the forward of one of torch's own modules mentions, with the methods it calls.

    None for other classes: what their forward hands `self` to may read anything.
    """
    if not kind.__module__.startswith("torch.nn.modules") or kind.forward is nn.Module.forward:
        return None
    names: set[str] = set()
    waiting = ["forward"]
    while waiting:
        member = inspect.getattr_static(kind, waiting.pop(), None)
        code = getattr(member, "__code__", None)
        if isinstance(code, types.CodeType):
            new = set(code.co_names) - names
            names |= new
            waiting += [name for name in new if name != "__call__"]
    return frozenset(names)


class Registrations:
    """Counts parameters and modules put into any module of this process.

    Attributes:
        count: how many so far, since the first was made.
    """

    def __init__(self) -> None:
        self.count = 0
        for register in (
            torch_module.register_module_parameter_registration_hook,
            torch_module.register_module_module_registration_hook,
        ):
            register(self._note)

    def _note(self, *_: Any) -> None:
        self.count += 1


@functools.cache
def registrations() -> Registrations:
    """The one counter of this process."""
    return Registrations()
