"""Epochs over sources that can only be read in order: iterable datasets, lists of batches, any iterable.

On several ranks each rank reads the one common stream and keeps batches k*W + r, under random streams that
are the same on every rank, unless the source shards itself. Who has a batch is agreed one step ahead.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from hotloop.data.agreement import Agreement, Gathering
from hotloop.data.feed import Epoch, Feed, draw_base_seed
from hotloop.data.move import count_samples
from hotloop.data.order import Served, Start
from hotloop.data.randomness import FetchStreams, GlobalStreams, batch_seed
from hotloop.data.sampler_state import SamplerState
from hotloop.data.step import Ahead, Step
from hotloop.data.workers import StreamWorkers
from hotloop.errors import DataError

__all__ = ["StreamFeed"]

_STATE_EVERY = 16
"""Reads between two copies of a source's own state; at most so many batches are read again on resume."""


class StreamFeed(Feed):
    """Feeds from anything iterable, or from a function without arguments that returns an iterable.

    Args:
        source: the user's object.
        rank, world: this process among all.
        agree: the ranks' agreement; None for a single process.
        reads_ahead: steps are taken before the loop asks for them, so each must know if it is the last.
        pins: batches of workers go into page-locked memory as they come.
    """

    def __init__(
        self,
        source: Any,
        rank: int,
        world: int,
        agree: Agreement | None,
        reads_ahead: bool,
        pins: bool = False,
    ) -> None:
        self.source = source
        self.rank, self.world, self.agree = rank, world, agree
        self.reads_ahead = reads_ahead
        self.sharded = agree is not None and _shards_itself(source, rank, world)
        self.per_rank = self.sharded
        self.once = isinstance(source, Iterator)
        self.served = Served([False] * world)
        self.samplers = SamplerState(source)
        self.target = _stateful_part(source)
        # A loader's state may be taken at an epoch's end: it starts anew from there. That of a dataset may
        # mean "at the end, nothing left", so it is only taken in the middle.
        self.loader_state = self.target is source and isinstance(source, DataLoader)
        self.persistent = False
        self._carried: Ahead | None = None
        self._spent = False
        self._base: int | None = None
        self._round = 0
        self._workers: StreamWorkers | None = None
        if _is_plain_stream_loader(source) and source.num_workers > 0:
            self._workers = StreamWorkers(source, pins)
            self.persistent = bool(source.persistent_workers)

    def length(self) -> int:
        """Steps of an epoch as far as the source's own `len` tells; TypeError if it has none."""
        batches = len(self.source)
        return batches if self.sharded or self.world == 1 else -(-batches // self.world)

    def state(self) -> dict[str, Any]:
        """Between epochs: the source's own state, and what lasting workers were seeded with."""
        source = copy.deepcopy(self.source.state_dict()) if self.loader_state else None
        return {
            "samplers": self.samplers.take(),
            "source": source,
            "base": self._base,
            "round": self._round,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` of this or of an epoch returned."""
        self.samplers.put(state["samplers"])
        if state["source"] is not None and self.loader_state:
            self.source.load_state_dict(state["source"])
        if self.persistent:
            self._base, self._round = state["base"], state["round"]

    def open(self, resume: dict[str, Any] | None, skip: int) -> Epoch:
        """An epoch; on several ranks this is collective.

        Raises:
            DataError: the source is an iterator that was consumed, or the position does not fit.
        """
        if self._spent:
            raise DataError(
                f"{type(self.source).__name__} is an iterator: it can be looped over once, and that was done. "
                "Give a list, a DataLoader, an object with __iter__, or the function that makes the iterator."
            )
        if resume is not None and resume["sharded"] and resume["world"] != self.world:
            raise DataError(
                f"the position was saved by {resume['world']} ranks whose source shards itself; {self.world} "
                "ranks cannot take it up. Use the same number of processes, or start at an epoch's end."
            )
        return _StreamEpoch(self, resume, skip)

    def next_base(self) -> tuple[int, int]:
        """Base seed of the workers and round under it, drawn as torch's loader draws it."""
        if self._base is None or not self.persistent:
            self._base, self._round = draw_base_seed(getattr(self.source, "generator", None)), 0
        else:
            self._round += 1
        return self._base, self._round

    def iterate(self, base: int, round_number: int) -> Iterator[Any]:
        """A new pass over the source; with workers, under the given seeds."""
        if self._workers is not None:
            return self._workers.batches(base, round_number)
        if not hasattr(self.source, "__iter__") and not hasattr(self.source, "__getitem__"):
            return iter(self.source())
        return iter(self.source)

    def carry(self, make: Callable[[], Ahead]) -> Ahead:
        """The one `Ahead` of a source that is an iterator; of another source, a new one."""
        if not self.once:
            return make()
        if self._carried is None:
            self._carried = make()
        return self._carried

    def note_end(self) -> None:
        """The source was read to its end."""
        self._spent = self.once


class _StreamEpoch(Epoch):
    def __init__(self, feed: StreamFeed, resume: dict[str, Any] | None, skip: int) -> None:
        self.feed = feed
        self.common = feed.agree is not None and not feed.sharded
        self.base, self.round = 0, 0
        seeded_here = self.common and feed._workers is None and not isinstance(feed.source, (list, tuple))
        self._streams = FetchStreams() if seeded_here else None
        self.earlier: Any = None
        self._offset = 0  # of an iterator that an earlier, abandoned loop read from
        self.handed = 0  # items of this rank's stream that the loop had, or that belonged to other ranks
        start = Start()
        if resume is not None:
            self.base, self.round = resume["base"], resume["round"]
            start = Start(resume["steps"], resume["batches"], resume["samples"])
            if start.steps:
                feed.served = Served([True] * feed.world)
            self._reopen(resume["anchor"], start, resume["ahead"])
        else:
            self._open()
            if skip:
                batches = skip * feed.world
                start = Start(skip, batches, self._drop(batches if self.common else skip))
        self.start = start
        self.steps = self._alone(start) if feed.agree is None else self._agreed(feed.agree, start)

    def _open(self) -> None:
        feed = self.feed
        self.anchor: dict[str, Any] = {
            "samplers": feed.samplers.take(),
            "rng": GlobalStreams(),
            "opened": False,
            "read": 0,
            "source": None,
        }
        if feed._workers is not None or self.common:
            self.base, self.round = feed.next_base()
        if self.common and feed.agree is not None:
            self.base, self.round = feed.agree.share((self.base, self.round))
        self.reader = feed.carry(self._reader)
        self._offset = self.handed = self.reader.read - self.reader.held

    def _reopen(self, saved: dict[str, Any], start: Start, ahead: int) -> None:
        feed = self.feed
        streams = GlobalStreams.from_state_dict(saved["rng"])
        self.anchor = {**saved, "rng": streams}
        feed.samplers.put(saved["samplers"])
        if saved["source"] is not None and feed.target is not None:
            feed.target.load_state_dict(saved["source"])
        with streams.in_force():
            if feed._workers is not None and not saved["opened"] and not (feed.persistent and self.round):
                draw_base_seed(getattr(feed.source, "generator", None))
            self.reader = feed.carry(self._reader)
            self.reader.read = saved["read"]
            if saved["opened"]:
                streams.put_back()
            wanted = start.steps if feed.sharded else start.batches
            self._drop(wanted - saved["read"])
            self.reader.fill(ahead)

    def _reader(self) -> Ahead:
        feed = self.feed
        if self._streams is None:
            items = feed.iterate(self.base, self.round)
        else:
            start = self._streams.run(batch_seed(self.base, -1), feed.iterate, self.base, self.round)
            items = self._seeded(self._streams, start)
        return Ahead(items if feed.target is None else self._watched(items))

    def _seeded(self, streams: FetchStreams, items: Iterator[Any]) -> Iterator[Any]:
        """`items`, each read under random streams that are the same on every rank."""
        nothing = object()
        while True:
            item = streams.run(batch_seed(self.base, self.reader.read), next, items, nothing)
            if item is nothing:
                return
            yield item

    def _watched(self, items: Iterator[Any]) -> Iterator[Any]:
        """`items`, with the source's own state noted now and then.

        A state is only trusted if another item came after it: at its end, a source may be in a state that
        means "at the end" or one that means "at the start".
        """
        nothing = object()
        while True:
            read = self.reader.read
            due = read % _STATE_EVERY == 0 and (read > 0 or self.feed.loader_state)
            noted = self._noted() if due else None
            item = next(items, nothing)
            if item is nothing:
                return
            if noted is not None:
                self.anchor = noted
            yield item

    def _noted(self) -> dict[str, Any]:
        assert self.feed.target is not None
        state = copy.deepcopy(self.feed.target.state_dict())
        facts = {"rng": GlobalStreams(), "opened": True, "read": self.reader.read, "source": state}
        return {**self.anchor, **facts}

    def _drop(self, count: int) -> int:
        """Read `count` items and let them go; the samples in them."""
        samples = 0
        for _ in range(count):
            try:
                self.earlier = next(self.reader)
            except StopIteration:
                break
            samples += count_samples(self.earlier)
        self.handed = self.reader.read
        return samples

    def _alone(self, start: Start) -> Iterator[Step]:
        steps, batches, samples = start.steps, start.batches, start.samples
        eager = self.feed.reads_ahead
        for batch in self.reader:
            size = count_samples(batch)
            steps += 1
            samples += size
            last = self.reader.ended() if eager else None
            yield Step(None, batches, size, size, last, steps, batches + 1, samples, batch=batch)
            batches += 1
        self.feed.note_end()

    def _agreed(self, agree: Agreement, start: Start) -> Iterator[Step]:
        """Steps as long as any rank has a batch. Flags travel while the step before them is computed."""
        served, rank = self.feed.served, agree.rank
        steps, batches, samples = start.steps, start.batches, start.samples
        pending: deque[tuple[Any, Exception | None, Gathering]] = deque()
        own = self._own_batches()
        failure: Exception | None = None

        def send() -> None:
            nonlocal failure
            batch = None
            if failure is None:
                try:
                    batch = next(own, None)
                except Exception as error:
                    failure = error
            flag = 2 if failure is not None else int(batch is not None)
            size = count_samples(batch) if flag == 1 else 0
            pending.append((batch, failure, agree.begin(flag, size)))

        def receive() -> tuple[Any, list[list[int]]]:
            batch, error, flags = pending.popleft()
            return (batch if error is None else error), flags.wait()

        send()
        send()
        batch, rows = receive()
        while True:
            failed = [r for r, row in enumerate(rows) if row[0] == 2]
            if failed:
                if isinstance(batch, Exception) and rank in failed:
                    raise batch
                raise DataError(f"reading data failed on rank {failed[0]}; its error is there")
            present = [row[0] == 1 for row in rows]
            if not any(present):
                break
            next_batch, next_rows = receive()
            send()
            last = not any(row[0] for row in next_rows)
            steps += 1
            total = sum(row[1] for row in rows)
            samples += total
            if not all(present) or not all(served.ever):
                served.note(present, rank, f"step {steps - 1} of the epoch")
            replay = not present[rank]
            if replay and not served.here:
                if self.earlier is None:
                    raise DataError(f"rank {rank} has no batch to replay at step {steps - 1} of the epoch")
                batch = self.earlier
            served.here = True
            done = batches + sum(present)
            ordinal = batches + sum(present[:rank])
            size = rows[rank][1]
            yield Step(None, ordinal, size, total, last, steps, done, samples, replay, batch)
            batches = done
            batch, rows = next_batch, next_rows
        while pending:
            receive()
        self.feed.note_end()

    def _own_batches(self) -> Iterator[Any]:
        if not self.common:
            yield from self.reader
            return
        world, rank = self.feed.world, self.feed.rank
        while True:
            group = [item for _, item in zip(range(world), self.reader, strict=False)]
            if len(group) > rank:
                yield group[rank]
            if len(group) < world:
                return

    def close(self) -> None:
        """Let go of the source, unless it is an iterator that a later loop continues with."""
        super().close()
        if not self.feed.once:
            self.reader.close()

    def ended(self) -> bool:
        """True if the source is at its end; reads one batch ahead to know."""
        return self.reader.ended()

    def handed_out(self, step: Step) -> None:
        """Count what this rank's stream has given."""
        self.handed = self._offset + (step.steps_done if self.feed.sharded else step.batches_done)

    def state(self) -> dict[str, Any]:
        """The state that the source was last known in, and how far it was read then."""
        read = self.reader.read
        return {
            "anchor": {**self.anchor, "rng": self.anchor["rng"].state_dict()},
            "base": self.base,
            "round": self.round,
            "sharded": self.feed.sharded,
            "ahead": max(read - self.handed, 0),
            "samplers": {},
            "source": None,
        }


def _is_plain_stream_loader(source: Any) -> bool:
    """True for torch's own loader over an iterable dataset, which we may run with workers of our own."""
    if not isinstance(source, DataLoader) or type(source).__iter__ is not DataLoader.__iter__:
        return False
    dataset = source.dataset
    return isinstance(dataset, IterableDataset) and not isinstance(dataset, (IterDataPipe, MapDataPipe))


def _shards_itself(source: Any, rank: int, world: int) -> bool:
    """True if each rank's copy of `source` yields that rank's own share.

    Said by `hotloop_sharded = True` on the source or its dataset, by `num_replicas` and `rank` on a sampler
    or dataset, or by the mark that Hugging Face's `split_dataset_by_node` leaves.
    """
    from hotloop.data.order import is_sharded

    dataset = getattr(source, "dataset", None)
    for part in (source, dataset):
        if getattr(part, "hotloop_sharded", False):
            return True
        mark = getattr(part, "_distributed", None)
        if getattr(mark, "world_size", None) == world and world > 1:
            return True
        if getattr(part, "num_replicas", None) == world and getattr(part, "rank", None) == rank:
            return True
    return is_sharded(source, rank, world)


def _stateful_part(source: Any) -> Any:
    """What can save and load where it is: the source, or its dataset if that is read in this process."""

    def has_state(part: Any) -> bool:
        return callable(getattr(part, "state_dict", None)) and callable(
            getattr(part, "load_state_dict", None)
        )

    if has_state(source):
        return source
    dataset = getattr(source, "dataset", None)
    if getattr(source, "num_workers", None) == 0 and has_state(dataset):
        return dataset
    return None
