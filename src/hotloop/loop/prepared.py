"""What was given to `prepare`: modules, optimizers, schedulers, loaders, in any number, order and nesting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop.errors import PrepareError

__all__ = ["find_loader", "kind_of", "map_objects"]


def kind_of(thing: Any) -> str | None:
    """ "module", "optimizer", "scheduler", "loader", "container", or None for what cannot be prepared.

    A list, tuple or dict is a container if something in it can be prepared; a list of nothing but batches (tensors,
    arrays, numbers in any nesting) is a loader.
    """
    if isinstance(thing, nn.Module):
        return "module"
    if isinstance(thing, Optimizer) or _has(thing, "param_groups", "step", "zero_grad"):
        return "optimizer"
    if _has(thing, "step", "state_dict") and (hasattr(thing, "optimizer") or hasattr(thing, "get_last_lr")):
        return "scheduler"
    if isinstance(thing, list | tuple | Mapping):
        items = list(thing.values()) if isinstance(thing, Mapping) else list(thing)
        if any(kind_of(item) not in (None, "loader") or _is_loader_object(item) for item in items):
            return "container"
        if isinstance(thing, list) and items:
            return "loader"
        return "container" if any(kind_of(item) == "loader" for item in items) else None
    return "loader" if _is_loader_object(thing) else None


def _has(thing: Any, *names: str) -> bool:
    return not isinstance(thing, type) and all(hasattr(thing, name) for name in names)


def _is_loader_object(thing: Any) -> bool:
    simple = (torch.Tensor, str, bytes, list, tuple, Mapping, set, frozenset, range)
    if isinstance(thing, (*simple, type)) or type(thing).__module__ == "numpy":
        return False
    return isinstance(thing, Iterable) or hasattr(thing, "__getitem__")


def map_objects(thing: Any, kind: str, function: Callable[[Any], Any], where: str = "") -> Any:
    """`thing` with each object of that kind replaced by `function(object)`; containers keep their types.

    Raises:
        PrepareError: something in it cannot be prepared; says what and where.
    """
    found = kind_of(thing)
    if found is None:
        raise PrepareError(
            f"prepare cannot take {where or 'an argument'} of type {type(thing).__name__}: it takes modules, "
            "optimizers, loaders and schedulers, also nested in lists, tuples and dicts"
        )
    if found != "container":
        return function(thing) if found == kind else thing
    if isinstance(thing, Mapping):
        changed = {
            key: map_objects(value, kind, function, f"{where}[{key!r}]") for key, value in thing.items()
        }
        return changed if type(thing) is dict else type(thing)(changed)  # type: ignore[call-arg]
    items = [map_objects(value, kind, function, f"{where}[{i}]") for i, value in enumerate(thing)]
    return type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)


def find_loader(things: Any) -> Any:
    """The first loader in `things`, also inside containers; None if there is none."""
    for thing in things.values() if isinstance(things, Mapping) else things:
        kind = kind_of(thing)
        if kind == "loader":
            return thing
        if kind == "container" and (found := find_loader(thing)) is not None:
            return found
    return None
