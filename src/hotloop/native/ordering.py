"""Order statistics of few values: sorting, the largest k, medians, running extremes, in operations that have a C form.

Each value's rank is the number of those before it, by comparing all pairs: no branches, and exact. For the tens of
values that a small model sorts that is quick; beyond a stated size it is refused. Equal values keep their order
(PyTorch promises that of a stable sort only). What is not a number counts as the largest, as in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hotloop.native.faults import NoForm

__all__ = ["ORDERS", "UNSTABLE"]

Tensor = torch.Tensor
_MOST_PAIRS = 1 << 20

# Operations of whose equal values PyTorch does not say which comes first.
UNSTABLE = ("topk", "sort", "argsort", "kthvalue", "median")


def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    # an index is a float32 in the library: exact up to 2**24
    if dim is None:
        return _argmax(x.flatten(), 0)
    # what is not a number counts as the largest, as in PyTorch
    x = torch.where(torch.isnan(x), math.inf, x)
    here = x == torch.amax(x, dim, keepdim=True)
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    place = torch.arange(x.shape[dim], dtype=x.dtype).view(shape)
    return torch.amin(torch.where(here, place, math.inf), dim, keepdim=keepdim)


def _argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _argmax(-x, dim, keepdim)


def _max(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return torch.amax(x, dim, keepdim=keepdim), _argmax(x, dim, keepdim)


def _min(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return torch.amin(x, dim, keepdim=keepdim), _argmin(x, dim, keepdim)


def _ordered(x: Tensor, dim: int, wanted: list[int], descending: bool) -> tuple[Tensor, Tensor]:
    """The values whose ranks are `wanted`, and where they stood, along `dim`."""
    if x.ndim == 0:
        return x, torch.zeros_like(x)
    x = x.movedim(dim, -1)
    count = x.shape[-1]
    pairs = x.numel() * max(count, len(wanted))
    if pairs > _MOST_PAIRS:
        raise NoForm(
            f"sorting compares all pairs, here {pairs:,} of them; beyond {_MOST_PAIRS:,} (one row of 1,024 values) it "
            "has no C form"
        )
    key = torch.where(torch.isnan(x), math.inf, x) if x.is_floating_point() else x
    mine, other = key.unsqueeze(-1), key.unsqueeze(-2)
    place = torch.arange(count, dtype=torch.float32)
    earlier = place.unsqueeze(0) < place.unsqueeze(1)
    before = (other > mine) if descending else (other < mine)
    rank = torch.sum(torch.where(before | ((other == mine) & earlier), 1.0, 0.0), -1)
    here = rank.unsqueeze(-2) == torch.tensor([[float(r)] for r in wanted])
    index = torch.sum(torch.where(here, place, 0.0), -1)
    values = torch.sum(torch.where(here, x.unsqueeze(-2), 0.0), -1)
    return values.movedim(-1, dim), index.movedim(-1, dim)


def _topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    return _ordered(x, dim, list(range(k)), largest)


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return _ordered(x, dim, list(range(x.shape[dim] if x.ndim else 1)), descending)


def _sort_stable(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    return _sort(x, dim, descending)


def _argsort(x: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
    return _sort(x, dim, descending)[1]


def _kth(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, index = _ordered(x, dim, [k - 1], False)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def _median(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    # of an even number the lower one, as in PyTorch; what is not a number spoils it: a sum of nothing but that
    values, index = _kth(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    return values + torch.sum(x * 0.0, dim, keepdim=keepdim), index


def _median_of_all(x: Tensor) -> Tensor:
    return _median(x.flatten(), 0)[0]


def _running(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    best, place = [x.select(dim, 0)], [torch.zeros_like(x.select(dim, 0))]
    for t in range(1, x.shape[dim]):
        value = x.select(dim, t)
        wins = (value >= best[-1]) if largest else (value <= best[-1])
        wins = wins | torch.isnan(value)
        best.append(torch.where(wins, value, best[-1]))
        place.append(torch.where(wins, float(t), place[-1]))
    return torch.stack(best, dim), torch.stack(place, dim)


ORDERS: dict[str, Callable[..., Any]] = {
    "argmax": _argmax,
    "argmin": _argmin,
    "max.dim": _max,
    "min.dim": _min,
    "topk": _topk,
    "sort": _sort,
    "sort.stable": _sort_stable,
    "argsort": _argsort,
    "kthvalue": _kth,
    "median": _median_of_all,
    "median.dim": _median,
    "cummax": lambda x, dim: _running(x, dim, True),
    "cummin": lambda x, dim: _running(x, dim, False),
}
