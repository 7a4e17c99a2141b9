"""Values of all ranks brought together: gather, reduce, broadcast and pad over nested structures of tensors.

Structures are tuples, lists, named tuples, mappings and dataclasses, nested at will; the same structure comes
back. Every function is collective (all ranks call it, in the same order) and the identity on one process.
Tensors go through the backend of their own device; what has to be agreed about them (their shapes) goes over
the host's side group, so that no device is waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hotloop.errors import HotloopError, ProcessError
from hotloop.hardware.processes import Processes
from hotloop.nested import map_tensors, tensors_of

__all__ = [
    "StructureError",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "require_tensors",
]

REDUCTIONS = ("sum", "mean", "max", "min", "none")


class StructureError(HotloopError, TypeError):
    """A value that should hold only tensors, nested in containers, holds something else."""


def require_tensors(data: Any) -> None:
    """Raise unless every leaf of `data` is a tensor.

    Raises:
        StructureError: a leaf is something else.
    """
    if isinstance(data, torch.Tensor):
        return
    if isinstance(data, Mapping):
        parts: Iterable[Any] = data.values()
    elif isinstance(data, tuple | list):
        parts = data
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        parts = [getattr(data, field.name) for field in dataclasses.fields(data)]
    else:
        raise StructureError(
            f"found a {type(data).__name__} where only tensors can be (nested in tuples, lists, mappings or "
            "dataclasses); make it a tensor, or use the variant for objects"
        )
    for part in parts:
        require_tensors(part)


def gather(data: Any, processes: Processes, *, uneven: bool = False, check: bool | None = None) -> Any:
    """The tensors of all ranks, concatenated along their first dimension in rank order, on every rank.

    Args:
        data: structure of tensors of shape [n, ...] or 0-d; a 0-d one comes back as [world].
        processes: this process among the others.
        uneven: ranks may differ in the first dimension. Sizes are exchanged first; rows come back without
            padding. Without it the collective is the only communication.
        check: compare the shapes of all ranks before, so that a mismatch is an error and not a hang. Default:
            only for tensors on the CPU, where it costs no device anything.

    Raises:
        ProcessError: the shapes do not fit together.
        StructureError: `data` holds something that is no tensor.
    """
    require_tensors(data)
    if processes.world == 1:
        return data
    leaves = list(tensors_of(data))
    if uneven:
        every = _exchange_shapes(leaves, processes)
        _require_same(every, "gather", first_dimension=False)
        rows = iter(
            [[shapes[i][0][0] if shapes[i][0] else 1 for shapes in every] for i in range(len(leaves))]
        )
        return map_tensors(data, lambda t: _gather_rows(t, next(rows), processes))
    _check_shapes(leaves, processes, check, "gather")
    return map_tensors(data, lambda t: _gather_one(t, processes.world))


def gather_object(value: Any, processes: Processes) -> list[Any]:
    """The `value` (anything that pickles) of every rank, in rank order, on every rank."""
    return processes.gather_object(value)


def broadcast(data: Any, processes: Processes, *, source: int = 0, check: bool | None = None) -> Any:
    """Overwrite every rank's tensors in `data` with those of rank `source`; returns `data`.

    All ranks hold tensors of the same shapes and dtypes. `check` as in `gather`.

    Raises:
        ProcessError: the shapes of the ranks differ.
        StructureError: `data` holds something that is no tensor.
    """
    require_tensors(data)
    if processes.world == 1:
        return data
    leaves = list(tensors_of(data))
    _check_shapes(leaves, processes, check, "broadcast")
    import torch.distributed as dist

    for tensor in leaves:
        target = tensor.detach()
        if target.numel() == 0:
            continue
        flat = _as_bytes(target)
        dist.broadcast(flat, src=source)
        if processes.rank != source and flat.data_ptr() != target.data_ptr():
            target.copy_(flat.view(target.dtype).view(target.shape))
    return data


def broadcast_object_list(values: list[Any], processes: Processes, *, source: int = 0) -> list[Any]:
    """Overwrite `values` on every rank with those of rank `source` (pickled); returns the same list."""
    if processes.world > 1:
        values[:] = processes.broadcast_object(values, source=source)
    return values


def reduce(
    data: Any, processes: Processes, how: str = "sum", *, scale: float = 1.0, check: bool | None = None
) -> Any:
    """Elementwise reduction over the ranks, on every rank, as new tensors.

    Args:
        data: structure of tensors, of the same shapes on all ranks.
        processes: this process among the others.
        how: "sum", "mean" (sum / world; integers become floats), "max", "min" or "none" (a copy).
        scale: factor applied to the result.
        check: as in `gather`.

    Raises:
        ProcessError: the shapes differ, or `how` is none of these.
        StructureError: `data` holds something that is no tensor.
    """
    if how not in REDUCTIONS:
        raise ProcessError(f"there is no reduction {how!r}; choose one of {', '.join(REDUCTIONS)}")
    require_tensors(data)
    if processes.world > 1 and how != "none":
        _check_shapes(list(tensors_of(data)), processes, check, "reduce")
    return map_tensors(data, lambda t: _reduce_one(t, how, scale, processes.world))


def pad_across_processes(
    data: Any,
    processes: Processes,
    *,
    dim: int = 0,
    pad_index: float | torch.Tensor = 0,
    pad_first: bool = False,
) -> Any:
    """Tensors grown along `dim` to the largest size of any rank, so that they can be gathered.

    Args:
        data: structure of tensors; one that has no dimension `dim` stays as it is.
        processes: this process among the others.
        dim: the dimension to grow; negative counts from the last.
        pad_index: the value of new elements; a tensor broadcasts over them.
        pad_first: put the new elements before the old ones.

    Raises:
        ProcessError: the ranks hold another number of tensors, or tensors of other ranks of dimension.
        StructureError: `data` holds something that is no tensor.
    """
    require_tensors(data)
    if processes.world == 1:
        return data
    leaves = list(tensors_of(data))
    every = _exchange_shapes(leaves, processes)
    if any([len(s) for s, _ in shapes] != [len(s) for s, _ in every[0]] for shapes in every):
        raise ProcessError(_mismatch_text("pad_across_processes", every))
    positions = iter(range(len(leaves)))

    def grow(tensor: torch.Tensor) -> torch.Tensor:
        position = next(positions)
        if not -tensor.ndim <= dim < tensor.ndim or tensor.is_nested:
            return tensor
        axis = dim % tensor.ndim
        size = max(shapes[position][0][axis] for shapes in every)
        if size == tensor.shape[axis]:
            return tensor
        shape = list(tensor.shape)
        shape[axis] = size
        grown = tensor.new_zeros(shape) + pad_index
        start = size - tensor.shape[axis] if pad_first else 0
        grown.narrow(axis, start, tensor.shape[axis]).copy_(tensor)
        return grown

    return map_tensors(data, grow)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of the tensor or of a contiguous copy: every dtype travels on every backend."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _gather_one(tensor: torch.Tensor, world: int) -> torch.Tensor:
    import torch.distributed as dist

    tensor = tensor.detach()
    shape = tensor.shape if tensor.ndim else torch.Size([1])
    if tensor.numel() == 0:
        return tensor.new_empty((world * shape[0], *shape[1:]))
    flat = _as_bytes(tensor)
    every = flat.new_empty(world * flat.numel())
    # the newer name of the same collective; torch 2.11 and 2.12 have only the older one
    collect = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collect(every, flat)
    return every.view(tensor.dtype).view(world * shape[0], *shape[1:])


def _gather_rows(tensor: torch.Tensor, rows: list[int], processes: Processes) -> torch.Tensor:
    """Gather [n_r, ...] with a different n_r on each rank: padded for the wire, cut afterwards."""
    tensor = tensor.detach()
    if tensor.ndim == 0:
        tensor = tensor[None]
    most = max(rows)
    if len(tensor) < most:
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        tensor = padded
    every = _gather_one(tensor, processes.world)
    if all(count == most for count in rows):
        return every
    return torch.cat([every[rank * most : rank * most + count] for rank, count in enumerate(rows)])


def _reduce_one(tensor: torch.Tensor, how: str, scale: float, world: int) -> torch.Tensor:
    result = tensor.detach().clone()
    if how == "none":
        return result
    if world > 1:
        import torch.distributed as dist

        operation = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(how, dist.ReduceOp.SUM)
        result = result.contiguous()
        dist.all_reduce(result, operation)
        if how == "mean":
            result = result / world
    return result if scale == 1.0 else result * scale


Shapes = list[tuple[tuple[int, ...], str]]


def _exchange_shapes(leaves: list[torch.Tensor], processes: Processes) -> list[Shapes]:
    """Shape and dtype of every rank's tensors: host metadata over the host's side group."""
    return processes.gather_object([(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves])


def _check_shapes(
    leaves: list[torch.Tensor], processes: Processes, check: bool | None, operation: str
) -> None:
    if check is None:
        check = all(leaf.device.type == "cpu" for leaf in leaves)
    if check:
        _require_same(_exchange_shapes(leaves, processes), operation, first_dimension=True)


def _require_same(every: list[Shapes], operation: str, *, first_dimension: bool) -> None:
    start = 0 if first_dimension else 1
    kept = [[(shape[start:], len(shape), dtype) for shape, dtype in shapes] for shapes in every]
    if any(shapes != kept[0] for shapes in kept):
        raise ProcessError(_mismatch_text(operation, every))


def _mismatch_text(operation: str, every: list[Shapes]) -> str:
    seen = []
    for rank, shapes in enumerate(every):
        texts = [f"{list(shape)} {dtype.removeprefix('torch.')}" for shape, dtype in shapes]
        seen.append(f"rank {rank}: {', '.join(texts)}")
    return (
        f"{operation} was called with tensors that do not fit together ({'; '.join(seen)}); give every "
        "rank the same shapes and dtypes, pad them with pad_across_processes, or gather with uneven=True"
    )
