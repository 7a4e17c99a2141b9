"""Loader classes: one rank's share, on its device, that say when their last batch is out and where they are."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from hotloop.accelerate.dispatch import RoundReader, send_rounds
from hotloop.accelerate.gradient_state import GradientState
from hotloop.accelerate.operations import slice_tensors
from hotloop.accelerate.seeding import synchronize_rng_states
from hotloop.accelerate.sharding import IterableDatasetShard, find_sampler, is_sharded, sample_count
from hotloop.accelerate.state import PartialState
from hotloop.data.move import count_samples, move
from hotloop.data.prefetch import find_lane, moved_steps, prefetched_steps
from hotloop.data.randomness import GlobalStreams, seed_streams
from hotloop.data.step import Step

__all__ = [
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "SkipDataLoader",
]

_HANDOUTS = itertools.count(1)


class DataLoaderStateMixin:
    """Tells the shared `GradientState` which loader is being iterated and whether its last batch is out.

    Attributes:
        end_of_dataloader: the batch handed out last is the last one.
        remainder: how many samples of the last global batch are real; 0: all; -1: not known.
        batch_samples: samples in the batch handed out last, on this rank.
        handed_out: when the last batch was handed out, counted over all loaders of the process.
        with_grad: whether gradients were being recorded then.
    """

    end_of_dataloader = False
    remainder = -1
    batch_samples = 0
    handed_out = 0
    with_grad = False

    def reset(self) -> None:
        """Forget where the last iteration was."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """An iteration starts."""
        self.reset()
        if not getattr(self, "_drop_last", False):
            samples = self._samples_per_epoch()
            with contextlib.suppress(TypeError, AttributeError, ZeroDivisionError):
                self.remainder = -1 if samples is None else samples % self.total_batch_size  # type: ignore[attr-defined]
        GradientState()._add_dataloader(self)

    def end(self) -> None:
        """An iteration is over, or was abandoned."""
        GradientState()._remove_dataloader(self)

    def _note_handout(self) -> None:
        self.handed_out = next(_HANDOUTS)
        self.with_grad = torch.is_grad_enabled()

    def _samples_per_epoch(self) -> int | None:
        """Samples over all ranks in one epoch, before anything is repeated to make ranks even."""
        loader: Any = self
        if is_sharded(loader.batch_sampler):
            return None  # a sampler that shards by itself also repeats by itself, where it likes
        counted = None if isinstance(loader.dataset, IterableDataset) else sample_count(loader.batch_sampler)
        if counted is not None:
            return counted
        dataset = (
            loader.dataset.dataset if isinstance(loader.dataset, IterableDatasetShard) else loader.dataset
        )
        try:
            return len(dataset)
        except (TypeError, NotImplementedError, AttributeError):
            return None


class _Order:
    """The index sampler of a `DataLoaderShard`: it skips, agrees with other ranks, draws as it once did."""

    def __init__(self, loader: DataLoaderShard, sampler: Any) -> None:
        self.loader = loader
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader
        streams = loader._sampler_streams
        order = iter(self.sampler) if streams is None else _drawn_from(self.sampler, streams)
        for number, batch in enumerate(order):
            if number >= loader._skip_now:
                yield batch

    def __len__(self) -> int:
        return len(self.sampler)


def _drawn_from(sampler: Any, streams: GlobalStreams) -> Iterator[Any]:
    """Iterate `sampler`; what it draws from global generators comes from `streams`, not the run's own."""
    order: Iterator[Any] | None = None
    while True:
        before = GlobalStreams()
        streams.put_back()
        try:
            order = iter(sampler) if order is None else order
            batch = next(order)
        except StopIteration:
            return
        finally:
            streams = GlobalStreams()
            before.put_back()
        yield batch


class DataLoaderShard(DataLoader[Any], DataLoaderStateMixin):
    """A DataLoader over one rank's share whose batches arrive on the device, one fetched ahead.

    Args:
        dataset: of this rank's share, if it is an iterable one.
        device: where batches go; None leaves them.
        rng_types: generators made equal on all ranks at the start of each iteration.
        synchronized_generator: the one meant by "generator" in `rng_types`.
        skip_batches: batches left out at the start of each iteration.
        use_stateful_dataloader: the position is saved with the run's state.
        iteration: number of the next epoch.
        **kwargs: as DataLoader's.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        _agree: bool = False,
        **kwargs: Any,
    ) -> None:
        self._skip_now = 0
        self._sampler_streams: GlobalStreams | None = None
        super().__init__(dataset, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader
        self.gradient_state = GradientState()
        self.iteration = iteration
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._agree = _agree
        self._parent: DataLoaderShard | None = None
        self._delivered = 0
        self._epoch_start: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None

    @property
    def _index_sampler(self) -> Any:
        inner = super()._index_sampler
        return inner if isinstance(self.dataset, IterableDataset) else _Order(self, inner)

    @property
    def base_dataloader(self) -> DataLoaderShard:
        """The loader itself: it is a DataLoader, not a wrapper of one."""
        return self

    def __iter__(self) -> Any:
        return self._run()

    def _run(self) -> Iterator[Any]:
        kinds = list(self.rng_types or ())
        if self.synchronized_generator is not None and "generator" not in [str(kind) for kind in kinds]:
            kinds.append("generator")  # ranks have to shuffle alike, asked for or not
        if kinds:
            synchronize_rng_states(kinds, self.synchronized_generator)
        self.begin()
        try:
            yield from self._epoch()
        finally:
            self.end()

    def _epoch(self) -> Iterator[Any]:
        resumed, self._resume = self._resume, None
        if resumed is not None:
            self.iteration = resumed["iteration"]
        self.set_epoch(self.iteration)
        skip = max(self.skip_batches, 0 if resumed is None else resumed["delivered"])
        by_index = not isinstance(self.dataset, IterableDataset)
        self._skip_now = skip if by_index else 0
        batches = self._open(resumed)
        if not by_index:
            next(itertools.islice(batches, skip, skip), None)
        self._delivered = skip
        moved = self._on_device(batches)
        current = next(moved, None)
        while current is not None:
            following = next(moved, None)
            self._delivered += 1
            batch, self.batch_samples = current
            self.end_of_dataloader = following is None
            self._note_handout()
            yield batch
            current = following
        self._close_epoch()

    def _close_epoch(self) -> None:
        self.iteration += 1
        self._delivered = 0
        self._epoch_start = None
        if self._parent is not None:
            self._parent.iteration = max(self._parent.iteration, self.iteration)

    def _on_device(self, batches: Iterator[Any]) -> Iterator[tuple[Any, int]]:
        """Each batch on the device, with its samples; on an accelerator the next one's copy is under way."""
        device = self.device
        if device is None:
            for batch in batches:
                yield batch, count_samples(batch)
            return
        steps = (Step(None, 0, count_samples(batch), -1, None, 0, 0, 0, batch=batch) for batch in batches)
        lane = find_lane(device)
        queued = moved_steps(steps, device) if lane is None else prefetched_steps(steps, device, 1, lane)
        for step in queued:
            yield step.batch, step.samples

    def _open(self, resumed: dict[str, Any] | None) -> Iterator[Any]:
        """The epoch's batches; its random draws are noted, or repeated as they were noted."""
        sampler = self.get_sampler()
        if resumed is None:
            start: dict[str, Any] = self._generator_states()
            start.update(streams=GlobalStreams().state_dict(), seed=self._agreed_seed())
        else:
            start = resumed["start"]
            self._set_generators(start)
        self._epoch_start = start
        self._sampler_streams = None
        if start["seed"] is not None:
            before = GlobalStreams()
            seed_streams(start["seed"])
            self._sampler_streams = GlobalStreams()
            before.put_back()
        if resumed is None or isinstance(sampler, SequentialSampler):
            return super().__iter__()
        if self._sampler_streams is not None:
            return super().__iter__()
        streams = start["streams"]
        with GlobalStreams.from_state_dict(streams).in_force():
            # opening an epoch draws a seed for workers first; the sampler's draws come after it
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._sampler_streams = GlobalStreams()
        if self.generator is not None and start["loader"] is not None:
            self.generator.set_state(start["loader"])
        with GlobalStreams.from_state_dict(streams).in_force():
            return super().__iter__()

    def _agreed_seed(self) -> int | None:
        """A seed for samplers that have no generator of their own to keep equal, the same on every rank."""
        processes = PartialState().processes
        if not self._agree or processes.world == 1:
            return None
        seed = int(torch.randint(2**62, ()).item()) if processes.is_main else 0
        return int(processes.broadcast_object(seed))

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is: the next one after `load_state_dict` delivers what would come now."""
        if self.end_of_dataloader or self._epoch_start is None:
            done = self.iteration + int(self._epoch_start is not None)
            return {"iteration": done, "delivered": 0, "start": None, "now": self._generator_states()}
        return {"iteration": self.iteration, "delivered": self._delivered, "start": self._epoch_start}

    def _generator_states(self) -> dict[str, Any]:
        generator = getattr(self.get_sampler(), "generator", None)
        return {
            "sampler": None if generator is None else generator.get_state(),
            "loader": None if self.generator is None else self.generator.get_state(),
        }

    def _set_generators(self, states: dict[str, Any]) -> None:
        for one, saved in (
            (getattr(self.get_sampler(), "generator", None), states["sampler"]),
            (self.generator, states["loader"]),
        ):
            if one is not None and saved is not None:
                one.set_state(saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration continue where `state_dict` was taken; later ones are whole epochs."""
        if state_dict["start"] is None:
            self.iteration = state_dict["iteration"]
            self._resume = None
            self._set_generators(state_dict["now"])
        else:
            self._resume = state_dict

    def repeat_epoch(self, state_dict: dict[str, Any]) -> None:
        """As `load_state_dict`, but from the start of the epoch, in the same order: scripts skip by themselves."""
        self.load_state_dict({**state_dict, "delivered": 0})

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch, for samplers and datasets that want to know."""
        self.iteration = epoch
        seen = 0
        holder: Any = self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler
        while holder is not None and seen < 8:
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)
            holder = getattr(holder, "batch_sampler", None) or getattr(holder, "sampler", None)
            seen += 1
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def total_batch_size(self) -> int:
        """Samples per step over all ranks."""
        if isinstance(self.dataset, IterableDatasetShard):
            shard = self.dataset
            return shard.batch_size if shard.split_batches else shard.batch_size * shard.num_processes
        holder: Any = self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler
        if getattr(holder, "split_batches", False):
            return int(holder.batch_size)
        return int(holder.batch_size * getattr(holder, "num_processes", 1))

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset, over all ranks."""
        return int(getattr(self.dataset, "total_length", None) or len(self.dataset))  # type: ignore[arg-type]

    def get_sampler(self) -> Any:
        """The sampler of single indices."""
        return find_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of single indices."""
        holder: Any = self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler
        while holder is not None:
            if getattr(holder, "sampler", None) is not None or not hasattr(holder, "batch_sampler"):
                object.__setattr__(holder, "sampler", sampler)
            holder = getattr(holder, "batch_sampler", None)

    def __len__(self) -> int:
        if self.skip_batches:
            return max(super().__len__() - self.skip_batches, 0)
        return super().__len__()


# accelerate wraps loaders in an adapter; here the loader itself is one
DataLoaderAdapter = DataLoaderShard


class SkipDataLoader(DataLoaderShard):
    """A DataLoader that leaves out its first batches."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs
        )


class DataLoaderDispatcher(DataLoaderShard):
    """A DataLoader that only rank 0 reads; it sends every rank its part, of any shape.

    Args:
        dataset: read on rank 0.
        split_batches: divide each batch among ranks; otherwise each rank gets batches of the loader's size.
        slice_fn: `slice_fn(batch, slice, process_index=, num_processes=)` cuts a rank's part out of a batch.
        **kwargs: as `DataLoaderShard`'s.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.split_batches = split_batches
        self.slice_fn = slice_tensors if slice_fn is None else slice_fn
        self.state = PartialState()
        if self.device is None:
            self.device = self.state.device

    def _epoch(self) -> Iterator[Any]:
        resumed, self._resume = self._resume, None
        if resumed is not None:
            self.iteration = resumed["iteration"]
        self.set_epoch(self.iteration)
        skip = max(self.skip_batches, 0 if resumed is None else resumed["delivered"])
        self._skip_now = 0
        processes = self.state.processes
        reader = None
        if processes.is_main:
            reader = RoundReader(
                self._open(resumed),
                processes.world,
                split_batches=self.split_batches,
                drop_last=self._drop_last,
                slice_fn=self.slice_fn,
            )
        elif resumed is None:
            self._epoch_start = {}
        number = 0
        for part, last, remainder in send_rounds(reader, processes):
            number += 1
            if number <= skip:
                continue
            assert self.device is not None
            self.batch_samples = count_samples(part)
            self._delivered = number
            moved = move(part, self.device, True)
            if last:
                self.end_of_dataloader = True
                self.remainder = remainder
            self._note_handout()
            yield moved
        self._close_epoch()

    def __len__(self) -> int:
        whole = DataLoader.__len__(self)
        if not self.split_batches:
            world = self.state.num_processes
            whole = whole // world if self._drop_last else math.ceil(whole / world)
        return max(whole - self.skip_batches, 0)

    @property
    def total_batch_size(self) -> int:
        """Samples per step over all ranks."""
        order: Any = self.batch_sampler
        size = order.batch_size if self.batch_size is None else self.batch_size
        return int(size if self.split_batches else size * self.state.num_processes)
