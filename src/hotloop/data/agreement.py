"""What the ranks tell each other about their batches, on a gloo group beside the training stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotloop.errors import DataError
from hotloop.hardware import Processes

__all__ = ["Agreement"]

_INTEGERS, _OBJECTS = 0, 1


class Agreement:
    """Collective calls for loaders; every rank makes the same ones in the same order.

    Each message carries the numbers of the loader and of the message, so that ranks whose loops went
    different ways get an error instead of each other's data.
    """

    def __init__(self, processes: Processes, name: str) -> None:
        self.rank = processes.rank
        self.world = processes.world
        self._processes = processes
        self._name = name
        self._tag = sum(ord(letter) << (8 * (place % 6)) for place, letter in enumerate(name))
        self._sent = 0
        self._group: Any = processes.side_group("data")

    def _stamp(self) -> list[int]:
        self._sent += 1
        return [self._tag, self._sent]

    def _check(self, stamp: list[int], found: list[int], rank: int) -> None:
        if stamp != found:
            raise DataError(
                f"rank {self.rank} is at message {stamp[1]} of {self._name}, but rank {rank} is at another "
                f"({'of the same loader' if stamp[0] == found[0] else 'of another loader'}, {found[1]}): the "
                "loops of the ranks went different ways. Leave a loop over a loader on all ranks at the same "
                "step or on none."
            )

    def share(self, value: Any) -> Any:
        """`value` of rank 0, on every rank; pickled."""
        stamp = self._stamp()
        found, theirs = self._processes.broadcast_object((stamp, value), group=self._group)
        self._check(stamp, found, 0)
        return theirs

    def share_batches(self, batches: list[Any], facts: list[int]) -> tuple[list[Any], list[int]]:
        """Index batches and some int64 `facts` of rank 0, on every rank; the others' arguments are ignored.

        Lists of plain integers travel as one tensor, anything else pickled. Every rank has to pass
        `facts` of the same length.
        """
        import torch.distributed as dist

        stamp = self._stamp()
        flat: list[int] = []
        sizes: list[int] = []
        kind = _OBJECTS
        if self.rank == 0:
            single = all(type(batch) is int for batch in batches)
            if single or all(type(b) is list and all(type(i) is int for i in b) for b in batches):
                kind = _INTEGERS
                sizes = [-1] * len(batches) if single else [len(batch) for batch in batches]
                flat = list(batches) if single else [index for batch in batches for index in batch]
        head = torch.tensor([*stamp, kind, len(sizes), len(flat), *facts], dtype=torch.int64)
        dist.broadcast(head, src=0, group=self._group)
        found = head.tolist()
        self._check(stamp, found[:2], 0)
        _, _, kind, n_sizes, n_flat, *facts = found
        if kind == _OBJECTS:
            return self._processes.broadcast_object(batches, group=self._group), facts
        body = torch.tensor(sizes + flat, dtype=torch.int64) if self.rank == 0 else torch.empty(0)
        if self.rank != 0:
            body = torch.empty(n_sizes + n_flat, dtype=torch.int64)
        if n_sizes:
            dist.broadcast(body, src=0, group=self._group)
        if self.rank == 0:
            return batches, facts
        numbers = body.tolist()
        return split_batches(numbers[:n_sizes], numbers[n_sizes:]), facts

    def gather(self, row: list[int]) -> list[list[int]]:
        """The `row` of every rank, in rank order. Rows have the same length on all ranks."""
        return self.gather_later(row)()

    def gather_later(self, row: list[int]) -> Callable[[], list[list[int]]]:
        """Start a `gather`; the returned call waits for it and gives its result."""
        import torch.distributed as dist

        stamp = self._stamp()
        mine = torch.tensor([*stamp, *row], dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        work = dist.all_gather(rows, mine, group=self._group, async_op=True)

        def wait() -> list[list[int]]:
            work.wait()
            found = [row.tolist() for row in rows]
            for rank, numbers in enumerate(found):
                self._check(stamp, numbers[:2], rank)
            return [numbers[2:] for numbers in found]

        return wait


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
