"""Structures of tensors: tuples, lists, mappings, named tuples, dataclasses, in any nesting."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["map_tensors", "tensors_of"]


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
        return _rebuild_mapping(structure, changed)
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
        result = copy.copy(structure)
        for name, value in new.items():
            # a frozen dataclass refuses assignment from outside; this is its own copy being built
            object.__setattr__(result, name, value)
        return result
    return structure


def _rebuild_mapping(old: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping of `old`'s type with the values of `changed`, keeping what else the object carries."""
    if type(old) is dict:
        return changed
    try:
        result: Any = copy.copy(old)
        for key, value in changed.items():
            result[key] = value
    except TypeError:
        result = type(old)(changed)  # type: ignore[call-arg]
    return result


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
