"""Everything a captured step has frozen: looked at in each call, compared, and named where it changed.

A graph replays what was true when it was captured. These are the Python values that the step could have read then:
scalars in closures, globals and attributes; functions and objects that names stand for; a module's settings, mode and
buffers; parameters' place and whether they learn; optimizers' settings; grad and autocast mode.

Two ways of looking. `unchanged` asks whether every place still holds the very same object, which costs microseconds.
Only where one does not, `take` reads all values, to be compared as values.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from hotloop.capture.identities import SCALARS, Identities, Mark, alike
from hotloop.capture.places import registrations
from hotloop.capture.reach import HOOKS, Attributes, reach

__all__ = ["Fingerprint"]

_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOKS_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = [f"_global{key}" for key in HOOKS]
_LEARNS = operator.attrgetter("requires_grad")
_ADDRESS = torch.Tensor.data_ptr
_GRADIENT = operator.attrgetter("grad")


class Fingerprint:
    """The values that `function` may freeze.

    Args:
        function: the step.
        modules: prepared modules; others are found through the names in the step's code.
        optimizers: prepared optimizers whose settings may be frozen.
        skip: objects that are not looked into (the loop itself).
        parameters: further parameters that may get gradients.
        identities: tells objects apart for as long as fingerprints are compared; one of its own by default.
        arguments: objects that the step is given and may look into.

    Attributes:
        function: the step.
        parameters: of the modules, then those that only an optimizer holds.
        modules: all modules found, with their submodules.
        generators: generators of random numbers that the step can reach.
        reached: tensors that the step can reach by itself, not through a module or an optimizer.
        names: of the values that `take` gives, in order.
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
        identities: Identities | None = None,
        arguments: Iterable[Any] = (),
    ) -> None:
        self.function = function
        self.names: list[str] = []
        self._getters: list[Callable[[], Any]] = []
        self._leads: list[bool] = []
        self._mark = identities = Identities() if identities is None else identities
        self._optimizers = list(optimizers)
        roots = list(modules)
        tensors = [p for root in roots for p in root.parameters()]
        others = [("a hook", hook) for hook in self._hooks_of(tensors)]
        others += [(f"an argument of type {type(thing).__name__}", thing) for thing in arguments]
        found = reach(function, roots, others, identities, skip)
        self._places = found.places
        self.modules, self.generators, self.reached = found.modules, found.generators, found.tensors
        for watch in found.watches:
            self._add(watch.name, watch.get, leads=watch.leads)
        self._held = [m._parameters for m in self.modules if m._parameters]
        self._buffers = [m._buffers for m in self.modules if m._buffers]
        self._children = [m._modules for m in self.modules if m._modules]
        self._attributes = [m.__dict__ for m in self.modules]
        for optimizer in self._optimizers:
            self._add_optimizer(optimizer)
        groups = [group["params"] for o in self._optimizers for group in o.param_groups]
        self.parameters: list[torch.Tensor] = list(
            dict.fromkeys(itertools.chain(self._live_parameters(), *groups, parameters))
        )
        self._looked_at = [*self.parameters, *(t for t in self.reached if _lies_somewhere(t))]
        self._add("a module", self._live_modules, leads=True)
        self._add("a parameter", lambda: _marks_of(identities, self._live_parameters()), leads=True)
        self._add("a buffer", self._live_buffers, leads=True)
        self._add("requires_grad of a parameter", self._learning)
        self._add("memory of a parameter", self._addresses)
        self._add("grad mode", torch.is_grad_enabled)
        self._add("autocast", _autocast)
        self._hooks_id = -1
        self._hook_tables: list[Any] = []
        self._add("a module's hooks", self._look_for_hooks, leads=True)
        self.remember()

    def _add_optimizer(self, optimizer: Any) -> None:
        mark, which = self._mark, self._mark.of(optimizer)
        for key in ("state", "param_groups"):
            # large, and replaced by what is loaded: the one before is not to be kept
            latest = functools.partial(_latest, mark, (which, key), optimizer, key)
            self._add("an optimizer's groups or state", latest, leads=True)
            self._places.add_key(key, optimizer.__dict__)
        self._add("an optimizer's groups", lambda: len(optimizer.param_groups), leads=True)
        self._places.add(len, optimizer.param_groups)
        for i, group in enumerate(optimizer.param_groups):
            self._add(f"param_groups[{i}]", functools.partial(self._settings_of, group))
            which_ones = functools.partial(_marks_of, mark, group["params"])
            self._add(f"parameters of param_groups[{i}]", which_ones, leads=True)
            self._places.add_all(group)
            self._places.add(len, group["params"])

    def _settings_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """A param group's settings; a tensor is known by its identity, since its value may change on the device."""
        return {k: self._mark.mark(v) for k, v in group.items() if k != "params"}

    def remember(self) -> None:
        """What is there now is what `unchanged` compares with."""
        self._look_for_hooks()
        self.unchanged = self._watch()

    def _watch(self) -> Callable[[], bool]:
        """A function that says whether all is as it is now: no value can differ then.

        Parameters, buffers and modules put in another's place are noticed by torch's registration hooks; those written
        into a module's tables past torch are looked for in turn, one table in each call.
        """
        registered, handle = registrations(), RemovableHandle
        registered_before, handles_before = registered.count, handle.next_id
        grad_enabled, grad_before = torch.is_grad_enabled, torch.is_grad_enabled()
        any_autocast, autocast_before = torch._C._is_any_autocast_enabled, _autocast()
        places_unchanged = self._places.watch()
        looked_at, learning, addresses = self._looked_at, self._learning(), self._addresses()
        sized: list[dict[str, Any]] = [*self._attributes, *self._children]
        sizes = list(map(len, sized))
        held: list[dict[str, Any]] = [*self._held, *self._buffers, *self._children]
        tables = itertools.cycle([(table, list(table.values())) for table in held] or [({}, [])])

        def unchanged() -> bool:
            if (
                registered.count != registered_before
                or handle.next_id != handles_before
                or grad_enabled() is not grad_before
                or ((any_autocast() or autocast_before) and _autocast() != autocast_before)
                or not places_unchanged()
                or list(map(len, sized)) != sizes
            ):
                return False
            table, known = next(tables)
            return (
                len(table) == len(known)
                and all(map(operator.is_, table.values(), known))
                and list(map(_LEARNS, looked_at)) == learning
                and list(map(_ADDRESS, looked_at)) == addresses
            )

        return unchanged

    def gradients_wait(self) -> bool:
        """Whether gradients lie in any of the parameters."""
        # where there are some, the last parameters have them most often; elsewhere all are asked, in C
        parameters = self.parameters
        if not parameters or parameters[-1].grad is not None:
            return bool(parameters)
        return list(map(_GRADIENT, parameters)).count(None) != len(parameters)

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
        for name, a, b in zip(self.names, old, new, strict=True):
            if alike(a, b):
                continue
            if isinstance(a, dict) and isinstance(b, dict):
                for key in [*a, *(key for key in b if key not in a)]:
                    if key not in a or key not in b or not alike(a[key], b[key]):
                        return _told(name, isinstance(a, Attributes), key, a, b)
            if isinstance(a, SCALARS) and isinstance(b, SCALARS):
                return f"{name}: {a!r} -> {b!r}"
            return name
        return "nothing"

    def leads_elsewhere(self, old: list[Any], new: list[Any]) -> bool:
        """Whether values differ behind which others may be reached: what is watched has to be found again."""
        return any(leads and _leads(a, b) for leads, a, b in zip(self._leads, old, new, strict=True))

    # -------------------------------------------------------------------------------------------- what is watched

    def _live_parameters(self) -> Iterator[torch.Tensor]:
        return (p for held in self._held for p in held.values() if p is not None)

    def _live_modules(self) -> list[Any]:
        of = self._mark.of
        children = [of(m) for module in self.modules for m in module._modules.values() if m is not None]
        return [*children, *(type(m) for m in self.modules)]

    def _live_buffers(self) -> list[Any]:
        of = self._mark.of
        return [of(b) for module in self.modules for b in module._buffers.values() if b is not None]

    def _learning(self) -> list[bool]:
        return list(map(_LEARNS, self._looked_at))

    def _addresses(self) -> list[int]:
        return list(map(_ADDRESS, self._looked_at))

    def _add(self, name: str, getter: Callable[[], Any], *, leads: bool = False) -> None:
        self.names.append(name)
        self._getters.append(getter)
        self._leads.append(leads)

    def _hook_tables_of(self, tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
        yield from (getattr(torch_module, key, None) for key in _GLOBAL_HOOKS)
        yield from (getattr(t, key, None) for t in tensors for key in _HOOKS_OF_TENSORS)
        yield from (getattr(o, key, None) for o in self._optimizers for key in _HOOKS_OF_OPTIMIZERS)

    def _hooks_of(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        return [hook for table in self._hook_tables_of(tensors) if table for hook in list(table.values())]

    def _look_for_hooks(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the hooks of each module, parameter and optimizer that has any."""
        # the handles' counter moves when any hook is registered anywhere: only then look at each
        if RemovableHandle.next_id != self._hooks_id:
            self._hooks_id = RemovableHandle.next_id
            tables = [m.__dict__.get(key) for m in self.modules for key in HOOKS]
            for table in [*tables, *self._hook_tables_of(self.parameters)]:
                # taking a hook away moves no counter
                if table and not any(table is known for known in self._hook_tables):
                    self._hook_tables.append(table)
                    self._places.add(len, table)
        return tuple(map(tuple, self._hook_tables))


def _latest(mark: Identities, place: tuple[Mark, str], optimizer: Any, key: str) -> Mark:
    return mark.latest(place, getattr(optimizer, key))


def _marks_of(mark: Identities, things: Iterable[Any]) -> list[Mark]:
    return list(map(mark.of, things))


def _told(name: str, attributes: bool, key: Any, a: dict[Any, Any], b: dict[Any, Any]) -> str:
    place = f"{name}.{key}" if attributes else f"{name}[{key!r}]"
    before, after = (values.get(key, "nothing") for values in (a, b))
    if isinstance(before, Mark) or isinstance(after, Mark):
        return f"the object {place!r}"
    return f"{place}: {before!r} -> {after!r}"


def _leads(a: Any, b: Any) -> bool:
    """Whether two values differ in more than numbers and names: `training` leads nowhere, another object may."""
    if alike(a, b) or (isinstance(a, SCALARS) and isinstance(b, SCALARS)):
        return False
    if type(a) is type(b):
        if isinstance(a, dict) and a.keys() == b.keys():
            return any(_leads(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple) and len(a) == len(b):
            return any(map(_leads, a, b))
    return True


def _lies_somewhere(tensor: torch.Tensor) -> bool:
    """Whether its memory has an address that can be asked for."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def _autocast() -> tuple[Any, ...]:
    """Which autocast is on, and its number formats; nothing where none is."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")
    )
