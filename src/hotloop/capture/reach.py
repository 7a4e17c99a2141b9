"""What a step's code reaches by the names in it: values, objects, functions, modules, and where each of them lies."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hotloop.capture.identities import CONTAINERS, MOST_ITEMS, SCALARS, Identities
from hotloop.capture.places import Places, forward_names
from hotloop.capture.reading import names_in, slots_of
from hotloop.capture.reasons import is_library

__all__ = ["HOOKS", "Attributes", "Reach", "Watch", "reach"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes of every module that are bookkeeping of torch and hold no numbers that a forward uses.
_NOT_WATCHED = {*nn.Module().__dict__, "_compiled_call_impl", "_version", "_is_hf_initialized"} - {"training"}
# Of the methods that are called without their name, by operators or iteration, those that no step means.
_NO_OPERATORS = {"__init__", "__new__", "__repr__", "__str__", "__del__"}
_DEPTH = 8
_SKIPPED_PACKAGES = {"torch", "hotloop", "numpy"}
# What is seen of an object with so many attributes costs a new number at each look.
_MOST_COUNTED = 256
_CELL = operator.attrgetter("cell_contents")
_DEFAULTS = operator.attrgetter("__defaults__")
_KEYWORD_DEFAULTS = operator.attrgetter("__kwdefaults__")


class Attributes(dict[Any, Any]):
    """Marks of an object's attributes, by name."""


class _Marks:
    """Gives the marks of those attributes that are read; which these are is asked only where their number changes."""

    def __init__(
        self, attributes: dict[str, Any], is_read: Callable[[str, Any], bool], mark: Callable[[Any], Any]
    ) -> None:
        self._attributes = attributes
        self._is_read = is_read
        self._mark = mark
        self._choose()

    def _choose(self) -> None:
        self._count = len(self._attributes)
        self.keys = [k for k, v in list(self._attributes.items()) if self._is_read(k, v)]

    def get(self) -> Attributes:
        attributes, mark = self._attributes, self._mark
        if len(attributes) != self._count or not all(map(attributes.__contains__, self.keys)):
            self._choose()
        return Attributes({k: mark(attributes[k]) for k in self.keys})


class Watch(NamedTuple):
    """A value that the step may freeze.

    Attributes:
        name: for a person.
        get: gives what stands for it, to be compared with `alike`.
        leads: where it is another one, other things may be reached.
    """

    name: str
    get: Callable[[], Any]
    leads: bool


class Reach:
    """One walk; see `reach`.

    Attributes:
        watches: values that the step may freeze.
        places: where they lie, to be asked whether each still holds the same object.
        modules: all modules found, with their submodules.
        generators: generators of random numbers.
        tensors: tensors that are reached not through a module's parameters and buffers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        roots: Sequence[nn.Module],
        others: Iterable[tuple[str, Any]],
        identities: Identities,
        skip: Iterable[Any],
        names: tuple[set[str], set[str]],
    ) -> None:
        self.watches: list[Watch] = []
        self.places = Places()
        self.modules: list[nn.Module] = []
        self.generators: list[torch.Generator] = []
        self.tensors: list[torch.Tensor] = []
        self._identities = identities
        self._mark = identities.mark
        self._seen = {id(thing) for thing in skip}
        # what is made on being asked for has to live as long as its address is in `_seen`
        self._alive: list[Any] = []
        self._all, self._values = names
        # of the user's own package, installed or not, everything is looked at
        home = _package(getattr(_innermost(function), "__module__", None))
        self._home = home if home not in _SKIPPED_PACKAGES | sys.stdlib_module_names else None
        for i, module in enumerate(roots):
            self._add_module(f"module {i}" if i else "the module", module, 0)
        self._follow("the step", function, 0)
        for name, thing in others:
            if isinstance(thing, CONTAINERS):
                self._watch(name, functools.partial(self._mark, thing), leads=True)
            self._follow(name, thing, 1)

    def _watch(self, name: str, get: Callable[[], Any], *, leads: bool = False) -> None:
        self.watches.append(Watch(name, get, leads))

    def _is_new(self, thing: Any) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        self._alive.append(thing)
        return True

    def _is_foreign(self, name: str | None) -> bool:
        """Whether a package's insides are not looked at: torch's, numpy's, python's own."""
        package = _package(name)
        if package == self._home:
            return False
        return package in _SKIPPED_PACKAGES or package in sys.stdlib_module_names

    # -------------------------------------------------------------------------------------------- code

    def _add_code(self, code: types.CodeType) -> None:
        names = names_in(code)
        self._all |= names.all
        self._values |= names.values

    def _add_function(self, function: Any, depth: int) -> None:
        code = getattr(function, "__code__", None)
        if not isinstance(code, types.CodeType) or depth > _DEPTH or not self._is_new(function):
            return
        package = getattr(function, "__module__", None)
        if depth and self._is_foreign(package):
            return
        self._add_code(code)
        cells = list(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if is_library(code.co_filename) and _package(package) != self._home:
            # nobody gives a library's functions other defaults, or a decorator of its another function
            held = [_cell_value(cell) for _, cell in cells if _cell_value(cell) is not _EMPTY]
            for value in (*held, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self._follow(getattr(function, "__name__", "a function"), value, depth)
            return
        for name, cell in cells:
            self._add_value(name, functools.partial(_cell_value, cell), depth)
            if _cell_value(cell) is not _EMPTY:
                self.places.add(_CELL, cell)
        if function.__defaults__:
            for i in range(len(function.__defaults__)):
                self._add_value(f"default {i}", functools.partial(_default, function, i), depth)
        self.places.add(_DEFAULTS, function)
        if function.__kwdefaults__:
            for key in function.__kwdefaults__:
                self._add_value(f"default {key}", functools.partial(function.__kwdefaults__.get, key), depth)
            self.places.add(_KEYWORD_DEFAULTS, function)
            self.places.add_all(function.__kwdefaults__)
        scope = function.__globals__
        for name in sorted(names_in(code).scope):
            if name in scope:
                self._add_at(name, name, scope, depth)

    def _add_at(self, name: str, key: str, table: Any, depth: int) -> None:
        """What lies in a table of names."""
        value = table[key]
        if isinstance(value, types.ModuleType):
            self._follow(name, value, depth + 1)
            return
        if isinstance(value, type) and self._is_foreign(value.__module__):
            return
        self._add_value(name, functools.partial(table.get, key), depth)
        self.places.add_key(key, table)

    def _add_value(self, name: str, get: Callable[[], Any], depth: int) -> None:
        """Watch what a name stands for, and what it leads to."""
        value = get()
        if isinstance(value, SCALARS):
            self._watch(name, get)
            return
        text = name if isinstance(value, CONTAINERS) else f"the object {name!r}"
        self._watch(text, lambda: self._mark(get()), leads=True)
        self._follow(name, value, depth)

    # -------------------------------------------------------------------------------------------- values

    def _follow(self, name: str, value: Any, depth: int) -> None:
        """Watch what the step may read of an object."""
        if depth > _DEPTH or isinstance(value, SCALARS):
            return
        if isinstance(value, torch.Tensor):
            if self._is_new(value):
                self.tensors.append(value)
        elif isinstance(value, torch.Generator):
            if self._is_new(value):
                self.generators.append(value)
        elif isinstance(value, nn.Module):
            self._add_module(name, value, depth)
        elif isinstance(value, CONTAINERS):
            self._add_items(name, value, depth)
        elif isinstance(value, types.FunctionType):
            self._add_function(value, depth + 1 if depth else int(name != "the step"))
        elif isinstance(value, types.MethodType):
            self._follow("self" if name == "the step" else f"{name}.__self__", value.__self__, depth)
            self._add_function(value.__func__, depth + 1 if name != "the step" else 0)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._follow("the step" if part is value.func and name == "the step" else name, part, depth)
        elif isinstance(value, type):
            self._add_class(value, depth, made=True)
        elif isinstance(value, types.ModuleType):
            self._add_python_module(name, value, depth)
        elif not isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
            self._add_object(name, value, depth)

    def _add_items(self, name: str, value: Any, depth: int) -> None:
        """Scalars of a container are watched; modules, tensors and generators in it are found."""
        if len(value) > MOST_ITEMS or not self._is_new(value):
            return
        if not isinstance(value, tuple | frozenset):
            self.places.add_all(value)
        for inner in value.values() if isinstance(value, dict) else value:
            if not isinstance(inner, SCALARS):
                self._follow(f"an item of {name}", inner, depth + 1)

    def _add_object(self, name: str, value: Any, depth: int) -> None:
        kind: Any = type(value)
        package = _package(kind.__module__)
        if package in _SKIPPED_PACKAGES and package != self._home:
            return
        if not self._is_new(value):
            return
        self._add_class(kind, depth)
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            self._add_function(wrapped, depth + 1)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._add_attributes(name, attributes, self._is_read, depth)
            if len(attributes) <= _MOST_COUNTED:
                self.places.add(len, attributes)
        for key in sorted(self._all & set(slots_of(kind))):
            get = functools.partial(getattr, value, key, None)
            self._add_value(f"{name}.{key}", get, depth + 1)
            if hasattr(value, key):
                self.places.add(operator.attrgetter(key), value)

    def _is_read(self, key: str, value: Any) -> bool:
        return key in (self._values if isinstance(value, SCALARS) else self._all)

    def _add_attributes(
        self, name: str, attributes: dict[str, Any], is_read: Callable[[str, Any], bool], depth: int
    ) -> None:
        marks = _Marks(attributes, is_read, self._mark)
        self._watch(name, marks.get, leads=True)
        self.places.add_keys(marks.keys, attributes)
        for key in marks.keys:
            self._follow(f"{name}.{key}", attributes[key], depth + 1)

    def _add_class(self, kind: type, depth: int, *, made: bool = False) -> None:
        """Methods that the step may call, and numbers that lie in the class."""
        if depth > _DEPTH:
            return
        functions = issubclass(kind, torch.autograd.Function)
        for one in kind.__mro__:
            if one is object or self._is_foreign(one.__module__) or not self._is_new(one):
                continue
            members = vars(one)
            read: list[str] = []
            for key, member in list(members.items()):
                called = key.startswith("__") and key.endswith("__") and key not in _NO_OPERATORS
                called = called or functions or key == "forward" or (made and key == "__init__")
                if isinstance(member, SCALARS):
                    if key in self._values and not key.startswith("__"):
                        self._watch(f"{one.__name__}.{key}", functools.partial(members.get, key))
                        read.append(key)
                elif isinstance(member, CONTAINERS):
                    if key in self._all and not key.startswith("__"):
                        self._add_value(f"{one.__name__}.{key}", functools.partial(members.get, key), depth)
                        read.append(key)
                elif called or key in self._all:
                    self._add_function(_function_of(member), depth + 1)
            self.places.add_keys(read, members)

    def _add_python_module(self, name: str, module: types.ModuleType, depth: int) -> None:
        """What the step may read of a module of the user's own."""
        file = getattr(module, "__file__", None) or ""
        own = _package(module.__name__) == self._home
        if self._is_foreign(module.__name__) or (is_library(file) and not own) or not self._is_new(module):
            return
        table = vars(module)
        for key in sorted(self._all & table.keys()):
            if self._is_read(key, table[key]) and not key.startswith("__"):
                self._add_at(f"{name}.{key}", key, table, depth)

    # -------------------------------------------------------------------------------------------- modules

    def _add_module(self, name: str, root: nn.Module, depth: int) -> None:
        for path, module in root.named_modules():
            if not self._is_new(module):
                continue
            self.modules.append(module)
            values: dict[str, Any] = module.__dict__
            kind: Any = type(module)
            own = forward_names(kind)
            mode = {"training"} if module is root else set()
            read = functools.partial(self._is_read_of, own, mode)
            self._add_attributes(f"{name}.{path}" if path else name, values, read, depth)
            if own is None:
                self._add_class(kind, depth)
            for key in HOOKS:
                for hook in list((values.get(key) or {}).values()):
                    self._follow("a hook", hook, depth + 1)

    def _is_read_of(self, own: frozenset[str] | None, mode: set[str], key: str, value: Any) -> bool:
        """Whether a forward may read an attribute of its module."""
        if key in _NOT_WATCHED:
            return False
        if key == "forward":
            return True
        scalar = isinstance(value, SCALARS)
        if own is None:
            return scalar or key in self._all
        return key in own or key in mode or (scalar and key in self._values)


def reach(
    function: Callable[..., Any],
    roots: Iterable[nn.Module],
    others: Iterable[tuple[str, Any]],
    identities: Identities,
    skip: Iterable[Any],
) -> Reach:
    """What `function` reaches, with the code of what it reaches.

    Args:
        function: the step.
        roots: prepared modules.
        others: what else it reads or runs, each with a name for a person: hooks, arguments.
        identities: gives marks.
        skip: objects that are not looked into.
    """
    listed, further, skipped = list(roots), list(others), list(skip)
    names: tuple[set[str], set[str]] = (set(), set())
    while True:
        # what is reached late may name attributes of what was reached before
        sizes = [len(n) for n in names]
        found = Reach(function, listed, further, identities, skipped, names)
        if [len(n) for n in names] == sizes:
            return found


_EMPTY = object()


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _package(name: str | None) -> str:
    return (name or "").split(".")[0]


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _default(function: Any, index: int) -> Any:
    return function.__defaults__[index]


def _function_of(member: Any) -> Any:
    """The function behind a method, a property, a static method."""
    for name in ("__func__", "fget", "func", "__wrapped__"):
        inner = getattr(member, name, None)
        if isinstance(inner, types.FunctionType):
            return inner
    return member
