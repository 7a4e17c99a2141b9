"""Everything a captured step has frozen: taken at each call, compared, and named where it changed.

A graph replays what was true when it was captured. These are the Python values that the step could have read then:
scalars in closures, globals and attributes; a module's settings and mode; parameters' place and whether they learn;
optimizers' settings; grad and autocast mode.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Fingerprint"]

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Attributes of every module that are bookkeeping of torch and hold no numbers that a forward uses.
_NOT_WATCHED = {"_is_full_backward_hook", "_compiled_call_impl", "_version", "_is_hf_initialized"}
_DEPTH = 3
_LEARNS = operator.attrgetter("requires_grad")


class Fingerprint:
    """The values that `function` may freeze, re-read in a few microseconds by `take`.

    Args:
        function: the step.
        modules: prepared modules; others are found through the function's closure and globals.
        optimizers: prepared optimizers.
        skip: objects that are not looked into (the loop itself).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Iterable[nn.Module],
        optimizers: Iterable[Any],
        skip: Iterable[Any] = (),
    ) -> None:
        self._names: list[str] = []
        self._getters: list[Callable[[], Any]] = []
        self._seen: set[int] = {id(thing) for thing in skip}
        self._modules: list[nn.Module] = []
        self._optimizers = list(optimizers)
        self._hooks_id = -1
        self._hook_counts: tuple[int, ...] = ()
        for i, module in enumerate(modules):
            self._add_module(f"module {i}" if i else "the module", module)
        self._add_function(function, 0)
        parameters = [p for m in self._modules for p in m._parameters.values() if p is not None]
        self.parameters = list(dict.fromkeys(parameters))
        for optimizer in self._optimizers:
            self._add("an optimizer's groups or state", functools.partial(_identity_of_optimizer, optimizer))
            for i, group in enumerate(optimizer.param_groups):
                self._add(f"param_groups[{i}]", functools.partial(_group_settings, group))
        # maps over C functions: these three look at every parameter in every call
        held = [m._parameters for m in self._modules if m._parameters]
        self._add("a parameter", lambda: list(map(id, itertools.chain.from_iterable(map(dict.values, held)))))
        self._add("requires_grad of a parameter", lambda: list(map(_LEARNS, self.parameters)))
        self._add("memory of a parameter", lambda: list(map(torch.Tensor.data_ptr, self.parameters)))
        self._add("grad mode", torch.is_grad_enabled)
        self._add("autocast", torch.is_autocast_enabled)
        self._add("a module's hooks", self._hook_count)

    def take(self) -> list[Any]:
        """The values now."""
        return [get() for get in self._getters]

    def tensors(self) -> dict[str, int]:
        """Identity of each module's buffers and tensor attributes, by name."""
        found: dict[str, int] = {}
        for module in self._modules:
            kind = type(module).__name__
            for name, buffer in module._buffers.items():
                found[f"{kind}.{name}"] = found.get(f"{kind}.{name}", 0) ^ id(buffer)
            for name, value in module.__dict__.items():
                if isinstance(value, torch.Tensor):
                    found[f"{kind}.{name}"] = found.get(f"{kind}.{name}", 0) ^ id(value)
        return found

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

    def _add(self, name: str, getter: Callable[[], Any]) -> None:
        self._names.append(name)
        self._getters.append(getter)

    def _add_module(self, name: str, root: nn.Module) -> None:
        for path, module in root.named_modules():
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            self._modules.append(module)
            values = module.__dict__
            keys = [k for k, v in values.items() if _is_scalar(v) and k not in _NOT_WATCHED]
            if keys:
                where = f"{name}.{path}" if path else name
                get = operator.itemgetter(*keys) if len(keys) > 1 else operator.itemgetter(keys[0], keys[0])
                self._add(f"{where}({','.join(keys)})", functools.partial(_get_or_none, get, values))

    def _add_function(self, function: Callable[..., Any], depth: int) -> None:
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is None or id(function) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(function))
        names = _names_in(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._add_value(name, functools.partial(_cell_value, cell), names, depth)
        scope = function.__globals__
        for name in names:
            if name in scope:
                self._add_value(name, functools.partial(scope.get, name), names, depth)
        for i in range(len(function.__defaults__ or ())):
            self._add_value(f"default {i}", functools.partial(_default, function, i), names, depth)

    def _add_value(self, name: str, getter: Callable[[], Any], names: set[str], depth: int) -> None:
        value = getter()
        if _is_scalar(value):
            self._add(name, getter)
            return
        if isinstance(value, types.ModuleType | type | types.BuiltinFunctionType):
            return
        if isinstance(value, types.FunctionType | types.MethodType):
            if getattr(value, "__module__", "").split(".")[0] not in ("torch", "hotloop"):
                self._add_function(value, depth + 1)
            return
        # another object under the same name is another step
        self._add(f"the object {name!r}", lambda: id(getter()))
        self._add_object(name, value, names, depth)

    def _add_object(self, name: str, value: Any, names: set[str], depth: int) -> None:
        if id(value) in self._seen or depth > _DEPTH or isinstance(value, torch.Tensor):
            return
        if isinstance(value, nn.Module):
            self._add_module(name, value)
            return
        if type(value).__module__.split(".")[0] in ("torch", "hotloop", "numpy"):
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            if len(value) <= 64:
                self._add(name, lambda: {k: v for k, v in value.items() if _is_scalar(v)})
            return
        if isinstance(value, list | tuple):
            if len(value) <= 32 and all(_is_scalar(v) for v in value):
                self._add(name, lambda: list(value))
            return
        attributes = getattr(value, "__dict__", None)
        if not attributes:
            return
        for key in names & attributes.keys():
            inner = attributes[key]
            if _is_scalar(inner):
                self._add(f"{name}.{key}", functools.partial(attributes.get, key))
            elif not isinstance(inner, torch.Tensor):
                self._add_object(f"{name}.{key}", inner, names, depth + 1)

    def _hook_count(self) -> tuple[int, ...]:
        # the handles' counter moves when any hook is registered anywhere: only then look at each module
        if RemovableHandle.next_id != self._hooks_id:
            self._hooks_id = RemovableHandle.next_id
            self._hook_counts = tuple(
                len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
                for m in self._modules
            )
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


def _identity_of_optimizer(optimizer: Any) -> tuple[int, int, int]:
    return (id(optimizer.state), id(optimizer.param_groups), len(optimizer.param_groups))


def _group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A param group's settings; a tensor is known by its identity, since its value may change on the device."""
    return {k: id(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
