"""Which samples this rank gets: samplers and datasets that take one rank's share of another's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, Sampler

from hotloop.errors import DataError

__all__ = [
    "BatchSamplerShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "find_sampler",
    "is_sharded",
    "sample_count",
]


def is_sharded(sampler: Any) -> bool:
    """Whether a sampler (or one inside it) gives one rank's share already, as DistributedSampler does."""
    seen = 0
    while sampler is not None and seen < 8:
        if isinstance(sampler, DistributedSampler):
            return True
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            return True
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
        seen += 1
    return False


def find_sampler(loader: Any) -> Any:
    """The sampler of single indices below a DataLoader's batch sampler, None if there is none."""
    holder: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    sampler = getattr(holder, "sampler", None)
    while sampler is None and getattr(holder, "batch_sampler", None) is not None:
        holder = holder.batch_sampler
        sampler = getattr(holder, "sampler", None)
    return sampler


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order depends on a seed and the epoch only, so that it can be repeated.

    Args:
        *args: as RandomSampler's.
        data_seed: the seed; None: torch's initial seed.
        **kwargs: as RandomSampler's.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of `epoch`."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        epoch = self.epoch
        self.generator.manual_seed(self.initial_seed + epoch)
        yield from super().__iter__()
        self.epoch = epoch + 1


class BatchSamplerShard(BatchSampler):
    """One rank's batches of a batch sampler; every rank iterates the whole sampler and keeps its own.

    Batches are dealt in rounds of one per rank. With `split_batches` each batch is divided instead. An
    incomplete last round is dropped (`drop_last` of the sampler), dealt as it is (`even_batches=False`), or
    completed with samples from the start, in order, so that all ranks get as many full batches.

    Args:
        batch_sampler: gives the batches; its `batch_size` and `drop_last` are used if it has them.
        num_processes: ranks.
        process_index: this rank.
        split_batches: divide each batch.
        even_batches: complete the last round.

    Raises:
        DataError: batches of this size cannot be divided by the ranks.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise DataError(
                f"split_batches divides each batch by the number of processes: the batch size "
                f"({self.batch_size}) needs to be a round multiple of {num_processes}"
            )

    @property
    def total_length(self) -> int:
        """Batches of the sampler itself, over all ranks."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.split_batches:
            return total
        rounds, rest = divmod(total, self.num_processes)
        if rest == 0 or self.drop_last:
            return rounds
        return rounds + int(self.even_batches or self.process_index < rest)

    def __iter__(self) -> Iterator[Any]:
        return self._divided() if self.split_batches else self._dealt()

    def _divided(self) -> Iterator[Any]:
        share = self.batch_size // self.num_processes
        start, stop = share * self.process_index, share * (self.process_index + 1)
        first: list[Any] = []
        for batch in self.batch_sampler:
            first = first or list(batch)
            if len(batch) == self.batch_size:
                yield batch[start:stop]
            elif self.drop_last:
                continue
            elif self.even_batches:
                yield (list(batch) + _repeated(first, self.batch_size))[start:stop]
            elif len(batch) > start:
                yield batch[start:stop]

    def _dealt(self) -> Iterator[Any]:
        first: list[Any] = []
        waiting: list[Any] = []
        for batch in self.batch_sampler:
            if len(waiting) == self.num_processes:
                # a short batch that was not the last one: the sampler's batches simply vary
                yield waiting[self.process_index]
                waiting = []
            if len(first) < self.num_processes:
                first.append(batch)
            waiting.append(batch)
            complete = len(waiting) == self.num_processes
            if complete and (self.batch_size is None or len(batch) == self.batch_size):
                yield waiting[self.process_index]
                waiting = []
        if waiting and not self.drop_last:
            yield from self._deal_rest(waiting, first)

    def _deal_rest(self, waiting: list[Any], first: list[Any]) -> Iterator[Any]:
        """This rank's batch of the last, incomplete round; `first` holds the batches of the first round."""
        mine = self.process_index
        if not self.even_batches:
            if mine < len(waiting):
                yield waiting[mine]
            return
        missing = self.num_processes - len(waiting)
        if self.batch_size is None:
            waiting = waiting + _repeated(first, missing)
        else:
            short = self.batch_size - len(waiting[-1])
            fill = iter(_repeated([i for batch in first for i in batch], short + missing * self.batch_size))
            waiting[-1] = [*waiting[-1], *itertools.islice(fill, short)]
            waiting += [list(itertools.islice(fill, self.batch_size)) for _ in range(missing)]
        yield waiting[mine]


def _repeated(items: list[Any], count: int) -> list[Any]:
    """`count` items, starting over where `items` end."""
    return list(itertools.islice(itertools.cycle(items), count))


class IterableDatasetShard(IterableDataset[Any]):
    """One rank's samples of an iterable dataset; every rank iterates all of it and keeps its own.

    Samples are read in blocks of the global batch, of which rank r keeps the r-th part. A last block that is
    incomplete is dropped (`drop_last`) or completed with samples of the first one.

    Args:
        dataset: what is iterated.
        batch_size: of one rank, or of all together with `split_batches`.
        drop_last: drop an incomplete last block.
        num_processes: ranks.
        process_index: this rank.
        split_batches: `batch_size` is the global one.

    Raises:
        DataError: batches of this size cannot be divided by the ranks.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise DataError(
                f"split_batches divides each batch by the number of processes: the batch size ({batch_size}) "
                f"needs to be a round multiple of {num_processes}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, if it wants to know."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        blocks = len(self.dataset) / (self.batch_size * self.num_processes)
        return (math.floor(blocks) if self.drop_last else math.ceil(blocks)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        share = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        whole = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        start = self.process_index * share
        first: list[Any] = []
        for block in _blocks(self.dataset, whole):
            first = first or block
            if len(block) < whole:
                if self.drop_last:
                    return
                block = block + _repeated(first, whole - len(block))
            yield from block[start : start + share]


def _blocks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    source = iter(items)
    while block := list(itertools.islice(source, size)):
        yield block


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches; all else that it knows is asked of the sampler itself."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """Batches with the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def sample_count(sampler: Any) -> int | None:
    """How many samples one pass over a sampler or batch sampler gives; None if it does not say."""
    while not isinstance(sampler, Sampler) or isinstance(sampler, BatchSampler):
        inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if inner is None:
            return None
        sampler = inner
    try:
        return len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
