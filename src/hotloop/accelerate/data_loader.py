"""Preparing loaders: every rank its share of any torch DataLoader, and loaders without their first batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hotloop.accelerate.kinds import RNGType
from hotloop.accelerate.loaders import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipDataLoader,
)
from hotloop.accelerate.sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    find_sampler,
    is_sharded,
)
from hotloop.accelerate.state import PartialState
from hotloop.errors import DataError

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]

# what makes up a DataLoader, apart from its dataset and the order of its samples
_OPTIONS = [
    name
    for name in inspect.signature(DataLoader.__init__).parameters
    if name not in ("self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
]


def get_sampler(dataloader: Any) -> Any:
    """The sampler of single indices of a DataLoader."""
    return find_sampler(dataloader)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> Any:
    """A loader like `dataloader` that gives this rank its share.

    Args:
        dataloader: any torch DataLoader; one whose sampler shards by itself (DistributedSampler) is not
            sharded again.
        device: where batches go, with `put_on_device`.
        num_processes: ranks; default: all of the run.
        process_index: this rank.
        split_batches: the loader's batch is the global one.
        put_on_device: move batches.
        rng_types: generators made equal on all ranks at the start of each iteration.
        dispatch_batches: rank 0 reads for all; default: for iterable datasets, with `put_on_device`.
        even_batches: complete the last round so that all ranks get as many batches.
        slice_fn_for_dispatch: cuts a rank's part out of a batch.
        use_seedable_sampler: shuffle by seed and epoch.
        data_seed: that seed.
        non_blocking: copies do not wait, whether or not memory is pinned.
        use_stateful_dataloader: the position is saved with the run's state.
        torch_device_mesh: must be None.

    Raises:
        DataError: a batch cannot be divided by the ranks, or `dispatch_batches` without `put_on_device`.
    """
    state = PartialState()
    world = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    iterable = isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches is None:
        dispatch_batches = iterable and put_on_device
    if dispatch_batches and not put_on_device:
        raise DataError("dispatch_batches=True sends batches from rank 0 and needs put_on_device=True")
    if split_batches:
        _check_divides(dataloader, world)
    nested = isinstance(dataloader.sampler, BatchSampler)
    batch_sampler: Any = None if iterable else (dataloader.sampler if nested else dataloader.batch_sampler)
    sampler = find_sampler(dataloader)
    if use_seedable_sampler and isinstance(sampler, RandomSampler):
        sampler = _seeded(sampler, data_seed)
    dataset: Any = dataloader.dataset
    generator: torch.Generator | None = None
    agree = False
    if world > 1 and not dispatch_batches:
        if iterable:
            dataset, generator = _share_of_iterable(dataloader, world, rank, split_batches)
        elif not is_sharded(batch_sampler):
            generator, agree = _common_generator(sampler, use_seedable_sampler)
            batch_sampler = BatchSamplerShard(batch_sampler, world, rank, split_batches, even_batches)
    rng_types = list(rng_types) if rng_types else None
    if rng_types and generator is None:
        rng_types = [kind for kind in rng_types if kind not in ("generator", RNGType.GENERATOR)]
    kwargs: dict[str, Any] = {
        name: getattr(dataloader, name) for name in _OPTIONS if hasattr(dataloader, name)
    }
    if iterable:
        size: Any = dataloader.batch_size
        if split_batches and not dispatch_batches and size is not None:
            size //= world
        kwargs.update(batch_size=size, drop_last=dataloader.drop_last)
    elif nested:
        kwargs.update(sampler=batch_sampler, batch_size=dataloader.batch_size)
    else:
        kwargs.update(batch_sampler=batch_sampler)
    kwargs.update(
        device=device if put_on_device else None,
        rng_types=rng_types,
        synchronized_generator=generator,
        use_stateful_dataloader=use_stateful_dataloader,
        _drop_last=dataloader.drop_last,
        _non_blocking=non_blocking,
    )
    if dispatch_batches:
        prepared: DataLoaderShard = DataLoaderDispatcher(
            dataset, split_batches=split_batches, slice_fn=slice_fn_for_dispatch, **kwargs
        )
    else:
        prepared = DataLoaderShard(dataset, _agree=agree, **kwargs)
    if isinstance(sampler, SeedableRandomSampler) and use_seedable_sampler:
        prepared.set_sampler(sampler)
    return prepared


def _check_divides(dataloader: DataLoader[Any], world: int) -> None:
    size = dataloader.batch_size
    if size is None:
        size = getattr(dataloader.batch_sampler, "batch_size", None)
    if size is None:
        raise DataError(
            "split_batches=True needs to know the batch size: neither the DataLoader nor its batch sampler "
            f"({type(dataloader.batch_sampler).__name__}) has an attribute batch_size"
        )
    if size > 1 and size % world:
        raise DataError(
            f"split_batches divides each batch by the number of processes: the batch size ({size}) needs to be "
            f"a round multiple of {world}"
        )


def _seeded(sampler: RandomSampler, data_seed: int | None) -> SeedableRandomSampler:
    seeded = SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
    )
    # ranks that were seeded differently have to shuffle alike all the same
    seeded.initial_seed = PartialState().processes.broadcast_object(seeded.initial_seed)
    return seeded


def _share_of_iterable(
    dataloader: DataLoader[Any], world: int, rank: int, split_batches: bool
) -> tuple[Any, torch.Generator | None]:
    dataset: Any = dataloader.dataset
    shards = getattr(dataset, "n_shards", 0)
    if not split_batches and hasattr(dataset, "shard") and isinstance(shards, int) and shards >= world:
        return dataset.shard(num_shards=world, index=rank), None
    share = IterableDatasetShard(
        dataset,
        batch_size=dataloader.batch_size or 1,
        drop_last=dataloader.drop_last,
        num_processes=world,
        process_index=rank,
        split_batches=split_batches,
    )
    return share, getattr(dataset, "generator", None)


def _common_generator(sampler: Any, seedable: bool) -> tuple[torch.Generator | None, bool]:
    """The sampler's generator, to be kept equal on all ranks; and True where it has none to be kept."""
    if isinstance(sampler, SequentialSampler | SeedableRandomSampler) or (
        seedable and isinstance(sampler, RandomSampler)
    ):
        return None, False
    if not hasattr(sampler, "generator"):
        return None, True
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        sampler.generator.manual_seed(PartialState().processes.broadcast_object(seed))
    return sampler.generator, False


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader like `dataloader` that leaves out its first batches; all else stays as it was.

    Map-style datasets are not read for skipped batches. When the shortened epoch is over, `dataloader`
    itself goes on with the epoch after it.
    """
    iterable = isinstance(dataloader.dataset, IterableDataset)
    kwargs: dict[str, Any] = {
        name: getattr(dataloader, name) for name in _OPTIONS if hasattr(dataloader, name)
    }
    dispatcher = dataloader if isinstance(dataloader, DataLoaderDispatcher) else None
    in_rounds = dispatcher is not None and not dispatcher.split_batches
    if iterable:
        kwargs.update(batch_size=dataloader.batch_size, drop_last=dataloader.drop_last)
        kwargs.update(skip_batches=num_batches)
    else:
        nested = isinstance(dataloader.sampler, BatchSampler)
        order = dataloader.sampler if nested else dataloader.batch_sampler
        skipped = num_batches * dataloader.state.num_processes if in_rounds else num_batches
        order = SkipBatchSampler(order, skip_batches=skipped)
        kwargs.update(
            **(
                {"sampler": order, "batch_size": dataloader.batch_size}
                if nested
                else {"batch_sampler": order}
            )
        )
    if not isinstance(dataloader, DataLoaderShard):
        return (
            SkipDataLoader(dataloader.dataset, **kwargs)
            if iterable
            else DataLoader(dataloader.dataset, **kwargs)
        )
    kwargs.update(
        device=dataloader.device,
        rng_types=dataloader.rng_types,
        synchronized_generator=dataloader.synchronized_generator,
        use_stateful_dataloader=dataloader.use_stateful_dataloader,
        iteration=dataloader.iteration,
        _drop_last=dataloader._drop_last,
        _non_blocking=dataloader._non_blocking,
    )
    if dispatcher is not None:
        made: DataLoaderShard = DataLoaderDispatcher(
            dataloader.dataset, split_batches=dispatcher.split_batches, slice_fn=dispatcher.slice_fn, **kwargs
        )
    else:
        made = DataLoaderShard(dataloader.dataset, _agree=dataloader._agree, **kwargs)
    made._parent = dataloader
    made._resume, dataloader._resume = dataloader._resume, None
    return made
