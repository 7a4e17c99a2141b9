"""Windows [B, T, F] out of one resident array [N, F], never across the border of a group."""

from __future__ import annotations

from typing import Any

import torch

from hotloop.errors import DataError
from hotloop.kernels.windows import cut_windows

__all__ = ["ResidentWindows", "window_starts"]


def window_starts(
    rows: int,
    length: int,
    *,
    ids: Any = None,
    offsets: Any = None,
    stride: int = 1,
    horizon: int = 0,
) -> torch.Tensor:
    """First rows of all windows of `length` rows that lie, with `horizon` rows more, inside one group: int64 [M].

    Args:
        rows: N.
        ids: [N], the group of each row; a group is a run of equal ids, so one that comes back later is another.
            Numbers: a tensor, an array or a list, as offsets.
        offsets: int64 [G + 1], the first row of each group, and N; instead of ids.
        stride: rows between two windows of a group, the first of which begins with it.

    Raises:
        DataError: both ids and offsets, or ones that do not fit `rows`, or counts below their least.
    """
    if length < 1 or stride < 1 or horizon < 0:
        raise DataError(
            f"length={length} and stride={stride} must be at least 1, horizon={horizon} at least 0"
        )
    if ids is not None and offsets is not None:
        raise DataError("give the groups as ids or as offsets, not both")
    if ids is not None:
        ids = _as_tensor(ids, "ids")
        if ids.dim() != 1 or len(ids) != rows:
            raise DataError(f"ids of shape {list(ids.shape)} do not name the groups of {rows} rows")
        changes = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
        ends = torch.tensor([rows], device=ids.device)
        offsets = torch.cat((torch.zeros_like(ends), changes, ends))
    elif offsets is None:
        offsets = torch.tensor([0, rows])
    offsets = _as_tensor(offsets, "offsets").to(torch.int64)
    if (
        offsets.dim() != 1
        or not len(offsets)
        or int(offsets[0]) != 0
        or int(offsets[-1]) != rows
        or bool((offsets.diff() < 0).any())
    ):
        raise DataError(f"offsets must rise from 0 to {rows}, the number of rows")
    first = offsets[:-1]
    counts = ((offsets.diff() - length - horizon) // stride + 1).clamp(min=0)
    group = torch.repeat_interleave(torch.arange(len(counts), device=offsets.device), counts)
    before = counts.cumsum(0) - counts
    return first[group] + (torch.arange(len(group), device=offsets.device) - before[group]) * stride


class ResidentWindows:
    """Windows of consecutive rows, and what belongs to their last row or to one after it.

    With a `Resizing` a window of size t is the last t rows of the full one, so that it ends at the same row and its
    targets stay what they are.

    Args:
        data: [N, F] of a float type.
        length: T, rows of a window.
        targets: tensors [N, ...]; a window's are those of the row `horizon` behind its last one.
        ids, offsets, stride, horizon: as in `window_starts`.
        mean, std: [F] each, to normalise by; both or none. Each deviation is above 0: leave constant columns out.
        dtype: of the windows; data's own by default.
        device: where all of it is moved.
        eager: use the kernel's twin on a CUDA device too.

    Raises:
        DataError: what is no tensor, shapes do not fit, a deviation is not above 0, or no window fits.
    """

    def __init__(
        self,
        data: torch.Tensor,
        length: int,
        *targets: torch.Tensor,
        ids: Any = None,
        offsets: Any = None,
        stride: int = 1,
        horizon: int = 0,
        mean: torch.Tensor | None = None,
        std: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        eager: bool = False,
    ) -> None:
        given = [("data", data), *(("targets", t) for t in targets), ("mean", mean), ("std", std)]
        for name, values in given:
            if values is not None and not isinstance(values, torch.Tensor):
                raise DataError(
                    f"{name} must be a tensor, not a {type(values).__name__}: torch.as_tensor makes one"
                )
        if data.dim() != 2 or not data.is_floating_point():
            raise DataError(f"data must be [N, F] of a float type, not {data.dtype} {list(data.shape)}")
        if any(not t.dim() or len(t) != len(data) for t in targets):
            shapes = [list(t.shape) for t in targets]
            raise DataError(f"targets of shapes {shapes} do not belong to {len(data)} rows")
        if (mean is None) != (std is None):
            raise DataError("give both mean and std, or none")
        if mean is not None and std is not None:
            _check_statistics(mean, std, data.shape[1])
        where = data.device if device is None else torch.device(device)
        starts = window_starts(len(data), length, ids=ids, offsets=offsets, stride=stride, horizon=horizon)
        if not len(starts):
            raise DataError(f"no group has the {length + horizon} rows that a window needs")
        self.starts = starts.to(where)
        self.data = data.to(where).contiguous()
        self.targets = tuple(t.to(where) for t in targets)
        self.length = length
        self.horizon = horizon
        self.mean = None if mean is None else mean.to(where, torch.float32)
        self.scale = None if std is None else std.to(where, torch.float32).reciprocal()
        self.dtype = dtype
        self.eager = eager

    @property
    def device(self) -> torch.device:
        """Where the data lies."""
        return self.data.device

    def __len__(self) -> int:
        return len(self.starts)

    def cut(self, indices: torch.Tensor, epoch: torch.Tensor, seed: int, size: int | None) -> Any:
        """Windows [B, T, F], and their targets if there are any.

        Raises:
            DataError: `size` is no length between 1 and that of the windows.
        """
        length = self.length if size is None else size
        if not 1 <= length <= self.length:
            raise DataError(f"windows of {self.length} rows cannot be cut to size {size}")
        starts = self.starts.index_select(0, indices)
        last = starts + (self.length - 1 + self.horizon)
        windows = cut_windows(
            self.data, starts + (self.length - length), length, mean=self.mean, scale=self.scale, dtype=self.dtype,
            eager=self.eager,
        )  # fmt: skip
        if not self.targets:
            return windows
        return (windows, *(t.index_select(0, last) for t in self.targets))


def _as_tensor(values: Any, name: str) -> torch.Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} must be numbers, as np.unique(..., return_inverse=True) makes of names: {error}"
        ) from error


def _check_statistics(mean: torch.Tensor, std: torch.Tensor, features: int) -> None:
    for name, values in (("mean", mean), ("std", std)):
        if values.shape != (features,):
            raise DataError(f"{name} of shape {list(values.shape)} does not belong to {features} columns")
    lost = (~mean.isfinite()).nonzero().flatten().tolist()
    if lost:
        raise DataError(
            f"mean of column {lost[0]} is {float(mean[lost[0]])}, of which no window could be trained on: rows with "
            "values that are not finite are to be left out or filled"
        )
    bad = (~(std > 0)).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"std of column {bad[0]} is {float(std[bad[0]])}: it must be above 0 to divide by; leave a constant column "
            "out, or give it a deviation of 1"
        )
