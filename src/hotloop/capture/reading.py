"""What a function's code names: globals, and attributes that are read or called."""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any, NamedTuple

__all__ = ["Names", "names_in", "slots_of"]

# From 3.12 on the lowest bit of an attribute's argument says that it is called as a method.
_METHOD_BIT = sys.version_info >= (3, 12)
_ASKED_BY_TEXT = {"getattr", "hasattr", "setattr", "attrgetter", "vars", "__dict__"}


class Names(NamedTuple):
    """Names that code mentions, with that of the functions defined in it.

    Attributes:
        scope: globals.
        all: every name but local ones.
        values: those of them that are not only called as methods.
    """

    scope: frozenset[str]
    all: frozenset[str]
    values: frozenset[str]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    """What `code` names."""
    scope: set[str] = set()
    values: set[str] = set()
    every = set(code.co_names)
    for instruction in dis.get_instructions(code):
        name, kind = instruction.argval, instruction.opname
        if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
            scope.add(name)
        elif kind.endswith("_ATTR") and not (
            _METHOD_BIT and kind.startswith("LOAD") and (instruction.arg or 0) & 1
        ):
            values.add(name)
    values |= scope
    if every & _ASKED_BY_TEXT:
        texts = {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}
        every |= texts
        values |= texts
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            scope |= inner.scope
            every |= inner.all
            values |= inner.values
    return Names(frozenset(scope), frozenset(every), frozenset(values))


@functools.lru_cache(maxsize=4096)
def slots_of(kind: Any) -> tuple[str, ...]:
    """Attributes of a class's objects that lie in no `__dict__`, by the names that code has for them."""
    found: list[str] = []
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{one.__name__.lstrip('_')}{name}" if private else name)
    return tuple(s for s in found if s not in ("__dict__", "__weakref__"))
