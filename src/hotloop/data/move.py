"""Structures of a batch: walk them, move their tensors to a device, count their samples; types are kept."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "bytes_of",
    "count_samples",
    "is_copied_alone",
    "map_tensors",
    "move",
    "move_object",
    "new_pinned",
    "pin",
    "pin_object",
    "pin_tensor",
]

_PARALLEL_FROM = 32_768  # elements; at::internal::GRAIN_SIZE
_ALONE_BYTES = 4 << 20
_LEAVES = (str, bytes, int, float, bool, complex, type(None))


def map_tensors(
    batch: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    change_object: Callable[[Any], Any] | None = None,
) -> Any:
    """`batch` with every tensor in it replaced by `change(tensor)`; the very same object if nothing changed.

    Understood are dict, OrderedDict, defaultdict, UserDict and other mutable mappings, list, tuple,
    namedtuple, subclasses of these, and dataclasses (frozen ones too); each keeps its type and its other
    attributes. An object of another kind that has a `.to` method goes to `change_object`, if given.
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, _LEAVES):
        return batch
    kind = type(batch)
    if kind is list or kind is tuple:
        items = [map_tensors(item, change, change_object) for item in batch]
        if all(new is old for new, old in zip(items, batch, strict=True)):
            return batch
        return items if kind is list else tuple(items)
    if isinstance(batch, Mapping):
        if not _is_own_mapping(batch) and hasattr(batch, "to"):
            return batch if change_object is None else change_object(batch)
        return _map_mapping(batch, change, change_object)
    if isinstance(batch, (list, tuple)):
        if hasattr(batch, "to"):  # such as PackedSequence, whose constructor is no plain tuple's
            return batch if change_object is None else change_object(batch)
        return _map_sequence(batch, change, change_object)
    if hasattr(batch, "to") and not isinstance(batch, type):
        return batch if change_object is None else change_object(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _map_dataclass(batch, change, change_object)
    return batch


def _is_own_mapping(batch: Any) -> bool:
    return isinstance(batch, (dict, UserDict))


def _map_mapping(batch: Any, change: Any, change_object: Any) -> Any:
    items = {key: map_tensors(item, change, change_object) for key, item in batch.items()}
    if all(items[key] is batch[key] for key in items):
        return batch
    kind = type(batch)
    if kind is dict:
        return items
    if kind is OrderedDict:
        return OrderedDict(items)
    if kind is defaultdict:
        return defaultdict(batch.default_factory, items)
    if isinstance(batch, MutableMapping):
        changed: Any = copy.copy(batch)
        for key, item in items.items():
            changed[key] = item
        return changed
    return kind(items)


def _map_sequence(batch: Any, change: Any, change_object: Any) -> Any:
    items = [map_tensors(item, change, change_object) for item in batch]
    if all(new is old for new, old in zip(items, batch, strict=True)):
        return batch
    kind: Any = type(batch)
    if isinstance(batch, list):
        changed = copy.copy(batch)
        changed[:] = items
        return changed
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def _map_dataclass(batch: Any, change: Any, change_object: Any) -> Any:
    changes = {}
    for field in dataclasses.fields(batch):
        old = getattr(batch, field.name)
        new = map_tensors(old, change, change_object)
        if new is not old:
            changes[field.name] = new
    if not changes:
        return batch
    changed = copy.copy(batch)
    for name, new in changes.items():
        object.__setattr__(changed, name, new)  # a frozen class refuses the ordinary way
    return changed


def move(batch: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """`batch` with all its tensors on `device`; the same object if they all are there already.

    Objects with a `.to` method are moved by it, and what it returns (or the object itself, if it returns
    None) takes their place.
    """
    device = torch.device(device)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=non_blocking)

    return map_tensors(batch, change, lambda value: move_object(value, device, non_blocking))


def move_object(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """`value.to(device)`, with `non_blocking` if its method takes that."""
    try:
        moved = value.to(device, non_blocking=non_blocking)
    except TypeError:
        moved = value.to(device)
    return value if moved is None else moved


def pin(batch: Any) -> Any:
    """`batch` with its tensors of the host in page-locked memory, and objects that can pin themselves asked to."""
    return map_tensors(batch, pin_tensor, pin_object)


def pin_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in page-locked memory, if it lies in the host's and its layout can be there."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return tensor
    if not is_copied_alone(tensor) or tensor.is_pinned():
        return tensor.pin_memory()
    pinned = new_pinned(tensor.shape, tensor.dtype, tensor.stride())
    np.copyto(bytes_of(pinned), bytes_of(tensor))
    return pinned


def new_pinned(shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> torch.Tensor:
    """An empty tensor in page-locked memory; contiguous, if no strides are given."""
    if stride is None:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=True)


def is_copied_alone(tensor: torch.Tensor) -> bool:
    """Whether copying a tensor of the host is better left to one thread than to torch.

    Torch lets all its threads take part from 32,768 elements on. Where another process has one of their cores, the
    others wait until that thread has its turn: 9 ms for one copy of 1 MB in ten on a machine with 32 cores, where one
    thread takes 0.05 ms.
    """
    return (
        tensor.numel() > _PARALLEL_FROM
        and tensor.nbytes <= _ALONE_BYTES
        and type(tensor) is torch.Tensor
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def bytes_of(tensor: torch.Tensor, rows: int = 1) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous tensor of the host, the memory itself, as so many rows."""
    found: npt.NDArray[np.uint8] = tensor.view(rows, -1).view(torch.uint8).numpy()
    return found


def pin_object(value: Any) -> Any:
    """What an object's `pin_memory` gives; itself, if it has none."""
    return value.pin_memory() if hasattr(value, "pin_memory") else value


def count_samples(batch: Any) -> int:
    """How many samples `batch` holds: the length of the first dimension of its first tensor.

    Without a tensor that has dimensions, the length of its first list; without one, 1.

    >>> count_samples({"ids": torch.zeros(7, 3), "name": ["a"] * 7})
    7
    >>> count_samples(["first", "second"])
    2
    """
    size = _first_size(batch)
    if size is not None:
        return size
    found = _first_list(batch)
    return 1 if found is None else found


def _first_size(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, _LEAVES):
        return None
    for item in _children(batch):
        size = _first_size(item)
        if size is not None:
            return size
    return None


def _first_list(batch: Any) -> int | None:
    if isinstance(batch, list):
        inner = next((item for item in batch if isinstance(item, (list, Mapping))), None)
        return len(batch) if inner is None else _first_list(inner)
    if isinstance(batch, (*_LEAVES, torch.Tensor)):
        return None
    for item in _children(batch):
        found = _first_list(item)
        if found is not None:
            return found
    return None


def _children(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, (list, tuple)):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if hasattr(batch, "to") and hasattr(batch, "__dict__"):
        return vars(batch).values()
    return ()
