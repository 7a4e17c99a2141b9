from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hotloop.accelerate import sharding
from hotloop.errors import DataError

theirs = pytest.importorskip("accelerate.data_loader")


class _Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_batches_are_dealt_as_accelerate_deals_them(world: int, drop_last: bool, even: bool) -> None:
    for length, size in itertools.product((0, 1, 2, 5, 8, 9, 21, 24), (1, 3, 4)):
        sampler = BatchSampler(range(length), batch_size=size, drop_last=drop_last)
        for rank in range(world):
            mine = sharding.BatchSamplerShard(sampler, world, rank, even_batches=even)
            other = theirs.BatchSamplerShard(sampler, world, rank, even_batches=even)
            assert list(mine) == list(other), (length, size, rank)
            assert len(mine) == len(other)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_batches_are_divided_as_accelerate_divides_them(world: int, drop_last: bool, even: bool) -> None:
    for length in (0, 1, 2, 4, 7, 8, 21, 24):
        sampler = BatchSampler(range(length), batch_size=4, drop_last=drop_last)
        for rank in range(world):
            mine = sharding.BatchSamplerShard(sampler, world, rank, split_batches=True, even_batches=even)
            other = theirs.BatchSamplerShard(sampler, world, rank, split_batches=True, even_batches=even)
            assert list(mine) == list(other), (length, rank)


def test_batches_of_varying_size_are_all_dealt() -> None:
    batches = [[0, 1, 2], [3], [4, 5], [6], [7, 8]]

    class Varying:
        batch_size = 3

        def __iter__(self) -> Iterator[list[int]]:
            return iter(batches)

        def __len__(self) -> int:
            return len(batches)

    shards = [list(sharding.BatchSamplerShard(Varying(), 2, rank, even_batches=False)) for rank in range(2)]
    assert shards == [[[0, 1, 2], [4, 5], [7, 8]], [[3], [6]]]


def test_a_batch_that_ranks_cannot_divide_is_an_error() -> None:
    sampler = BatchSampler(range(9), batch_size=3, drop_last=False)
    with pytest.raises(DataError, match=r"batch size \(3\).*multiple of 2"):
        sharding.BatchSamplerShard(sampler, 2, 0, split_batches=True)
    with pytest.raises(DataError, match=r"batch size \(3\).*multiple of 2"):
        sharding.IterableDatasetShard(_Stream(9), 3, num_processes=2, split_batches=True)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_streams_are_shared_as_accelerate_shares_them(drop_last: bool, split: bool) -> None:
    for length, size, world in itertools.product((0, 1, 3, 8, 17, 24), (4, 8), (1, 2, 4)):
        for rank in range(world):
            arguments = {"drop_last": drop_last, "num_processes": world, "process_index": rank}
            mine = sharding.IterableDatasetShard(_Stream(length), size, split_batches=split, **arguments)
            other = theirs.IterableDatasetShard(_Stream(length), size, split_batches=split, **arguments)
            assert list(mine) == list(other), (length, size, world, rank)


def test_a_seedable_sampler_repeats_by_seed_and_epoch() -> None:
    first = sharding.SeedableRandomSampler(range(10), data_seed=5)
    orders = [list(first) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2]
    second = theirs.SeedableRandomSampler(range(10), data_seed=5)
    assert [list(second) for _ in range(3)] == orders
    again = sharding.SeedableRandomSampler(range(10), data_seed=5)
    again.set_epoch(2)
    assert list(again) == orders[2]
    torch.manual_seed(11)
    assert sharding.SeedableRandomSampler(range(3)).initial_seed == 11


def test_samplers_that_shard_by_themselves_are_recognised() -> None:
    own = DistributedSampler(range(8), num_replicas=2, rank=0)  # type: ignore[arg-type]
    assert sharding.is_sharded(own)
    assert sharding.is_sharded(BatchSampler(own, 2, False))
    assert not sharding.is_sharded(BatchSampler(RandomSampler(range(8)), 2, False))


def test_skipping_keeps_what_a_batch_sampler_knows() -> None:
    inner = sharding.BatchSamplerShard(BatchSampler(SequentialSampler(range(20)), 2, False), 2, 1)
    skipped = sharding.SkipBatchSampler(inner, 2)
    assert list(skipped) == list(inner)[2:]
    assert (len(skipped), skipped.total_length) == (3, 5)
    assert (skipped.batch_size, skipped.num_processes, skipped.even_batches) == (2, 2, True)
    assert sharding.sample_count(skipped) == 20
