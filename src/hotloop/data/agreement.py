"""What the ranks tell each other about their batches, on a gloo group beside the training stream."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from hotloop.errors import DataError
from hotloop.hardware import Processes

__all__ = ["Agreement", "Gathering", "split_batches"]

_unread: dict[int, deque[Gathering]] = {}  # of each group, gatherings that nobody waited for yet


class Agreement:
    """Collective calls for loaders; every rank makes the same ones in the same order.

    Each message begins with an all-gather of four int64 that hold the numbers of the loader and of the
    message, so that ranks whose loops went different ways get an error instead of each other's data.
    """

    def __init__(self, processes: Processes, name: str) -> None:
        self.rank = processes.rank
        self.world = processes.world
        self.name = name
        self._processes = processes
        self._tag = sum(ord(letter) << (8 * (place % 6)) for place, letter in enumerate(name))
        self._sent = 0
        self._group: Any = processes.side_group("data")

    def begin(self, first: int, second: int) -> Gathering:
        """Start a message: two numbers of each rank on their way to all, without waiting for them."""
        self._sent += 1
        gathering = Gathering(self, self._tag, self._sent, first, second, self._group)
        _unread.setdefault(id(self._group), deque()).append(gathering)
        return gathering

    def _head(self, first: int, second: int) -> list[list[int]]:
        head = self.begin(first, second)
        waiting = _unread[id(self._group)]
        while waiting:  # what an abandoned loop left behind shows here whether it was the same on all ranks
            waiting[0].wait()
        return head.wait()

    def share(self, value: Any) -> Any:
        """`value` of rank 0, on every rank; pickled."""
        self._head(0, 0)
        return self._processes.broadcast_object(value, group=self._group)

    def share_batches(self, batches: list[Any], facts: list[int]) -> tuple[list[Any], list[int]]:
        """Index batches and some int64 `facts` of rank 0, on every rank; the others' arguments are ignored.

        Lists of plain integers travel as one tensor, anything else pickled.
        """
        import torch.distributed as dist

        flat: list[int] = []
        sizes: list[int] = []
        plain = True
        if self.rank == 0:
            single = all(type(batch) is int for batch in batches)
            plain = single or all(type(b) is list and all(type(i) is int for i in b) for b in batches)
            if plain:
                sizes = [-1] * len(batches) if single else [len(batch) for batch in batches]
                flat = list(batches) if single else [index for batch in batches for index in batch]
        n_sizes, n_flat = self._head(len(sizes) if plain else -1, len(flat))[0]
        if n_sizes < 0:
            batches, facts = self._processes.broadcast_object((batches, facts), group=self._group)
            return batches, facts
        body = torch.tensor([*facts, *sizes, *flat], dtype=torch.int64)
        if self.rank != 0:
            body = torch.empty(len(facts) + n_sizes + n_flat, dtype=torch.int64)
        dist.broadcast(body, src=0, group=self._group)
        if self.rank == 0:
            return batches, facts
        numbers = body.tolist()
        start = len(facts)
        middle = start + n_sizes
        return split_batches(numbers[start:middle], numbers[middle:]), numbers[:start]

    def gather(self, row: list[int]) -> list[list[int]]:
        """The `row` of every rank, in rank order. Rows have the same length on all ranks."""
        import torch.distributed as dist

        self._head(len(row), 0)
        mine = torch.tensor(row, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(rows, mine, group=self._group)
        return [found.tolist() for found in rows]


class Gathering:
    """Two numbers of every rank, on their way."""

    def __init__(
        self, agreement: Agreement, tag: int, number: int, first: int, second: int, group: Any
    ) -> None:
        import torch.distributed as dist

        self._agreement = agreement
        self._stamp = [tag, number]
        self._waiting = id(group)
        self._rows: list[list[int]] | None = None
        mine = torch.tensor([tag, number, first, second], dtype=torch.int64)
        self._tensors = [torch.empty_like(mine) for _ in range(agreement.world)]
        self._work: Any = dist.all_gather(self._tensors, mine, group=group, async_op=True)

    def wait(self) -> list[list[int]]:
        """[first, second] of every rank, in rank order.

        Raises:
            DataError: some rank sent another message at this point.
        """
        if self._rows is None:
            self._work.wait()
            _unread[self._waiting].remove(self)
            found = [tensor.tolist() for tensor in self._tensors]
            for rank, numbers in enumerate(found):
                self._check(numbers[:2], rank)
            self._rows = [numbers[2:] for numbers in found]
        return self._rows

    def _check(self, found: list[int], rank: int) -> None:
        if self._stamp == found:
            return
        same = "of the same loader" if self._stamp[0] == found[0] else "of another loader"
        raise DataError(
            f"rank {self._agreement.rank} is at message {self._stamp[1]} of {self._agreement.name}, but rank "
            f"{rank} is at message {found[1]} {same}: the loops of the ranks went different ways. Leave a loop "
            "over a loader on all ranks at the same step or on none."
        )


def split_batches(sizes: list[int], flat: list[int]) -> list[Any]:
    """Batches of the given sizes out of `flat`; size -1 stands for an index that is no list."""
    batches: list[Any] = []
    start = 0
    for size in sizes:
        if size < 0:
            batches.append(flat[start])
            start += 1
        else:
            batches.append(flat[start : start + size])
            start += size
    return batches
