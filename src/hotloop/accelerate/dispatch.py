"""Rank 0 reads batches and sends every rank its part, of whatever shape, over the host's own group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hotloop.accelerate.operations import concatenate, find_batch_size
from hotloop.hardware import Processes

__all__ = ["RoundReader", "send_rounds"]

Round = tuple[list[Any], bool, int]


class RoundReader:
    """Turns a stream of batches into rounds: one part per rank, the last round marked.

    Args:
        batches: what rank 0 reads.
        world: ranks.
        split_batches: a round is one batch, divided; otherwise it is one batch per rank.
        drop_last: an incomplete last round is dropped.
        slice_fn: `slice_fn(batch, slice, process_index=, num_processes=)` cuts a part out of a batch.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        world: int,
        *,
        split_batches: bool,
        drop_last: bool,
        slice_fn: Callable[..., Any],
    ) -> None:
        self._batches = batches
        self._world = world
        self._split = split_batches
        self._drop_last = drop_last
        self._slice = slice_fn
        self._first: Any = None

    def __iter__(self) -> Iterator[Round]:
        """Rounds of (parts by rank, whether it is the last, real samples in it or 0 for all)."""
        following = self._read()
        while following:
            current, following = following, self._read()
            last = not following
            if self._first is None and not self._drop_last:
                self._first = current[0]
            parts, samples = self._divide(current, last)
            yield parts, last, samples if last else -1

    def _read(self) -> list[Any]:
        """The next round's batches; empty at the end."""
        wanted = 1 if self._split else self._world
        read: list[Any] = []
        while len(read) < wanted:
            batch = next(self._batches, self)
            if batch is self:
                break
            read.append(batch)
        if len(read) < wanted and self._drop_last and not self._split:
            return []
        return read

    def _divide(self, batches: list[Any], last: bool) -> tuple[list[Any], int]:
        sizes = [_rows(batch) for batch in batches]
        total = sum(sizes)
        if not self._split and len(batches) == self._world and not (last and len(set(sizes)) > 1):
            return batches, total
        try:
            whole = concatenate(batches, dim=0)
            share, rest = divmod(total, self._world)
            if rest and not self._drop_last:
                whole = concatenate([whole, *self._filling(self._world - rest)], dim=0)
                share += 1
            return [self._cut(whole, rank * share, (rank + 1) * share) for rank in range(self._world)], total
        except (RuntimeError, TypeError):
            # batches that do not fit together go whole; ranks without one get the first again
            return batches + [batches[0]] * (self._world - len(batches)), 0

    def _filling(self, missing: int) -> list[Any]:
        """Batches of together `missing` rows, from the first batch, over again if it is short."""
        parts: list[Any] = []
        rows = _rows(self._first)
        while missing > 0:
            take = min(rows, missing)
            parts.append(self._cut(self._first, 0, take))
            missing -= take
        return parts

    def _cut(self, batch: Any, start: int, stop: int) -> Any:
        rank = start // max(stop - start, 1)
        return self._slice(batch, slice(start, stop), process_index=rank, num_processes=self._world)


def send_rounds(reader: RoundReader | None, processes: Processes) -> Iterator[tuple[Any, bool, int]]:
    """This rank's (part, whether it is the last, real samples of the last round); `reader` is rank 0's.

    An error of the reader is raised on every rank: nobody waits for a part that never comes.
    """
    if processes.world == 1:
        assert reader is not None
        for parts, last, samples in reader:
            yield parts[0], last, samples
        return
    import torch.distributed as dist

    group = processes.side_group("dispatch")
    rounds = iter(reader) if reader is not None else None
    while True:
        outgoing: list[Any] | None = None
        failure: Exception | None = None
        if rounds is not None:
            try:
                found = next(rounds, None)
            except Exception as error:
                failure = error
                found = None
            if found is None:
                outgoing = [("stop" if failure is None else "error", repr(failure), 0, 0)] * processes.world
            else:
                parts, last, samples = found
                outgoing = [("part", part, last, samples) for part in parts]
        box: list[Any] = [None]
        dist.scatter_object_list(box, outgoing, src=0, group=group)
        kind, part, last, samples = box[0]
        if failure is not None:
            raise failure
        if kind == "error":
            raise RuntimeError(f"rank 0 could not read the next batch: {part}")
        if kind == "stop":
            return
        yield part, bool(last), int(samples)
        if last:
            return


def _rows(batch: Any) -> int:
    try:
        return find_batch_size(batch)
    except (TypeError, ValueError, IndexError):
        return 1
