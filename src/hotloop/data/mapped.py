"""Epochs over a loader whose dataset is read by index: order, fetch and position are all known ahead."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from hotloop.data.agreement import Agreement, split_batches
from hotloop.data.feed import Epoch, Feed, draw_base_seed
from hotloop.data.fetch import build_fetch, draws_nothing, is_default_collate, seeded_fetch
from hotloop.data.order import (
    Served,
    Start,
    is_sharded,
    plan_alone,
    plan_sharded,
    plan_shared,
    skip_batches,
    skip_samples,
)
from hotloop.data.randomness import GlobalStreams, batch_seed
from hotloop.data.sampler_state import SamplerState
from hotloop.data.serving import is_lasting
from hotloop.data.step import Ahead, Step
from hotloop.data.workers import MapWorkers, Ticket
from hotloop.errors import DataError

__all__ = ["MapFeed"]


class MapFeed(Feed):
    """Feeds from a torch `DataLoader` over a map-style dataset.

    Args:
        source: the user's loader.
        device: where the batches will go; with a device that copies from page-locked memory, what is
            fetched here goes straight into it.
        rank, world: this process among all.
        agree: the ranks' agreement; None for a single process.
        reads_ahead: steps are taken before the loop asks for them, so each must know if it is the last.
        pins: what is fetched here or by workers for such a device goes into page-locked memory.
    """

    def __init__(
        self,
        source: Any,
        device: torch.device,
        rank: int,
        world: int,
        agree: Agreement | None,
        reads_ahead: bool,
        pins: bool = True,
    ) -> None:
        self.source = source
        self.reads_ahead = reads_ahead or source.num_workers > 0
        self.rank, self.world, self.agree = rank, world, agree
        self.auto = source.batch_sampler is not None
        self.index_sampler = source.batch_sampler if self.auto else source.sampler
        self.exact = self.auto and is_default_collate(source.collate_fn)
        self.samplers = SamplerState(source)
        self.sharded = agree is not None and is_sharded(source, rank, world)
        self.per_rank = self.sharded and not self.samplers.built_in
        self.served = Served([False] * world)
        self.epoch: int | None = None
        self.batch_size = self._batch_size()
        self.draws = not (
            draws_nothing(source.dataset) and (self.exact or _is_torch_collate(source.collate_fn))
        )
        self.persistent = source.num_workers > 0 and source.persistent_workers
        self.lasting = self.persistent or is_lasting(source)
        self._base: int | None = None  # of lasting workers, which torch seeds once
        self._round = 0
        self._workers: MapWorkers | None = None
        self._turn = 0
        accelerated = device.type in ("cuda", "xpu")
        self._pins = pins = pins and accelerated
        self._fetch = build_fetch(source.dataset, source.collate_fn, self.auto, pinned=pins)
        self._pins_here = source.pin_memory and not accelerated and torch.accelerator.is_available()

    def _batch_size(self) -> int:
        if not self.auto:
            return 1
        found = getattr(self.source.batch_sampler, "batch_size", -1)
        return found if type(found) is int else -1

    def length(self) -> int:
        """Steps of an epoch, a last one in which some ranks replay included."""
        batches = len(self.index_sampler)
        return batches if self.sharded or self.world == 1 else -(-batches // self.world)

    def set_epoch(self, epoch: int) -> None:
        """Remember the epoch for copies of the dataset in worker processes."""
        if hasattr(self.source.dataset, "set_epoch"):
            self.epoch = epoch

    def state(self) -> dict[str, Any]:
        """Between epochs: the samplers' memory and what lasting workers were seeded with."""
        return {"samplers": self.samplers.take(), "base": self._base, "round": self._round}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` of this or of an epoch returned."""
        self.samplers.put(state["samplers"])
        if self.persistent:
            self._base, self._round = state["base"], state["round"]
        self.served = Served([True] * self.world)

    def next_base(self) -> tuple[int, int, bool]:
        """Base seed, round under it, and whether the seed was drawn just now, as torch's loader draws."""
        if not self.persistent:
            return draw_base_seed(self.source.generator), 0, True
        if self._base is None:
            self._base, self._round = draw_base_seed(self.source.generator), 0
            return self._base, 0, True
        self._round += 1
        return self._base, self._round, False

    def open(self, resume: dict[str, Any] | None, skip: int) -> Epoch:
        """An epoch; on several ranks this is collective."""
        return _MapEpoch(self, resume, skip)

    def fetched(self, plan: Iterator[Step], base: int, seed: int) -> Iterator[Step]:
        """`plan` with batches, fetched here or in workers."""
        if self.source.num_workers > 0:
            return self._through_workers(plan, base, seed)
        return self._in_process(plan, seed)

    def _in_process(self, plan: Iterator[Step], seed: int) -> Iterator[Step]:
        fetch = self._fetch
        if self._pins_here:
            from torch.utils.data._utils.pin_memory import pin_memory

            plain = fetch

            def fetch(indices: Any) -> Any:
                return pin_memory(plain(indices))

        if not self.draws:
            for step in plan:
                if step.indices is not None:
                    step.batch = fetch(step.indices)
                yield step
            return
        fetch_seeded = seeded_fetch(fetch, seed)
        for step in plan:
            if step.indices is not None:
                step.batch = fetch_seeded(step.indices, step.ordinal)
            yield step

    def _through_workers(self, plan: Iterator[Step], base: int, seed: int) -> Iterator[Step]:
        if self._workers is None:
            self._workers = MapWorkers(self.source, self._pins)
        self._turn += 1
        turn = self._turn
        waiting: deque[Step] = deque()
        failed: list[Exception] = []
        tickets = _tickets(plan, waiting, failed, seed if self.draws else None, self.epoch)
        batches = self._workers.batches(tickets, base)
        for batch in batches:
            step = waiting.popleft()
            step.batch = batch
            yield step
            if self.lasting and turn != self._turn:
                raise DataError(
                    "another loop over this loader began and took its persistent workers; finish one loop "
                    "before the next, or use persistent_workers=False"
                )
        if failed:
            # No frame of the traceback may hold the error or the workers, or these would outlive the loop.
            del batches, tickets
            raise failed.pop()


def _tickets(
    plan: Iterator[Step],
    waiting: deque[Step],
    failed: list[Exception],
    seed: int | None,
    epoch: int | None,
) -> Iterator[Ticket]:
    """A ticket for each step, which joins `waiting`. Torch's iterator keeps this, so it knows no feed."""
    try:
        for step in plan:
            waiting.append(step)
            yield step.indices, None if seed is None else batch_seed(seed, step.ordinal), epoch
    except Exception as error:
        failed.append(error)  # raised in its turn, after the batches that came before it


def _is_torch_collate(collate: Any) -> bool:
    return collate in (torch.utils.data.default_collate, torch.utils.data.default_convert)


class _MapEpoch(Epoch):
    """An open epoch: the drawn order, where it came from, and the steps."""

    def __init__(self, feed: MapFeed, resume: dict[str, Any] | None, skip: int) -> None:
        self.feed = feed
        self.anchor: dict[str, Any] = {}
        self.streams: GlobalStreams | None = None
        self.explicit = False
        self.undelivered: deque[Any] | None = None
        self.drawn: Ahead | None = None
        self.earlier: Any = None
        self.base, self.round, self.drew = 0, 0, False
        start = Start()
        if feed.agree is None or feed.sharded or feed.rank == 0:
            start = self._open(skip) if resume is None else self._reopen(resume)
        if feed.agree is not None:
            facts = (self.base, self.round, self.drew, start)
            self.base, self.round, self.drew, start = feed.agree.share(facts)
        self.start = start
        self._done = start.batches
        self._delivered = 0
        seed = batch_seed(self.base, self.round) if self.round else self.base
        self.steps = feed.fetched(self._plan(start), self.base, seed)

    def _open(self, skip: int) -> Start:
        feed = self.feed
        self.anchor = feed.samplers.take()
        self.streams = GlobalStreams(torch_only=feed.samplers.built_in)
        drawn = iter(feed.index_sampler)
        self.base, self.round, self.drew = feed.next_base()
        if not skip:
            self._note(drawn)
            return Start()
        shares = feed.world if feed.sharded else 1
        drawn, skipped = skip_batches(drawn, skip * feed.world // shares, feed.auto)
        self.earlier = skipped.last
        self._note(drawn)
        return Start(skip, skipped.batches * shares, skipped.samples * shares)

    def _reopen(self, resume: dict[str, Any]) -> Start:
        feed = self.feed
        self.base, self.round, self.drew = resume["base"], resume["round"], resume["drew"]
        start = Start(resume["steps"], resume["batches"], resume["samples"])
        if resume["order"] is not None:
            if feed.sharded and resume["world"] != feed.world:
                raise DataError(
                    f"the rest of the order was saved by one of {resume['world']} ranks with a sharded "
                    f"sampler; {feed.world} ranks cannot take it up. Use the same number of processes, give "
                    "the sampler a state_dict, or start at an epoch's end."
                )
            self.explicit = True
            self._note(iter(_unpack_order(resume["order"])))
            return start
        if resume["rng"] is None:
            raise DataError(
                "the loader's state was saved by a rank that does not draw the order; resume from the state "
                "that rank 0 saved"
            )
        self.anchor = resume["anchor"]
        feed.samplers.put(self.anchor)
        self.streams = GlobalStreams.from_state_dict(resume["rng"])
        batches, samples = self._to_skip(resume)
        with self.streams.in_force():
            drawn = iter(feed.index_sampler)
            if self.drew:
                draw_base_seed(feed.source.generator)
            if samples is None:
                drawn, skipped = skip_batches(drawn, batches, feed.auto)
            else:
                drawn, skipped = skip_samples(feed.source, drawn, samples)
            self.earlier = skipped.last
            self._note(drawn).fill(resume["ahead"])
        return start

    def _to_skip(self, resume: dict[str, Any]) -> tuple[int, int | None]:
        """Batches of this rank's stream to pass over, or samples if the batch size or sharding changed."""
        feed = self.feed
        same = feed.batch_size == resume["batch_size"]
        if not feed.sharded:
            return resume["batches"], None if same else resume["samples"]
        if resume["world"] == feed.world and same:
            return resume["steps"], None
        if resume["samples"] % feed.world:
            raise DataError(
                f"{resume['samples']} samples of the epoch are consumed, which {feed.world} ranks with a "
                "sharded sampler cannot share equally. Resume with the earlier number of processes, at an "
                "epoch's end, or with an unsharded sampler."
            )
        return 0, resume["samples"] // feed.world

    def _note(self, drawn: Iterator[Any]) -> Ahead:
        if self.feed.samplers.built_in or self.feed.samplers.stateful:
            self.drawn = Ahead(drawn)
        else:
            self.undelivered = deque()
            self.drawn = Ahead(_noted(drawn, self.undelivered))
        return self.drawn

    def _plan(self, start: Start) -> Iterator[Step]:
        feed = self.feed
        if feed.agree is None:
            assert self.drawn is not None
            eager = feed.reads_ahead or feed.samplers.built_in or self.explicit
            return plan_alone(self.drawn, start, feed.auto, feed.exact, eager)
        if feed.sharded:
            assert self.drawn is not None
            return plan_sharded(
                self.drawn, feed.agree, start, feed.auto, feed.exact, feed.served, self.earlier
            )
        return plan_shared(self.drawn, feed.agree, start, feed.auto, feed.exact, feed.served)

    def ended(self) -> bool:
        """True if no index batch is left."""
        return self.drawn is not None and self.drawn.ended()

    def handed_out(self, step: Step) -> None:
        """Forget the order up to `step`."""
        taken = 1
        if self.feed.agree is not None:
            taken = (not step.replay) if self.feed.sharded else step.batches_done - self._done
            self._done = step.batches_done
        self._delivered += taken
        if self.undelivered is not None:
            for _ in range(min(taken, len(self.undelivered))):
                self.undelivered.popleft()

    def state(self) -> dict[str, Any]:
        """Where the order came from, or the rest of it if the sampler cannot be asked again."""
        order = None
        if self.undelivered is not None and self.drawn is not None and self._is_finite():
            self.drawn.take_all()
            order = _pack_order(list(self.undelivered))
        again = order is None and self.streams is not None
        return {
            "samplers": {} if order is None else self.feed.samplers.take(),
            "anchor": self.anchor if again else {},
            "rng": self.streams.state_dict() if again and self.streams is not None else None,
            "order": order,
            "base": self.base,
            "round": self.round,
            "drew": self.drew,
            "ahead": 0 if self.drawn is None else self.drawn.read - self._delivered,
        }

    def _is_finite(self) -> bool:
        try:
            return self.explicit or 0 <= len(self.feed.index_sampler) < sys.maxsize
        except TypeError:
            return False


def _noted(drawn: Iterator[Any], kept: deque[Any]) -> Iterator[Any]:
    for batch in drawn:
        kept.append(batch)
        yield batch


def _pack_order(batches: list[Any]) -> dict[str, Any]:
    """Index batches as two int64 tensors if they are integers, else as they are."""
    if all(type(batch) is int for batch in batches):
        return {"sizes": torch.full((len(batches),), -1), "flat": torch.tensor(batches, dtype=torch.int64)}
    if all(type(batch) is list and all(type(i) is int for i in batch) for batch in batches):
        flat = torch.tensor(list(chain.from_iterable(batches)), dtype=torch.int64)
        return {"sizes": torch.tensor([len(batch) for batch in batches]), "flat": flat}
    return {"batches": batches}


def _unpack_order(order: dict[str, Any]) -> list[Any]:
    if "batches" in order:
        return list(order["batches"])
    return split_batches(order["sizes"].tolist(), order["flat"].tolist())
