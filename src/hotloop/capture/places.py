"""Places in Python's memory that hold an object each: does each still hold the same one?

The question is asked of a hundred places at every step, so it is asked in the shortest way: getters made in C, compared
by identity. What is the same object is the same value, for everything that cannot be changed in place.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping, Sequence
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
        self._single: list[tuple[Callable[[Any], Any], Any]] = []
        self._rows: list[tuple[Callable[[Any], Any], Any]] = []
        self._whole: list[Any] = []

    def add(self, get: Callable[[Any], Any], of: Any) -> None:
        """Watch `get(of)`."""
        self._single.append((get, of))

    def add_key(self, key: str, table: Mapping[str, Any]) -> None:
        """Watch `table[key]`."""
        self._single.append((operator.itemgetter(key), table))

    def add_keys(self, keys: Sequence[str], table: Mapping[str, Any]) -> None:
        """Watch `table[key]` for each of `keys`, in half the time that it takes one by one."""
        if len(keys) > 1:
            self._rows.append((operator.itemgetter(*keys), table))
        elif keys:
            self.add_key(keys[0], table)

    def add_all(self, container: Any) -> None:
        """Watch each value of a dict, or item of a sequence, and their number."""
        self._whole.append(container)

    def watch(self) -> Callable[[], bool]:
        """A function that says whether every place still holds the object that it holds now."""
        try:
            single = [(get, of, get(of)) for get, of in self._single]
            rows = [(get, of, get(of)) for get, of in self._rows]
        except _GONE:
            # something watched is not there: never the same until it is watched anew
            return lambda: False
        whole = [(container, _values(container), list(_values(container))) for container in self._whole]
        same = operator.is_

        def unchanged() -> bool:
            try:
                for get, of, was in single:
                    if get(of) is not was:
                        return False
                for get, of, were in rows:
                    if not all(map(same, get(of), were)):
                        return False
            except _GONE:
                return False
            for container, values, were in whole:
                if len(container) != len(were) or not all(map(same, values, were)):
                    return False
            return True

        return unchanged


def _values(container: Any) -> Any:
    """What `container` holds, now and later."""
    return container.values() if isinstance(container, dict) else container


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
    """Counts parameters, buffers and modules put into any module of this process.

    Attributes:
        count: how many so far, since the first was made.
    """

    def __init__(self) -> None:
        self.count = 0
        for register in (
            torch_module.register_module_parameter_registration_hook,
            torch_module.register_module_buffer_registration_hook,
            torch_module.register_module_module_registration_hook,
        ):
            register(self._note)

    def _note(self, *_: Any) -> None:
        self.count += 1


@functools.cache
def registrations() -> Registrations:
    """The one counter of this process."""
    return Registrations()
