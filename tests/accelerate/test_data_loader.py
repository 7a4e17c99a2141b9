from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from hotloop.accelerate.data_loader import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from hotloop.accelerate.dispatch import RoundReader
from hotloop.accelerate.state import GradientState
from hotloop.accelerate.utils import slice_tensors
from hotloop.errors import DataError


class _Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor(i) for i in range(self.length))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_is_that_of_the_plain_loader(workers: int) -> None:
    torch.manual_seed(4)
    plain = DataLoader(range(17), batch_size=4, shuffle=True, num_workers=workers)
    expected = [batch.tolist() for _ in range(2) for batch in plain]
    state = torch.get_rng_state()
    torch.manual_seed(4)
    loader = prepare_data_loader(DataLoader(range(17), batch_size=4, shuffle=True, num_workers=workers))
    assert [batch.tolist() for _ in range(2) for batch in loader] == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_a_prepared_loader_is_a_dataloader() -> None:
    for kind in (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader):
        loader = kind(range(16), batch_size=4)
        assert isinstance(loader, DataLoader)
        assert isinstance(loader, DataLoaderAdapter)
        assert len(list(loader)) == len(loader) == 4
        assert loader.base_dataloader.batch_size == 4


def test_the_shared_state_follows_an_iteration() -> None:
    loader = prepare_data_loader(DataLoader(range(10), batch_size=4))
    state = GradientState()
    assert state.active_dataloader is None
    assert state.remainder == -1
    seen = []
    for _ in loader:
        assert state.active_dataloader is loader
        seen.append((state.end_of_dataloader, state.remainder))
    assert seen == [(False, 2), (False, 2), (True, 2)]
    assert state.active_dataloader is None
    assert not state.end_of_dataloader
    for _ in loader:
        break
    assert state.active_dataloader is None


def test_parts_of_several_ranks_make_up_the_whole() -> None:
    parts = [
        prepare_data_loader(DataLoader(range(22), batch_size=4), num_processes=2, process_index=rank)
        for rank in range(2)
    ]
    rounds = list(zip(*parts, strict=True))
    assert [len(loader) for loader in parts] == [3, 3]
    flat = torch.cat([torch.cat(round_) for round_ in rounds])
    assert flat[:22].tolist() == list(range(22))
    assert parts[0].total_batch_size == 8
    assert parts[0].total_dataset_length == 22
    parts[0].batch_sampler.even_batches = False
    assert len(parts[0]) == 3


def test_a_sampler_that_shards_is_not_sharded_again() -> None:
    sampler = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    loader = DataLoader(range(8), batch_size=2, sampler=sampler)
    mine = prepare_data_loader(loader, num_processes=2, process_index=1)
    assert torch.cat(list(mine)).tolist() == [1, 3, 5, 7]
    mine.set_epoch(3)
    assert sampler.epoch == 3


def test_seedable_shuffling_depends_on_seed_and_epoch() -> None:
    def made() -> Any:
        return prepare_data_loader(
            DataLoader(range(12), batch_size=3, shuffle=True), use_seedable_sampler=True, data_seed=9
        )

    loader = made()
    assert isinstance(get_sampler(loader), SeedableRandomSampler)
    epochs = [torch.cat(list(loader)).tolist() for _ in range(3)]
    assert len({tuple(order) for order in epochs}) == 3
    other = made()
    torch.rand(5)
    other.set_epoch(2)
    assert torch.cat(list(other)).tolist() == epochs[2]


def test_batches_of_a_nested_batch_sampler() -> None:
    sampler = BatchSampler(SequentialSampler(range(10)), 4, False)
    loader = DataLoader(torch.arange(10), sampler=sampler, batch_size=None)
    mine = prepare_data_loader(loader, num_processes=2, process_index=1)
    assert [batch.tolist() for batch in mine] == [[4, 5, 6, 7], [2, 3, 4, 5]]
    assert [b.tolist() for b in skip_first_batches(mine, 1)] == [[2, 3, 4, 5]]
    single = prepare_data_loader(loader)
    assert [b.tolist() for b in skip_first_batches(single, 1)] == [[4, 5, 6, 7], [8, 9]]


def test_wrong_options_are_errors() -> None:
    with pytest.raises(DataError, match="put_on_device"):
        prepare_data_loader(DataLoader(range(4)), dispatch_batches=True)
    with pytest.raises(DataError, match=r"batch size \(3\).*round multiple of 2"):
        prepare_data_loader(DataLoader(range(4), batch_size=3), num_processes=2, split_batches=True)


def test_plain_loaders_skip_too() -> None:
    assert torch.cat(list(skip_first_batches(DataLoader(range(10), batch_size=4), 1))).tolist() == list(
        range(4, 10)
    )
    stream = DataLoader(_Stream(10), batch_size=4)
    skipped = skip_first_batches(stream, 2)
    assert torch.cat(list(skipped)).tolist() == [8, 9]
    assert torch.cat(list(skipped)).tolist() == [8, 9]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_is_saved_and_found_again(workers: int) -> None:
    torch.manual_seed(1)
    loader = prepare_data_loader(DataLoader(range(20), batch_size=3, shuffle=True, num_workers=workers))
    list(loader)
    seen, state = [], None
    for i, batch in enumerate(loader):
        seen.append(batch.tolist())
        if i == 2:
            state = loader.state_dict()
    following = torch.cat(list(loader)).tolist()
    assert state is not None
    torch.manual_seed(77)
    other = prepare_data_loader(DataLoader(range(20), batch_size=3, shuffle=True, num_workers=workers))
    other.load_state_dict(state)
    before = torch.get_rng_state()
    assert [batch.tolist() for batch in other] == seen[3:]
    assert other.iteration == 2
    assert len(following) == len(torch.cat(list(other)).tolist()) == 20
    assert not torch.equal(before, torch.get_rng_state())


def test_rounds_complete_the_last_batch_from_the_first() -> None:
    def rounds(sizes: list[int], world: int = 2, **options: Any) -> list[Any]:
        counter = iter(range(100))
        batches = iter([torch.tensor([next(counter) for _ in range(size)]) for size in sizes])
        options = {"split_batches": False, "drop_last": False, "slice_fn": slice_tensors, **options}
        reader = RoundReader(batches, world, **options)
        return [([p.tolist() for p in parts], last, samples) for parts, last, samples in reader]

    assert rounds([2, 2, 2, 1]) == [([[0, 1], [2, 3]], False, -1), ([[4, 5], [6, 0]], True, 3)]
    assert rounds([2, 2, 2]) == [([[0, 1], [2, 3]], False, -1), ([[4], [5]], True, 2)]
    assert rounds([2, 2, 1], drop_last=True) == [([[0, 1], [2, 3]], True, 4)]
    assert rounds([4, 4], split_batches=True) == [([[0, 1], [2, 3]], False, -1), ([[4, 5], [6, 7]], True, 4)]
    assert rounds([4, 3], split_batches=True)[1] == ([[4, 5], [6, 0]], True, 3)
    assert rounds([]) == []


def test_rounds_of_varying_length_go_whole() -> None:
    batches = iter([torch.zeros(2, 3), torch.zeros(2, 5), torch.zeros(1, 4)])
    reader = RoundReader(batches, 2, split_batches=False, drop_last=False, slice_fn=slice_tensors)
    shapes = [([tuple(p.shape) for p in parts], last) for parts, last, _ in reader]
    assert shapes == [([(2, 3), (2, 5)], False), ([(1, 4), (1, 4)], True)]
