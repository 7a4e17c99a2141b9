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
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["Places", "count_registrations", "forward_names"]

_MISSING = object()


class Places:
    """Getters with what they are applied to, and what they gave when `remember` was called.

    Getters that give a new object each time, and a small number, are welcome: numbers up to 256 are always the same
    objects.
    """

    def __init__(self) -> None:
        self._sources: OrderedDict[Any, tuple[Callable[[Any], Any], list[Any]]] = OrderedDict()
        self._whole: list[Any] = []
        self._known: list[Any] = []

    def add(self, get: Callable[[Any], Any], of: Any) -> None:
        """Watch `get(of)`."""
        self._sources.setdefault(get, (get, []))[1].append(of)

    def add_key(self, key: str, table: dict[str, Any]) -> None:
        """Watch `table[key]`."""
        self._sources.setdefault(key, (operator.itemgetter(key), []))[1].append(table)

    def add_all(self, container: Any) -> None:
        """Watch each value of a dict, or item of a sequence, and their number."""
        self.add(len, container)
        self._whole.append(container)

    def remember(self) -> None:
        """What is there now is what `unchanged` compares with."""
        try:
            self._known = [*self._now(), _MISSING]
        except (KeyError, ValueError, AttributeError):
            # something watched has gone: never the same until watched anew
            self._known = [_MISSING, _MISSING]

    def unchanged(self) -> bool:
        """Whether every place holds the object that it held when `remember` was called."""
        try:
            return all(map(operator.is_, itertools.chain(self._now(), (_MISSING,)), self._known))
        except (KeyError, ValueError, AttributeError):
            return False

    def _now(self) -> Iterator[Any]:
        found = itertools.chain.from_iterable(itertools.starmap(map, self._sources.values()))
        if not self._whole:
            return found
        return itertools.chain(found, itertools.chain.from_iterable(map(_values, self._whole)))


def _values(container: Any) -> Any:
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


class _Registrations:
    """Counts parameters, modules and buffers put into any module of this process."""

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
def _registrations() -> _Registrations:
    return _Registrations()


def count_registrations() -> int:
    """How many parameters and modules were put into modules of this process since this was asked first."""
    return _registrations().count
