"""How `Loader` takes a `ResidentLoader`: batches are made on the device, the position is a number of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hotloop.data.feed import Epoch, Feed
from hotloop.data.order import Served, Start
from hotloop.data.resident import ResidentLoader
from hotloop.data.step import Step
from hotloop.errors import DataError

__all__ = ["ResidentFeed"]


class ResidentFeed(Feed):
    """Feeds from a `ResidentLoader`. Ranks agree without a word: order and cuts are functions of seed and epoch.

    Args:
        source: the user's loader.
        rank, world: this process among all.
    """

    resident = True

    def __init__(self, source: ResidentLoader, rank: int, world: int) -> None:
        self.source = source
        self.rank, self.world = rank, world
        self.batch_size = source.batch_size or -1
        self.served = Served([False] * world)

    def length(self) -> int:
        """Steps of the epoch that comes next, or runs."""
        return self.source.steps(self.world)

    def state(self) -> dict[str, Any]:
        """Between epochs: which one comes, and the key of its order."""
        return {"data_epoch": self.source.epoch, "seed": self.source.seed}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned.

        Raises:
            DataError: it was saved with another seed.
        """
        if state["seed"] != self.source.seed:
            raise DataError(
                f"the position was saved with seed {state['seed']}, this loader has {self.source.seed}: its order "
                "would be another"
            )
        self.source.set_epoch(state["data_epoch"])
        self.served = Served([True] * self.world)

    def open(self, resume: dict[str, Any] | None, skip: int) -> Epoch:
        """An epoch."""
        if resume is not None:
            self.source.set_epoch(resume["data_epoch"])
            return _ResidentEpoch(self, Start(resume["steps"], resume["batches"], resume["samples"]))
        start = Start()
        if skip:
            for _, end, stage in list(self.source.cuts(0, self.world))[:skip]:
                batches = -(-(end - start.samples) // stage.batch_size)
                start = Start(start.steps + 1, start.batches + batches, end)
        return _ResidentEpoch(self, start)


class _ResidentEpoch(Epoch):
    def __init__(self, feed: ResidentFeed, start: Start) -> None:
        self.feed = feed
        self.start = start
        self.epoch = feed.source.epoch
        self._any = False
        self.steps = self._steps(start)

    def _steps(self, start: Start) -> Iterator[Step]:
        feed = self.feed
        source, rank, world = feed.source, feed.rank, feed.world
        order = source.order()
        epoch = torch.tensor(self.epoch, device=source.device)
        steps, batches = start.steps, start.batches
        cuts = list(source.cuts(start.samples, world))
        for i, (first, end, stage) in enumerate(cuts):
            size = stage.batch_size
            present = [first + r * size < end for r in range(world)]
            if not all(present) or not all(feed.served.ever):
                feed.served.note(present, rank, f"step {steps} of the epoch")
            mine = order[first + rank * size : min(first + (rank + 1) * size, end)]
            replay = not present[rank]
            if replay and not feed.served.here:  # resumed here: what it replays counts for nothing
                mine = order[:1]
            batch = source.cut(mine, epoch, stage) if len(mine) else None
            feed.served.here = True
            steps += 1
            batches += sum(present)
            yield Step(
                mine, batches - sum(present) + rank, 0 if replay else len(mine), end - first, i == len(cuts) - 1,
                steps, batches, end, replay, batch,
            )  # fmt: skip
        # also where it was resumed behind its last batch, and had nothing to hand out
        self._any = True

    def ended(self) -> bool:
        """Steps say by themselves which is the last."""
        return True

    def handed_out(self, step: Step) -> None:
        """Nothing to note: the position says it all."""
        self._any = True

    def close(self) -> None:
        """The next epoch comes next, also where this one was left early."""
        super().close()
        if self._any and self.feed.source.epoch == self.epoch:
            self.feed.source.epoch += 1

    def state(self) -> dict[str, Any]:
        """The running epoch and the key of its order."""
        return {"data_epoch": self.epoch, "seed": self.feed.source.seed}
