"""Picking and placing by computed indices: gather, indexing by several tensors, scatter, writes to slices.

All reading becomes one lookup in a flat table, table[index]; all writing a choice, for each place, of what is written
there last. An index that is out of range is clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotloop.native.faults import NoForm

__all__ = ["PICKS"]

Tensor = torch.Tensor
# Integers are floats in a library, exact below this.
_MOST_PLACES = 1 << 24
_MOST_PAIRS = 1 << 20


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """table[index] along dimension 0: what has a C form."""
    found: Tensor = torch.ops.aten.index.Tensor(table, [index])
    return found


def _within(index: Tensor, size: int) -> Tensor:
    index = index.to(torch.int64) if index.is_floating_point() else index
    return torch.clamp(torch.where(index < 0, index + size, index), 0, size - 1)


def _joined(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[list[int], Tensor, Tensor]:
    """The dimensions that are indexed, x with them flattened in front, and one index into that."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    if any(index is not None and index.dtype == torch.bool for index in indices):
        raise NoForm("picking by a computed mask has a result of no fixed size; use torch.where")
    if math.prod(x.shape[d] for d in dims) >= _MOST_PLACES:
        raise NoForm("the indices run over more than 2**24 places, beyond what a float32 can count")
    given = torch.broadcast_tensors(*(index for index in indices if index is not None))
    place: Tensor | None = None
    for d, index in zip(dims, given, strict=True):
        index = _within(index, x.shape[d])
        place = index if place is None else place * x.shape[d] + index
    assert place is not None
    rest = [d for d in range(x.ndim) if d not in dims]
    return dims, x.permute([*dims, *rest]).flatten(0, len(dims) - 1), place


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    dims, table, place = _joined(x, indices)
    found = _rows(table, place)
    if dims != list(range(dims[0], dims[-1] + 1)):
        return found
    # indices side by side: their dimensions stand where they stood
    before = list(range(place.ndim, place.ndim + dims[0]))
    after = list(range(place.ndim + dims[0], found.ndim))
    return found.permute([*before, *range(place.ndim), *after])


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return _index(x, [None] * (dim % x.ndim) + [index])


def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    if x.ndim == 0:
        return x
    dim = dim % x.ndim
    every = []
    for d in range(x.ndim):
        shape = [1] * x.ndim
        shape[d] = index.shape[d]
        every.append(index if d == dim else torch.arange(index.shape[d]).view(shape))
    return _index(x, every)


def _take_along_dim(x: Tensor, index: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return _rows(x.flatten(), index.flatten())
    dim = dim % x.ndim
    shape = [max(a, b) for a, b in zip(x.shape, index.shape, strict=True)]
    shape[dim] = index.shape[dim]
    wide = [x.shape[d] if d == dim else n for d, n in enumerate(shape)]
    return _gather(x.expand(wide), dim, index.expand(shape))


def _writers(index: Tensor, size: int) -> Tensor:
    """[..., m] indices to [..., size, m]: whether the m-th writes to that place."""
    if index.numel() * size > _MOST_PAIRS:
        raise NoForm(f"writing by computed indices tries all pairs, here more than {_MOST_PAIRS:,}")
    return index.unsqueeze(-2) == torch.arange(size).unsqueeze(-1)


def _same_but(x: Tensor, dim: int, index: Tensor) -> None:
    if any(d != dim and index.shape[d] != x.shape[d] for d in range(x.ndim)):
        raise NoForm("a scatter into a part of the other dimensions has no C form; slice before")


def _scatter(x: Tensor, dim: int, index: Tensor, source: Any) -> Tensor:
    dim = dim % x.ndim
    _same_but(x, dim, index)
    size, count = x.shape[dim], index.shape[dim]
    hits = _writers(index.movedim(dim, -1), size)
    last = torch.amax(torch.where(hits, torch.arange(count, dtype=torch.float32), -1.0), -1)
    if isinstance(source, Tensor):
        part = source[tuple(slice(0, n) for n in index.shape)].movedim(dim, -1)
        source = _gather(part, -1, torch.clamp(last, min=0)).movedim(-1, dim)
    return torch.where(last.movedim(-1, dim) >= 0, source, x)


def _scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    dim = dim % x.ndim
    _same_but(x, dim, index)
    hits = _writers(index.movedim(dim, -1), x.shape[dim])
    part = source[tuple(slice(0, n) for n in index.shape)].movedim(dim, -1)
    return x + torch.sum(torch.where(hits, part.unsqueeze(-2), 0.0), -1).movedim(-1, dim)


def _index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    first = indices[0]
    if len(indices) == 1 and first is not None and first.dtype == torch.bool:
        if values.numel() != 1 or accumulate:
            raise NoForm("writing several values by a computed mask has no C form; use torch.where")
        mask = first.view([*first.shape, *([1] * (x.ndim - first.ndim))])
        return torch.where(mask, values.reshape([]), x)
    dims, table, place = _joined(x, indices)
    rest = table.shape[1:]
    if dims != list(range(len(dims))):
        raise NoForm("writing by indices along other than the first dimensions has no C form; permute before")
    flat = table.reshape(table.shape[0], math.prod(rest))
    given = values.expand([*place.shape, *rest]).reshape(place.numel(), flat.shape[1])
    hits = _writers(place.reshape(-1), flat.shape[0])
    if accumulate:
        return (flat + torch.where(hits, 1.0, 0.0) @ given).reshape(x.shape)
    last = torch.amax(torch.where(hits, torch.arange(place.numel(), dtype=torch.float32), -1.0), -1)
    written = _rows(given, torch.clamp(last, min=0).to(torch.int64))
    return torch.where(last.unsqueeze(-1) >= 0, written, flat).reshape(x.shape)


def _slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    size = x.shape[dim]
    places = range(size)[slice(start, end, step)]
    if len(places) == size:
        return source.expand(x.shape)
    if not places:
        return x
    if step == 1:
        parts = [x.narrow(dim, 0, places[0]), source, x.narrow(dim, places[-1] + 1, size - places[-1] - 1)]
        return torch.cat([part for part in parts if part.shape[dim]], dim)
    where = {place: p for p, place in enumerate(places)}
    picked = [source.narrow(dim, where[t], 1) if t in where else x.narrow(dim, t, 1) for t in range(size)]
    return torch.cat(picked, dim)


def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    index = index % x.shape[dim]
    return _slice_scatter(x, source.unsqueeze(dim), dim, index, index + 1)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    a, b = dim1 % x.ndim, dim2 % x.ndim
    x = x.permute([*(d for d in range(x.ndim) if d not in (a, b)), a, b])
    rows, columns = x.shape[-2:]
    count = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    start = offset if offset >= 0 else -offset * columns
    flat = x.flatten(-2)
    return (
        flat[..., start : start + (count - 1) * (columns + 1) + 1 : columns + 1] if count else flat[..., :0]
    )


def _adaptive_max_pool(rank: int) -> Callable[[Tensor, Any], tuple[Tensor, Tensor]]:
    def pool(x: Tensor, size: Any) -> tuple[Tensor, Tensor]:
        for d, count in enumerate([size] * rank if isinstance(size, int) else size):
            dim = x.ndim - rank + d
            length = x.shape[dim]
            spans = [(p * length // count, -(-(p + 1) * length // count)) for p in range(count)]
            x = torch.stack([torch.amax(x.narrow(dim, a, b - a), dim) for a, b in spans], dim)
        return x, x

    return pool


PICKS: dict[str, Callable[..., Any]] = {
    "index.Tensor": _index,
    "index_select": _index_select,
    "gather": _gather,
    "take_along_dim": _take_along_dim,
    "scatter.src": _scatter,
    "scatter.value": _scatter,
    "scatter_add": _scatter_add,
    "index_put": _index_put,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "diagonal": _diagonal,
    "adaptive_max_pool1d": _adaptive_max_pool(1),
    "adaptive_max_pool2d": _adaptive_max_pool(2),
}
