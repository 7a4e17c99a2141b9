"""The order of an epoch: which indices this process takes at which step, agreed by all ranks ahead of time.

There is one global stream of index batches. With W ranks, rank r takes batch k*W + r at step k. Only rank 0
draws the stream, so the ranks agree whatever the sampler does; it goes around in chunks of many steps, from
which every rank knows, without a word at the step itself, who has a batch when and where the epoch ends.
A sampler that is sharded already (such as `DistributedSampler`) is drawn by each rank for itself, and only
the sizes go around.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler

from hotloop.data.agreement import Agreement
from hotloop.data.sampler_state import samplers_of
from hotloop.data.step import Ahead, Step
from hotloop.errors import DataError

__all__ = [
    "Served",
    "Skipped",
    "Start",
    "is_sharded",
    "plan_alone",
    "plan_sharded",
    "plan_shared",
    "sized",
    "skip_batches",
    "skip_samples",
]

CHUNK_STEPS = 256
CHUNK_INDICES = 1 << 18


@dataclass(frozen=True)
class Start:
    """Where in the epoch a plan begins: what all ranks together have had of it."""

    steps: int = 0
    batches: int = 0
    samples: int = 0


@dataclass
class Served:
    """Which ranks ever had a batch of this loader, and whether this process can replay one."""

    ever: list[bool]
    here: bool = field(default=False)

    def note(self, present: list[bool], rank: int, what: str) -> None:
        """Record a step's batches.

        Raises:
            DataError: some rank has no batch at this step and never had one; on every rank alike.
        """
        self.ever = [old or new for old, new in zip(self.ever, present, strict=True)]
        without = [r for r, had in enumerate(self.ever) if not had]
        if without:
            raise DataError(
                f"{what}: {'ranks' if len(without) > 1 else 'rank'} {', '.join(map(str, without))} of "
                f"{len(present)} never had a batch, so there is nothing to replay there while "
                f"{sum(present)} other rank(s) have data. Use fewer processes, a smaller batch size or more "
                "data (and drop_last=False)."
            )


def is_sharded(source: Any, rank: int, world: int) -> bool:
    """True if a sampler of `source` already gives each of `world` ranks its own share.

    Raises:
        DataError: a sampler is sharded for another number of ranks, or as another rank.
    """
    for path, sampler in samplers_of(source):
        replicas, own = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if type(replicas) is not int or type(own) is not int or replicas == 1:
            continue
        if replicas != world or own != rank:
            raise DataError(
                f"the loader's {path} ({type(sampler).__name__}) is sharded as rank {own} of {replicas}, but "
                f"this is rank {rank} of {world}. Leave sharding to hotloop (give an unsharded sampler), or "
                "build it with this process's rank and the number of processes."
            )
        return True
    return False


@dataclass
class Skipped:
    """What was passed over at the start of a stream: how much, and the last of it."""

    batches: int = 0
    samples: int = 0
    last: Any = None


def skip_batches(drawn: Iterator[Any], count: int, auto: bool) -> tuple[Iterator[Any], Skipped]:
    """`drawn` less its first `count` index batches, and what they were."""
    skipped = Skipped()
    for batch in islice(drawn, count):
        skipped.last, size = sized(batch, auto)
        skipped.batches += 1
        skipped.samples += size
    return drawn, skipped


def skip_samples(source: Any, drawn: Iterator[Any], count: int) -> tuple[Iterator[Any], Skipped]:
    """The order of `source` less its first `count` samples, for when the batch size is not what it was.

    The flat order is kept and cut anew.

    Raises:
        DataError: a batch sampler of the user's own cannot be cut at that sample.
    """
    batcher = source.batch_sampler
    if batcher is None:
        return skip_batches(drawn, count, auto=False)
    if type(batcher) is BatchSampler:
        flat = islice(iter(batcher.sampler), count, None)
        return _cut(flat, batcher.batch_size, batcher.drop_last), Skipped(0, count)
    passed, batch = 0, None
    while passed < count:
        batch = next(drawn, None)
        if batch is None:
            break
        passed += len(batch)
    if passed != count:
        raise DataError(
            f"the saved position is {count} samples into the epoch, but no batch of "
            f"{type(batcher).__name__} ends there (the nearest ends after {passed}). Resume with the batch "
            "sampler's earlier settings, or start at an epoch's end."
        )
    return drawn, Skipped(0, count, batch)


def _cut(flat: Iterator[Any], batch_size: int, drop_last: bool) -> Iterator[list[Any]]:
    while batch := list(islice(flat, batch_size)):
        if len(batch) < batch_size and drop_last:
            return
        yield batch


def sized(batch: Any, auto_collation: bool) -> tuple[Any, int]:
    """An index batch, as a list if it has no length of its own, and how many samples it names."""
    if not auto_collation:
        return batch, 1
    if not hasattr(batch, "__len__"):
        batch = list(batch)
    return batch, len(batch)


def plan_alone(drawn: Ahead, start: Start, auto: bool, exact: bool, eager: bool) -> Iterator[Step]:
    """The steps of a single process.

    `auto`: the index sampler yields batches, not single indices. `exact`: a batch holds as many samples as
    it has indices. `eager`: look one batch ahead at once instead of when `last` is asked for.
    """
    steps, batches, samples = start.steps, start.batches, start.samples
    for indices in drawn:
        indices, size = sized(indices, auto)
        steps += 1
        samples += size
        known = size if exact else -1
        last = drawn.ended() if eager else None
        yield Step(indices, batches, known, known, last, steps, batches + 1, samples)
        batches += 1


def plan_shared(
    drawn: Ahead | None, agree: Agreement, start: Start, auto: bool, exact: bool, served: Served
) -> Iterator[Step]:
    """The steps of this rank when rank 0 draws for all; `drawn` is None on the others.

    Raises:
        DataError: rank 0's sampler failed (there its own error is raised), or a rank never had a batch.
    """
    world, rank = agree.world, agree.rank
    steps, batches, samples = start.steps, start.batches, start.samples
    ended = False
    while not ended:
        chunk, error = _draw(drawn, world, auto, CHUNK_INDICES) if drawn is not None else ([], None)
        done = drawn is not None and error is None and drawn.ended()
        chunk, facts = agree.share_batches(chunk, [int(done), int(error is not None)])
        ended, failed = bool(facts[0]), bool(facts[1])
        whole = len(chunk) // world * world if failed else len(chunk)
        for at in range(0, whole, world):
            group = [sized(batch, auto) for batch in chunk[at : at + world]]
            total = sum(size for _, size in group)
            steps += 1
            samples += total
            if not all(served.ever) or len(group) < world:
                present = [r < len(group) for r in range(world)]
                served.note(present, rank, f"step {steps - 1} of the epoch")
            replay = rank >= len(group)
            indices, size = (None, 0) if replay else group[rank]
            if replay and not served.here:
                indices = group[0][0]  # nothing in memory after a resume: any batch will do, its weight is 0
            served.here = True
            yield Step(
                indices,
                batches + min(rank, len(group) - 1),
                0 if replay else (size if exact else -1),
                total if exact else -1,
                ended and at + world >= len(chunk),
                steps,
                batches + len(group),
                samples,
                replay,
            )
            batches += len(group)
        if error is not None:
            raise error
        if failed:
            raise DataError("the sampler failed on rank 0, which draws for all ranks; its error is there")


def _draw(
    drawn: Ahead, world: int, auto: bool, most_indices: int | None
) -> tuple[list[Any], Exception | None]:
    """Batches for a chunk of steps: whole steps, until there are enough of them or of their indices."""
    chunk: list[Any] = []
    count = 0
    try:
        while len(chunk) < CHUNK_STEPS * world and (
            most_indices is None or count < most_indices or len(chunk) % world
        ):
            try:
                indices = next(drawn)
            except StopIteration:
                break
            indices, size = sized(indices, auto)
            chunk.append(indices)
            count += size
    except Exception as error:
        return chunk, error
    return chunk, None


def plan_sharded(
    drawn: Ahead,
    agree: Agreement,
    start: Start,
    auto: bool,
    exact: bool,
    served: Served,
    earlier: Any,
) -> Iterator[Step]:
    """The steps of this rank when each rank draws its own batches. `earlier`: any batch it had before.

    Raises:
        DataError: a sampler failed (on its rank its own error is raised), or a rank never had a batch.
    """
    rank = agree.rank
    steps, batches, samples = start.steps, start.batches, start.samples
    ended = False
    while not ended:
        chunk, error = _draw(drawn, 1, auto, None)
        done = error is None and drawn.ended()
        sizes = [sized(batch, auto)[1] for batch in chunk]
        row = [len(chunk), int(done), int(error is not None), *sizes, *[0] * (CHUNK_STEPS - len(sizes))]
        rows = agree.gather(row)
        ended = all(r[1] for r in rows)
        failed = [r for r, found in enumerate(rows) if found[2]]
        most = min(rows[r][0] for r in failed) if failed else max(r[0] for r in rows)
        for at in range(most):
            present = [at < r[0] for r in rows]
            total = sum(r[3 + at] for r in rows)
            steps += 1
            samples += total
            if not all(served.ever) or not all(present):
                served.note(present, rank, f"step {steps - 1} of the epoch")
            replay = not present[rank]
            indices = chunk[at] if not replay else (None if served.here else earlier)
            if indices is None and not served.here:
                raise DataError(f"rank {rank} has no batch left to replay at step {steps - 1} of the epoch")
            served.here = True
            yield Step(
                indices,
                batches + sum(present[:rank]),
                0 if replay else (sizes[at] if exact else -1),
                total if exact else -1,
                ended and at + 1 == most,
                steps,
                batches + sum(present),
                samples,
                replay,
            )
            batches += sum(present)
        if error is not None:
            raise error
        if failed:
            raise DataError(f"the sampler failed on rank {failed[0]}; its error is there")
