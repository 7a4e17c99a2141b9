"""Everything a captured step has frozen: looked at in each call, compared, and named where it changed.

A graph replays what was true when it was captured. These are the Python values that the step could have read then:
scalars in closures, globals and attributes; a module's settings and mode; parameters' place and whether they learn;
optimizers' settings; grad and autocast mode.

Two ways of looking. `unchanged` asks whether every place still holds the very same object, which costs microseconds.
Only where one does not, `take` reads all values, to be compared as values.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hotloop.capture.places import Places, forward_names, registrations

__all__ = ["Fingerprint"]

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Attributes of every module that are bookkeeping of torch and hold no numbers that a forward uses.
_NOT_WATCHED = {"_is_full_backward_hook", "_compiled_call_impl", "_version", "_is_hf_initialized"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEPTH = 3
_MOST_ITEMS = 64
_LEARNS = operator.attrgetter("requires_grad")
_ADDRESS = torch.Tensor.data_ptr
_CELL = operator.attrgetter("cell_contents")
_DEFAULTS = operator.attrgetter("__defaults__")
_SKIPPED_PACKAGES = ("torch", "hotloop", "numpy")


class Fingerprint:
    """The values that `function` may freeze.

    Args:
        function: the step.
        modules: prepared modules; others are found through the function's closure and globals.
        optimizers: prepared optimizers whose settings may be frozen.
        skip: objects that are not looked into (the loop itself).
        parameters: further parameters that may get gradients.

    Attributes:
        function: the step.
        parameters: of the modules, then those that only an optimizer holds.
        modules: all modules found, with their submodules.
        generators: generators of random numbers that the step can reach.
        reached: tensors that the step can reach by itself, not through a module or an optimizer.
        unchanged: says whether all is as it was when it was remembered.
    """

    unchanged: Callable[[], bool]

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Iterable[nn.Module],
        optimizers: Iterable[Any],
        skip: Iterable[Any] = (),
        parameters: Iterable[torch.Tensor] = (),
    ) -> None:
        self.function = function
        self._names: list[str] = []
        self._getters: list[Callable[[], Any]] = []
        self._places = Places()
        self._seen: set[int] = {id(thing) for thing in skip}
        self.modules: list[nn.Module] = []
        self.generators: list[torch.Generator] = []
        self.reached: list[torch.Tensor] = []
        self._optimizers = list(optimizers)
        self._hooks_id = -1
        self._hook_counts: tuple[int, ...] = ()
        self._hook_tables: list[Any] = []
        roots = list(modules)
        self._read = _names_read(function, roots)
        for i, module in enumerate(roots):
            self._add_module(f"module {i}" if i else "the module", module)
        self._add_function(function, 0)
        self._held = [m._parameters for m in self.modules if m._parameters]
        for optimizer in self._optimizers:
            self._add("an optimizer's groups or state", functools.partial(_identity_of_optimizer, optimizer))
            self._places.add_key("state", optimizer.__dict__)
            self._places.add_key("param_groups", optimizer.__dict__)
            self._places.add(len, optimizer.param_groups)
            for i, group in enumerate(optimizer.param_groups):
                self._add(f"param_groups[{i}]", functools.partial(_group_settings, group))
                self._places.add_all(group)
        groups = [group["params"] for o in self._optimizers for group in o.param_groups]
        self.parameters: list[torch.Tensor] = list(
            dict.fromkeys(itertools.chain(self._live_parameters(), *groups, parameters))
        )
        self._add("a parameter", lambda: list(map(id, self._live_parameters())))
        self._add("requires_grad of a parameter", self._learning)
        self._add("memory of a parameter", self._addresses)
        self._add("grad mode", torch.is_grad_enabled)
        self._add("autocast", _autocast)
        self._add("a module's hooks", self._hook_count)
        groups += [[*root.parameters()] for root in roots] + [self.parameters]
        learning = [[p for p in group if p.requires_grad] for group in groups]
        self._probes = list(dict.fromkeys(p for g in learning if g for p in (g[0], g[-1])))
        self.remember()

    def remember(self) -> None:
        """What is there now is what `unchanged` compares with."""
        self._hook_count()
        self.unchanged = self._watch()

    def _watch(self) -> Callable[[], bool]:
        """A function that says whether all is as it is now: no value can differ then.

        Parameters and modules put in another's place are noticed by torch's registration hooks; those written into a
        module's tables past torch are looked for in turn, one module in each call.
        """
        registered, handle = registrations(), RemovableHandle
        registered_before, handles_before = registered.count, handle.next_id
        grad_enabled, grad_before = torch.is_grad_enabled, torch.is_grad_enabled()
        any_autocast, autocast_before = torch._C._is_any_autocast_enabled, _autocast()
        places_unchanged = self._places.watch()
        parameters, learning, addresses = self.parameters, self._learning(), self._addresses()
        tables = itertools.cycle([(held, list(held.values())) for held in self._held] or [({}, [])])

        def unchanged() -> bool:
            if (
                registered.count != registered_before
                or handle.next_id != handles_before
                or grad_enabled() is not grad_before
                or ((any_autocast() or autocast_before) and _autocast() != autocast_before)
                or not places_unchanged()
            ):
                return False
            held, known = next(tables)
            return (
                len(held) == len(known)
                and all(map(operator.is_, held.values(), known))
                and list(map(_LEARNS, parameters)) == learning
                and list(map(_ADDRESS, parameters)) == addresses
            )

        return unchanged

    def gradients_wait(self) -> bool:
        """Whether gradients lie in the parameters, as far as the first and last of each module and group show."""
        for p in self._probes:  # noqa: SIM110  (a loop takes half the time of any() here)
            if p.grad is not None:
                return True
        return False

    def take(self) -> list[Any]:
        """The values now."""
        return [get() for get in self._getters]

    def tensors(self) -> dict[str, int]:
        """Identity of each module's buffers and tensor attributes, by name."""
        found: dict[str, int] = {}
        for module in self.modules:
            kind = type(module).__name__
            for name, buffer in module._buffers.items():
                found[f"{kind}.{name}"] = found.get(f"{kind}.{name}", 0) ^ id(buffer)
            for name, value in module.__dict__.items():
                if isinstance(value, torch.Tensor):
                    found[f"{kind}.{name}"] = found.get(f"{kind}.{name}", 0) ^ id(value)
        return found

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that the step may write: parameters, buffers, and those it reaches by itself, by name."""
        found = {f"parameter {i} of shape {tuple(p.shape)}": p for i, p in enumerate(self.parameters)}
        for i, module in enumerate(self.modules):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    found[f"buffer {name} of {type(module).__name__} {i}"] = buffer
        return found | {f"tensor {i} of shape {tuple(t.shape)}": t for i, t in enumerate(self.reached)}

    def difference(self, old: list[Any], new: list[Any]) -> str:
        """Name and change of the first value that differs, for a person."""
        for name, a, b in zip(self._names, old, new, strict=True):
            if a == b:
                continue
            if isinstance(a, dict) and isinstance(b, dict):
                for key in a.keys() | b.keys():
                    if a.get(key) != b.get(key):
                        return f"{name}[{key!r}]: {a.get(key)!r} -> {b.get(key)!r}"
            if isinstance(a, tuple) and isinstance(b, tuple) and "(" in name:
                keys = name[name.index("(") + 1 : -1].split(",")
                for key, x, y in zip(keys, a, b, strict=False):
                    if x != y:
                        return f"{name[: name.index('(')]}.{key}: {x!r} -> {y!r}"
            if isinstance(a, _SCALARS) and isinstance(b, _SCALARS):
                return f"{name}: {a!r} -> {b!r}"
            return name
        return "nothing"

    # -------------------------------------------------------------------------------------------- what is watched

    def _live_parameters(self) -> Iterator[torch.Tensor]:
        return (p for held in self._held for p in held.values() if p is not None)

    def _learning(self) -> list[bool]:
        return list(map(_LEARNS, self.parameters))

    def _addresses(self) -> list[int]:
        return list(map(_ADDRESS, self.parameters))

    def _add(self, name: str, getter: Callable[[], Any]) -> None:
        self._names.append(name)
        self._getters.append(getter)

    def _add_module(self, name: str, root: nn.Module) -> None:
        for path, module in root.named_modules():
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            self.modules.append(module)
            values = module.__dict__
            kind: Any = type(module)
            own, read = forward_names(kind), self._read | ({"training"} if module is root else set())
            keys = [
                k
                for k, v in values.items()
                if _is_scalar(v) and k not in _NOT_WATCHED and (own is None or k in own or k in read)
            ]
            if keys:
                where = f"{name}.{path}" if path else name
                get = operator.itemgetter(*keys) if len(keys) > 1 else operator.itemgetter(keys[0], keys[0])
                self._add(f"{where}({','.join(keys)})", functools.partial(_get_or_none, get, values))
                for key in keys:
                    self._places.add_key(key, values)
            if own is None:
                # a configuration, a list of factors: what the module's code may read of it
                for key, value in list(values.items()):
                    inner = not key.startswith("_") and key in read and not callable(value)
                    if inner and not _is_scalar(value) and not isinstance(value, torch.Tensor):
                        where = f"{name}.{path}.{key}" if path else f"{name}.{key}"
                        self._add(where, functools.partial(_identity_at, values, key))
                        self._places.add_key(key, values)
                        self._add_object(where, value, read, 1)

    def _add_function(self, function: Callable[..., Any], depth: int) -> None:
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is None or id(function) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(function))
        names = _names_in(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if self._add_value(name, functools.partial(_cell_value, cell), names, depth):
                self._places.add(_CELL, cell)
        scope = function.__globals__
        for name in names:
            if name in scope and self._add_value(name, functools.partial(scope.get, name), names, depth):
                self._places.add_key(name, scope)
        for i in range(len(function.__defaults__ or ())):
            self._add_value(f"default {i}", functools.partial(_default, function, i), names, depth)
        self._places.add(_DEFAULTS, function)

    def _add_value(self, name: str, getter: Callable[[], Any], names: set[str], depth: int) -> bool:
        """Watch what a name stands for, and what it leads to; False if nothing there can change."""
        value = getter()
        if _is_scalar(value):
            self._add(name, getter)
            return True
        if isinstance(value, types.ModuleType | type | types.BuiltinFunctionType):
            return False
        if isinstance(value, types.FunctionType | types.MethodType):
            if getattr(value, "__module__", "").split(".")[0] not in _SKIPPED_PACKAGES:
                self._add_function(value, depth + 1)
            return False
        # another object under the same name is another step
        self._add(f"the object {name!r}", lambda: id(getter()))
        self._add_object(name, value, names, depth)
        return True

    def _add_object(self, name: str, value: Any, names: set[str], depth: int) -> None:
        if id(value) in self._seen or depth > _DEPTH:
            return
        if isinstance(value, torch.Tensor):
            self._seen.add(id(value))
            self.reached.append(value)
            return
        if isinstance(value, torch.Generator):
            self._seen.add(id(value))
            self.generators.append(value)
            return
        if isinstance(value, nn.Module):
            self._add_module(name, value)
            return
        if isinstance(value, dict | list | tuple):
            self._add_items(name, value, names, depth)
            return
        if type(value).__module__.split(".")[0] in _SKIPPED_PACKAGES:
            return
        self._seen.add(id(value))
        attributes = getattr(value, "__dict__", None)
        if not attributes:
            return
        for key in names & attributes.keys():
            inner = attributes[key]
            if _is_scalar(inner):
                self._add(f"{name}.{key}", functools.partial(attributes.get, key))
                self._places.add_key(key, attributes)
            else:
                self._add_object(f"{name}.{key}", inner, names, depth + 1)

    def _add_items(self, name: str, value: Any, names: set[str], depth: int) -> None:
        """Scalars of a short container are watched; modules, tensors and generators in it are found."""
        self._seen.add(id(value))
        if len(value) > _MOST_ITEMS:
            return
        if isinstance(value, dict):
            self._add(name, lambda: {k: v if _is_scalar(v) else id(v) for k, v in value.items()})
        else:
            self._add(name, lambda: [v if _is_scalar(v) else id(v) for v in value])
        self._places.add_all(value)
        for inner in value.values() if isinstance(value, dict) else value:
            if not _is_scalar(inner):
                self._add_object(f"an item of {name}", inner, names, depth + 1)

    def _hook_count(self) -> tuple[int, ...]:
        # the handles' counter moves when any hook is registered anywhere: only then look at each module
        if RemovableHandle.next_id != self._hooks_id:
            self._hooks_id = RemovableHandle.next_id
            tables = [table for m in self.modules for key in _HOOKS if (table := m.__dict__.get(key))]
            for table in tables:
                # taking a hook away moves no counter
                if not any(table is known for known in self._hook_tables):
                    self._hook_tables.append(table)
                    self._places.add(len, table)
        self._hook_counts = tuple(map(len, self._hook_tables))
        return self._hook_counts


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _SCALARS)


def _names_in(code: types.CodeType) -> set[str]:
    """Global and attribute names that `code`, and functions defined in it, mention."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _names_read(function: Any, modules: Iterable[nn.Module]) -> set[str]:
    """Names that the user's own code mentions: the step, functions it reaches, forwards and hooks of modules."""
    names: set[str] = set()
    waiting: list[tuple[Any, int]] = [(function, 0)]
    seen: set[Any] = set()
    for root in modules:
        for module in root.modules():
            for key in _HOOKS:
                waiting += [(hook, 0) for hook in module.__dict__.get(key, {}).values()]
            for kind in type(module).__mro__[:-2]:
                if kind not in seen and not kind.__module__.startswith("torch."):
                    seen.add(kind)
                    waiting += [(member, _DEPTH) for member in vars(kind).values()]
    while waiting:
        one, depth = waiting.pop()
        one = getattr(one, "__func__", one)
        code = getattr(one, "__code__", None)
        if not isinstance(code, types.CodeType) or code in seen:
            continue
        seen.add(code)
        found = _names_in(code)
        names |= found
        if depth < _DEPTH:
            inner = [_cell_value(cell) for cell in getattr(one, "__closure__", None) or ()]
            inner += [one.__globals__[name] for name in found if name in one.__globals__]
            waiting += [
                (value, depth + 1)
                for value in inner
                if isinstance(value, types.FunctionType | types.MethodType)
                and getattr(value, "__module__", "").split(".")[0] not in _SKIPPED_PACKAGES
            ]
    return names


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _default(function: Any, index: int) -> Any:
    return function.__defaults__[index]


def _get_or_none(get: Callable[[Any], Any], values: dict[str, Any]) -> Any:
    try:
        return get(values)
    except KeyError:
        return None


def _identity_at(values: dict[str, Any], key: str) -> int:
    return id(values.get(key))


def _autocast() -> tuple[Any, ...]:
    """Which autocast is on, and its number formats; nothing where none is."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")
    )


def _identity_of_optimizer(optimizer: Any) -> tuple[int, int, int]:
    return (id(optimizer.state), id(optimizer.param_groups), len(optimizer.param_groups))


def _group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A param group's settings; a tensor is known by its identity, since its value may change on the device."""
    return {k: id(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
