"""Batches from data that lies on the device whole: no workers, no copies, no waiting.

Order and augmentation are functions of (seed, epoch, sample) alone, by counter-based random numbers. So a position is
one number, a resumed run continues to the bit, and neither batch size nor number of processes changes what a sample
looks like in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, SupportsIndex

import torch

from hotloop.data.resizing import Resizing, Stage, cuts
from hotloop.errors import DataError
from hotloop.kernels.augment import philox

__all__ = ["ResidentArrays", "ResidentLoader", "ResidentSource", "permutation"]

_VERSION = 1


class ResidentSource(Protocol):
    """What a `ResidentLoader` cuts its batches from: `ResidentArrays`, `ResidentImages`, `ResidentWindows`."""

    @property
    def device(self) -> torch.device:
        """Where the data lies."""

    def __len__(self) -> int: ...

    def cut(self, indices: torch.Tensor, epoch: torch.Tensor, seed: int, size: int | None) -> Any:
        """The batch of samples `indices` (int64 [B]) as in `epoch` (int64 0-d), at `size` if that is given."""


class ResidentArrays:
    """Tensors of one length, the i-th sample being the i-th row of each.

    Args:
        arrays: moved to `device` if that is given.

    Raises:
        DataError: no arrays, ones that are no tensors, other lengths, or other devices.
    """

    def __init__(self, *arrays: torch.Tensor, device: torch.device | str | None = None) -> None:
        if not arrays:
            raise DataError("ResidentArrays needs at least one tensor")
        if odd := [type(a).__name__ for a in arrays if not isinstance(a, torch.Tensor)]:
            raise DataError(
                f"ResidentArrays takes tensors, not a {odd[0]}: torch.as_tensor makes one of an array"
            )
        if any(not a.dim() for a in arrays):
            raise DataError("a tensor without dimensions has no samples")
        self.arrays = tuple(a.to(device) if device is not None else a for a in arrays)
        if len({len(a) for a in self.arrays}) > 1 or len({a.device for a in self.arrays}) > 1:
            shown = ", ".join(f"{tuple(a.shape)} on {a.device}" for a in self.arrays)
            raise DataError(f"the arrays must have one length and lie on one device, not {shown}")

    @property
    def device(self) -> torch.device:
        """Where the arrays lie."""
        return self.arrays[0].device

    def __len__(self) -> int:
        return len(self.arrays[0])

    def cut(self, indices: torch.Tensor, epoch: torch.Tensor, seed: int, size: int | None) -> Any:
        """Rows `indices` of each array; of a single array, its rows alone."""
        if size is not None:
            raise DataError("plain arrays have no sizes: a Resizing is for ResidentImages or ResidentWindows")
        rows = tuple(a.index_select(0, indices) for a in self.arrays)
        return rows[0] if len(rows) == 1 else rows


class ResidentLoader:
    """Iterates over batches of a resident source; `loop.prepare` takes it like any loader.

    Args:
        source: a `ResidentSource`, or a tensor or tuple of tensors, which becomes `ResidentArrays`.
        batch_size: samples of a batch on one process; left out with `resizing`, which says it.
        shuffle: a new order each epoch.
        drop_last: leave out a last batch that is not full (with several processes: the step that is not).
        seed: key of order and augmentation.
        resizing: which size and batch size hold when.

    A loop over it that is left early is over: the next one is the next epoch.

    Attributes:
        epoch: the epoch that comes next, or runs.
        stage: the stage of the batch handed out last.

    Raises:
        DataError: neither or both of `batch_size` and `resizing`, numbers that are not whole, a source without
            samples, or with `drop_last` one with fewer than the smallest batch holds.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        resizing: Resizing | None = None,
    ) -> None:
        if isinstance(source, torch.Tensor):
            source = ResidentArrays(source)
        elif isinstance(source, (tuple, list)):
            source = ResidentArrays(*source)
        if not hasattr(source, "cut"):
            raise DataError(
                f"a {type(source).__name__} is no resident source: give tensors, ResidentArrays, ResidentImages or "
                "ResidentWindows; other data goes through a DataLoader"
            )
        if (batch_size is None) == (resizing is None):
            raise DataError("ResidentLoader takes either batch_size or resizing, which has its own")
        if resizing is not None and not isinstance(resizing, Resizing):
            raise DataError(f"resizing is a hotloop.data.Resizing, not a {type(resizing).__name__}")
        for name, number in (("batch_size", batch_size), ("seed", seed)):
            if not isinstance(number, SupportsIndex) and (name == "seed" or number is not None):
                raise DataError(f"{name}={number!r} must be a whole number")
        if batch_size is not None and batch_size < 1:
            raise DataError(f"batch_size={batch_size} must be at least 1")
        if not len(source):
            raise DataError(f"the {type(source).__name__} has no samples")
        batches = [batch_size] if resizing is None else [stage.batch_size for stage in resizing.stages]
        least = min(size for size in batches if size is not None)
        if drop_last and len(source) < least:
            raise DataError(
                f"{len(source)} samples are fewer than a batch of {least}, and drop_last=True leaves them out: no "
                "batch would ever come"
            )
        self.source: ResidentSource = source
        self.batch_size = batch_size if batch_size is not None else 0
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.resizing = resizing
        self.epoch = 0
        self.stage: Stage | None = None
        self._fixed = Stage(float("inf"), 0, self.batch_size)
        self._begin = 0
        self._done = 0
        self._ordered: tuple[int, torch.Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Where the data lies."""
        return self.source.device

    def __len__(self) -> int:
        """Batches of the epoch that comes next, or runs, on one process."""
        return self.steps(1)

    def steps(self, world: int, epoch: int | None = None) -> int:
        """Steps of that epoch, or of another one, on `world` processes."""
        return sum(1 for _ in self.cuts(0, world, epoch))

    def cuts(self, start: int, world: int, epoch: int | None = None) -> Iterator[tuple[int, int, Stage]]:
        """(first sample, one behind the last, stage) of each step of this epoch from sample `start` on."""
        number = self.epoch if epoch is None else epoch
        yield from cuts(len(self.source), number, start, world, self._stage_at, drop_last=self.drop_last)

    def _stage_at(self, epochs: float) -> Stage:
        return self._fixed if self.resizing is None else self.resizing.at(epochs)

    def order(self) -> torch.Tensor:
        """The sample numbers of this epoch in order, int64 [n] on the device."""
        if not self.shuffle:
            return torch.arange(len(self.source), device=self.device)
        if self._ordered is None or self._ordered[0] != self.epoch:
            self._ordered = (self.epoch, permutation(len(self.source), self.seed, self.epoch, self.device))
        return self._ordered[1]

    def cut(self, indices: torch.Tensor, epoch: torch.Tensor, stage: Stage) -> Any:
        """The batch of samples `indices` as in `epoch` (int64 0-d on the device), at that stage's size."""
        self.stage = stage
        return self.source.cut(indices, epoch, self.seed, stage.size if self.resizing is not None else None)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that comes next, from its start."""
        self.epoch = epoch
        self._begin = self._done = 0

    def __iter__(self) -> Iterator[Any]:
        if self._done and not self._begin:
            self.epoch += 1
        begin, self._begin = self._begin, 0
        order = self.order()
        epoch = torch.tensor(self.epoch, device=self.device)
        self._done = begin
        for start, end, stage in self.cuts(begin, 1):
            batch = self.cut(order[start:end], epoch, stage)
            self._done = end
            yield batch
        self._done = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Epoch and samples handed out of it: the next batch after loading this is the one that would have come."""
        return {"version": _VERSION, "epoch": self.epoch, "samples": self._done, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called; batch size and number of processes may be others.

        Raises:
            DataError: the state is another loader's, or was made with another seed.
        """
        if state.get("version") != _VERSION or "samples" not in state:
            raise DataError("this is not the state of a ResidentLoader as this version writes it")
        if state["seed"] != self.seed:
            raise DataError(
                f"the state was saved with seed {state['seed']}, this loader has {self.seed}: its order would be "
                "another"
            )
        self.epoch = state["epoch"]
        self._begin = self._done = state["samples"]


def permutation(n: int, seed: int, epoch: int, device: torch.device) -> torch.Tensor:
    """A permutation of 0..n-1, int64 [n], a function of (seed, epoch) alone: the same on every device.

    Numbers are sorted by 62 random bits each; equal bits keep their order (a chance of n² / 2^63).
    """
    counter = torch.arange(n, device=device)
    words = philox(seed, counter, torch.tensor(epoch, device=device), 3)
    return ((words[0] << 31) ^ words[1]).argsort(stable=True)
