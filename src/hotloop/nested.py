"""Tensors, where they lie, and structures of them: tuples, lists, mappings, dataclasses and so on, in any nesting."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["is_store", "map_tensors", "memory_of", "rebuilt", "tensors_of"]


def map_tensors(structure: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """`structure` with every tensor replaced by `function(tensor)`; containers keep their types.

    A structure in which nothing changed is returned as it is, not copied. What is no container and no tensor
    is left alone.

    >>> map_tensors({"x": torch.ones(2), "n": 3}, lambda t: t + 1)
    {'x': tensor([2., 2.]), 'n': 3}
    """
    if isinstance(structure, torch.Tensor):
        return function(structure)
    if isinstance(structure, Mapping):
        changed = {key: map_tensors(value, function) for key, value in structure.items()}
        if all(changed[key] is structure[key] for key in changed):
            return structure
        return rebuilt(structure, changed)
    if isinstance(structure, list | tuple):
        items = [map_tensors(value, function) for value in structure]
        if all(new is old for new, old in zip(items, structure, strict=True)):
            return structure
        if hasattr(structure, "_fields"):
            return type(structure)(*items)
        return type(structure)(items)
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        fields = {f.name: getattr(structure, f.name) for f in dataclasses.fields(structure)}
        new = {name: map_tensors(value, function) for name, value in fields.items()}
        if all(new[name] is fields[name] for name in fields):
            return structure
        return rebuilt(structure, new)
    return structure


def rebuilt(old: Any, values: dict[Any, Any]) -> Any:
    """An object of the type of `old` with `values` in it; what else it carries, it keeps.

    Args:
        old: a mapping or a dataclass; it stays as it is.
        values: for a mapping all its items, for a dataclass some of its fields.

    Raises:
        TypeError: it can be neither copied nor made anew.
    """
    if not isinstance(old, Mapping):
        result = copy.copy(old)
        if result is old:
            raise TypeError(f"a copy of an object of type {type(old).__name__} is the object itself")
        for name, value in values.items():
            # a frozen dataclass refuses assignment from outside; this is its own copy being built
            object.__setattr__(result, name, value)
        return result
    if type(old) is dict:
        return values
    try:
        return _copied(old, values)
    except TypeError:
        return type(old)(values)  # type: ignore[call-arg]


def _copied(old: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A copy of `old` with other items.

    Raises:
        TypeError: it has no copy that items can be set in.
    """
    result: Any = copy.copy(old)
    carried = getattr(old, "__dict__", None) or {}
    if carried is old:
        # items that are attributes, too, by `self.__dict__ = self`
        result.__dict__ = result
    stores = [name for name, value in carried.items() if is_store(value, old)]
    for name in stores:
        # where items lie is shared with the copy
        object.__setattr__(result, name, rebuilt(carried[name], values))
    if not stores:
        for key, value in values.items():
            was = old[key]
            # an item that is made on being asked for is another one each time
            kept = value is not was and old[key] is was
            result[key] = value
            if kept and old[key] is not was:
                old[key] = was  # type: ignore[index]
                raise TypeError(f"a copy of an object of type {type(old).__name__} shares its items")
    for name, value in list(carried.items()):
        if name in values and value is old[name]:
            object.__setattr__(result, name, values[name])
    return result


def is_store(value: Any, of: Mapping[Any, Any]) -> bool:
    """Whether `value`, an attribute of a mapping, is the dict that the mapping's items lie in.

    >>> from collections import UserDict
    >>> mapping = UserDict(a=1)
    >>> is_store(mapping.data, mapping), is_store({"a": 2}, mapping)
    (True, False)
    """
    if not isinstance(value, dict) or value is of or len(value) != len(of):
        return False
    return all(key in value and value[key] is item for key, item in of.items())


def tensors_of(structure: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `structure`, depth first.

    >>> [t.shape[0] for t in tensors_of([torch.ones(2), (torch.ones(3), "a")])]
    [2, 3]
    """
    if isinstance(structure, torch.Tensor):
        yield structure
    elif isinstance(structure, Mapping):
        for value in structure.values():
            yield from tensors_of(value)
    elif isinstance(structure, list | tuple):
        for value in structure:
            yield from tensors_of(value)
    elif dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        for field in dataclasses.fields(structure):
            yield from tensors_of(getattr(structure, field.name))


def memory_of(tensor: torch.Tensor) -> int | None:
    """Where the memory that a tensor lies in begins; None if it has none of its own, or several pieces."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None
