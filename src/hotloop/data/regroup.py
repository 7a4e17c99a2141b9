"""The same samples in the same order, in batches of another size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

__all__ = ["Regrouped"]


class Regrouped(Sampler[list[Any]]):
    """The index batches of `batch_sampler` split, or several of them joined, to `batch_size` indices each.

    Joined are only whole batches, so that an update on `merge` batches sees the samples that it would have seen; a
    last batch that is shorter than the others ends its group.

    Args:
        batch_sampler: yields lists of indices. before: their usual length. batch_size: a divisor or a multiple of it.
    """

    def __init__(self, batch_sampler: Any, before: int, batch_size: int) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size = batch_size
        self._before = before

    def __iter__(self) -> Iterator[list[Any]]:
        if self.batch_size <= self._before:
            for batch in self.batch_sampler:
                for i in range(0, len(batch), self.batch_size):
                    yield batch[i : i + self.batch_size]
            return
        group: list[Any] = []
        for batch in self.batch_sampler:
            group += batch
            if len(group) >= self.batch_size:
                yield group
                group = []
        if group:
            yield group

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        if self.batch_size > self._before:
            return -(-batches * self._before // self.batch_size)
        pieces = self._before // self.batch_size
        sampler = getattr(self.batch_sampler, "sampler", None)
        if not batches or getattr(self.batch_sampler, "drop_last", True) or not hasattr(sampler, "__len__"):
            return batches * pieces
        rest = len(sampler) - (batches - 1) * self._before  # type: ignore[arg-type]
        return (batches - 1) * pieces + -(-rest // self.batch_size)
