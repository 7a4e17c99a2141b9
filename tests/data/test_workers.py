import gc
import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

N = 14


class Draws(Dataset):
    """Rows of (index, python's, numpy's, torch's random number)."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        drawn = [random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


def jitter(rows):
    """A collate that draws too."""
    return torch.stack(rows) + random.random() + np.random.normal() + torch.randn(()).item()


def epochs(loader, count=3):
    return [torch.cat(list(loader)) for _ in range(count)]


@pytest.mark.parametrize("collate", [None, jitter], ids=["default", "own"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_number_of_workers_does_not_change_the_data(collate, shuffle, load):
    found = []
    for workers in (0, 1, 2):
        torch.manual_seed(3)
        source = DataLoader(Draws(), 4, shuffle=shuffle, num_workers=workers, collate_fn=collate)
        found.append(epochs(load(source), 2))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("settings", [{}, {"persistent_workers": True}], ids=["fresh", "lasting"])
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_differ_between_epochs_batches_and_workers(workers, settings, load):
    if workers == 0 and settings:
        pytest.skip("no workers to keep")
    found = torch.stack(epochs(load(DataLoader(Draws(), 4, num_workers=workers, **settings))))
    for column in (1, 2, 3):
        assert found[:, :, column].unique().numel() == 3 * N


def test_the_main_process_keeps_its_own_streams(load):
    np.random.normal()  # leaves a cached second value behind
    before = (random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state())
    generator = np.random.get_bit_generator()
    loader = load(DataLoader(Draws(), 4, collate_fn=jitter))
    after = []
    for number, _ in enumerate(loader):
        if number:
            continue
        torch.set_rng_state(torch.get_rng_state())
        after = [random.getstate(), np.random.get_state(legacy=False)]
    assert after[0] == before[0]
    for state in (after[1], np.random.get_state(legacy=False)):
        assert np.array_equal(state["state"]["key"], before[1]["state"]["key"])
        assert (state["state"]["pos"], state["has_gauss"], state["gauss"]) == (
            before[1]["state"]["pos"],
            1,
            before[1]["gauss"],
        )
    assert np.random.get_bit_generator() is generator
    torch.set_rng_state(before[2])
    torch.empty((), dtype=torch.int64).random_()  # the base seed, as torch's loader draws it
    wanted = torch.get_rng_state()
    torch.set_rng_state(before[2])
    list(load(DataLoader(Draws(), 4)))
    assert torch.equal(torch.get_rng_state(), wanted)


def test_cached_normal_values_survive_between_batches(load):
    np.random.seed(5)
    wanted = [np.random.normal() for _ in range(5)]
    np.random.seed(5)
    got = [np.random.normal() for _ in load(DataLoader(Draws(), 4))]
    assert got == wanted[: len(got)]
    assert len(got) == 4


class Informed(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = get_worker_info()
        return [index, info.id, info.num_workers, info.seed, isinstance(info.dataset, Informed), self.mark]


def note(worker):
    get_worker_info().dataset.mark = torch.initial_seed()


def test_worker_functions_see_what_torch_s_loader_shows_them(load):
    def rows(wrap):
        torch.manual_seed(0)
        source = DataLoader(
            Informed(), 2, num_workers=2, worker_init_fn=note, collate_fn=list, timeout=60, prefetch_factor=1
        )
        return [row for batch in wrap(source) for row in batch]

    assert rows(load) == rows(lambda source: source)


def test_other_start_methods(load):
    source = DataLoader(Draws(), 4, num_workers=1, multiprocessing_context="spawn")
    torch.manual_seed(3)
    spawned = torch.cat(list(load(source)))
    torch.manual_seed(3)
    assert torch.equal(spawned, torch.cat(list(load(DataLoader(Draws(), 4)))))


def test_lasting_workers_stay_and_others_go(load):
    class Pid(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            import os

            return os.getpid()

    lasting = load(DataLoader(Pid(), 1, num_workers=1, persistent_workers=True))
    first = {pid.item() for pid in lasting}
    for _ in lasting:
        break
    assert {pid.item() for pid in lasting} == first
    fresh = load(DataLoader(Pid(), 1, num_workers=1))
    assert {pid.item() for pid in fresh}.isdisjoint({pid.item() for pid in fresh})


def test_a_second_loop_takes_lasting_workers_and_the_first_says_so(load):
    from hotloop.errors import DataError

    loader = load(DataLoader(Draws(), 4, num_workers=1, persistent_workers=True))
    outer = iter(loader)
    next(outer)
    assert len(list(loader)) == 4
    with pytest.raises(DataError, match="persistent workers"):
        next(outer)


def test_two_loops_with_workers_at_once(load):
    loader = load(DataLoader(Draws(), 4, num_workers=1))
    outer = iter(loader)
    head = next(outer)[:, 0].tolist()
    assert torch.cat(list(loader))[:, 0].tolist() == list(range(N))
    assert head + torch.cat(list(outer))[:, 0].tolist() == list(range(N))


def test_set_epoch_reaches_the_copies_in_lasting_workers(load):
    class Epochal(Dataset):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.epoch

    loader = load(DataLoader(Epochal(), 2, num_workers=1, persistent_workers=True))
    for epoch in (0, 4):
        loader.set_epoch(epoch)
        assert torch.cat(list(loader)).tolist() == [epoch] * 4


class Noise(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for _ in range(3):
            yield torch.tensor([info.id, random.random(), np.random.random(), torch.rand(()).item()])


def test_streams_in_workers_differ_between_epochs_and_workers_and_are_torch_s_at_first(load):
    for settings in ({}, {"persistent_workers": True}):

        def source(settings=settings):
            return DataLoader(Noise(), None, num_workers=2, **settings)

        torch.manual_seed(2)
        found = [torch.stack(list(loader)) for loader in [load(source())] * 3]
        for column in (1, 2, 3):
            assert torch.stack(found)[:, :, column].unique().numel() == 18
        torch.manual_seed(2)
        assert torch.equal(found[0], torch.stack(list(source())))


class Failing(Draws):
    def __getitem__(self, index):
        if index == 5:
            raise OSError("a bad sector")
        return super().__getitem__(index)


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(12))


@pytest.mark.parametrize("source", ["map", "stream", "failing"])
@pytest.mark.parametrize("taken", [1, 5, 6])
def test_workers_end_with_the_loop_that_is_left(source, taken, load):
    """At once, not when the collector comes by: torch then waits seconds for each of them."""
    made = {"map": Draws, "stream": Counting, "failing": Failing}[source]()
    loader = load(DataLoader(made, 2, num_workers=2))
    gc.collect()
    gc.disable()
    kept = None
    try:
        it = iter(loader)
        try:
            for _ in range(taken):
                next(it)
        except OSError as error:
            kept = error  # and with it all frames that it came through
        if kept is None:
            assert len(multiprocessing.active_children()) == 2
        del it
        assert multiprocessing.active_children() == []
        assert (kept is not None) == (source == "failing" and taken > 1)
    finally:
        gc.enable()
