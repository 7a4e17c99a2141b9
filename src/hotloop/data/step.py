"""One step of an epoch on its way through the loader, and an iterator that can say whether more will come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

__all__ = ["Ahead", "Step"]


class Step:
    """What this process does at one step: its batch, and the position that is reached with it.

    Attributes:
        batch: the fetched batch; None before the fetch and for a replay.
        indices: what the index sampler drew for this rank; None for streams and for replays.
        ordinal: number of the batch in the epoch's global order; its random streams depend on it.
        samples: samples of this rank's batch, 0 for a replay; -1 while only the batch itself can tell.
        global_samples: samples of all ranks; -1 if that is not known without communication.
        last: True or False once it is known whether the epoch ends with this step; None before.
        replay: this rank has no batch at this step, another one has.
        steps_done, batches_done, samples_done: of the epoch, over all ranks, this step included.
    """

    __slots__ = (
        "batch",
        "batches_done",
        "global_samples",
        "indices",
        "last",
        "ordinal",
        "replay",
        "samples",
        "samples_done",
        "steps_done",
    )

    def __init__(
        self,
        indices: Any,
        ordinal: int,
        samples: int,
        global_samples: int,
        last: bool | None,
        steps_done: int,
        batches_done: int,
        samples_done: int,
        replay: bool = False,
        batch: Any = None,
    ) -> None:
        self.batch = batch
        self.indices = indices
        self.ordinal = ordinal
        self.samples = samples
        self.global_samples = global_samples
        self.last = last
        self.replay = replay
        self.steps_done = steps_done
        self.batches_done = batches_done
        self.samples_done = samples_done


class Ahead:
    """An iterator over `source` that may read ahead; what the reading ahead raises is raised in its turn.

    Attributes:
        read: items read from the source so far.
    """

    __slots__ = ("_buffer", "_source", "read")

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._buffer: deque[tuple[Any, BaseException | None]] = deque()
        self.read = 0

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        buffer = self._buffer
        if not buffer:
            item = next(self._source)
            self.read += 1
            return item
        item, error = buffer.popleft()
        if error is not None:
            if isinstance(error, StopIteration):
                buffer.append((None, error))  # an ended iterator stays ended
                raise StopIteration
            raise error
        return item

    @property
    def held(self) -> int:
        """How many items are read and not yet delivered."""
        return sum(1 for _, error in self._buffer if error is None)

    def fill(self, count: int) -> None:
        """Read ahead until `count` items are held, or the source ended or failed."""
        buffer = self._buffer
        while len(buffer) < count and not (buffer and buffer[-1][1] is not None):
            try:
                buffer.append((next(self._source), None))
                self.read += 1
            except StopIteration:
                # a new one: the frames that this came through hold whoever reads ahead, workers too, until the
                # collector finds the ring; torch then waits for workers that nobody can tell to end
                buffer.append((None, StopIteration()))
            except Exception as error:
                buffer.append((None, error))

    def close(self) -> None:
        """Let go of the source and of what was read ahead."""
        self._source = iter(())
        self._buffer.clear()

    def ended(self) -> bool:
        """True if no item is left. Reads one ahead to know; a failure of the source counts as an item."""
        if not self._buffer:
            self.fill(1)
        return isinstance(self._buffer[0][1], StopIteration)

    def take_all(self) -> list[Any]:
        """All items that are left, without delivering any: the next ones are still to come."""
        while not (self._buffer and self._buffer[-1][1] is not None):
            self.fill(len(self._buffer) + 64)
        return [item for item, error in self._buffer if error is None]
