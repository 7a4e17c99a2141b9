import copy
import io
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hotloop.data import Loader
from hotloop.errors import DataError, PrepareError

N = 23
X = torch.arange(N * 3, dtype=torch.float32).reshape(N, 3)
Y = torch.arange(N)


class Rows(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"x": X[index], "name": f"row {index}"}


class ByList(BatchSampler):
    pass


class Reversed(torch.utils.data.Sampler):
    def __init__(self):
        self.rounds = 0

    def __iter__(self):
        self.rounds += 1
        return iter([*torch.randperm(N).tolist(), self.rounds])

    def __len__(self):
        return N + 1


class Count(IterableDataset):
    def __init__(self, n=N):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


def first(batch):
    return batch[:1]


SOURCES = {
    "shuffle": lambda: DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
    "drop_last": lambda: DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, drop_last=True),
    "plain": lambda: DataLoader(TensorDataset(X), batch_size=5),
    "generator": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "replacement": lambda: DataLoader(
        TensorDataset(Y),
        batch_size=4,
        sampler=RandomSampler(
            Y, replacement=True, num_samples=50, generator=torch.Generator().manual_seed(3)
        ),
    ),
    "weighted": lambda: DataLoader(
        TensorDataset(Y), batch_size=4, sampler=WeightedRandomSampler(torch.arange(1.0, N + 1), 40)
    ),
    "subset sampler": lambda: DataLoader(
        TensorDataset(Y), batch_size=2, sampler=SubsetRandomSampler(range(3, 9))
    ),
    "batch sampler": lambda: DataLoader(
        TensorDataset(X, Y), batch_sampler=ByList(RandomSampler(Y), 3, False)
    ),
    "list of batches": lambda: DataLoader(TensorDataset(Y), batch_sampler=[[3, 1], [2], [0, 4, -1]]),
    "own sampler": lambda: DataLoader(TensorDataset(X, Y), batch_size=4, sampler=Reversed()),
    "own dataset": lambda: DataLoader(Rows(), batch_size=4, shuffle=True),
    "own collate": lambda: DataLoader(Rows(), batch_size=4, shuffle=True, collate_fn=first),
    "no batches": lambda: DataLoader(TensorDataset(X, Y), batch_size=None, shuffle=True),
    "subset": lambda: DataLoader(
        Subset(Subset(TensorDataset(X, Y), [5, 2, 9, 14]), [3, 0, 1]), batch_size=2, shuffle=True
    ),
    "concat": lambda: DataLoader(ConcatDataset([TensorDataset(X), TensorDataset(-X)]), batch_size=4),
    "stack": lambda: DataLoader(StackDataset(a=TensorDataset(X), b=TensorDataset(Y)), batch_size=4),
    "iterable": lambda: DataLoader(Count(), batch_size=4),
    "iterable, drop_last": lambda: DataLoader(Count(), batch_size=4, drop_last=True),
    "iterable, no batches": lambda: DataLoader(Count(), batch_size=None),
    "list": lambda: [X[:4], X[4:8], X[8:]],
    "two workers": lambda: DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, num_workers=2),
    "lasting workers": lambda: DataLoader(
        Rows(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=1
    ),
    "iterable, worker": lambda: DataLoader(Count(), batch_size=4, num_workers=1),
}


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def flatten(batch):
    if isinstance(batch, torch.Tensor):
        return ["tensor", str(batch.dtype), tuple(batch.shape), batch.tolist()]
    if isinstance(batch, dict):
        return {key: flatten(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [type(batch).__name__, *map(flatten, batch)]
    return batch


def read(loader, epochs=2):
    return [[flatten(batch) for batch in loader] for _ in range(epochs)]


def streams():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("name", SOURCES)
def test_gives_what_the_source_gives_and_draws_what_it_draws(name, load):
    torch.manual_seed(7)
    wanted, after = read(SOURCES[name]()), streams()
    torch.manual_seed(7)
    loader = load(SOURCES[name]())
    assert read(loader) == wanted
    assert streams() == after
    assert loader.handed_out == sum(map(len, wanted))
    assert loader.epoch == 2


@pytest.mark.parametrize("name", SOURCES)
def test_knows_its_last_batch_its_length_and_its_samples(name, load):
    source = SOURCES[name]()
    loader = load(source)
    assert isinstance(loader, DataLoader) == isinstance(source, DataLoader)
    flags, sizes = [], []
    for batch in loader:
        assert loader.live
        flags.append(loader.at_last)
        sizes.append(loader.batch_samples)
        assert loader.global_samples == loader.batch_samples
        assert not loader.is_replay
        found = next(iter(batch.values())) if isinstance(batch, dict) else batch
        while isinstance(found, (list, tuple)) and found and isinstance(found[0], torch.Tensor):
            found = found[0]
        if name not in ("no batches", "iterable, no batches", "own collate"):
            assert sizes[-1] == len(found)
    assert flags == [False] * (len(flags) - 1) + [True]
    assert not loader.live
    assert loader.at_last
    if not name.startswith("iterable"):
        assert len(loader) == len(source) == len(flags)


def test_trains_to_the_same_weights_as_a_raw_loop():
    def train(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        loader = wrap(DataLoader(TensorDataset(X, Y.float()), batch_size=4, shuffle=True))
        for _ in range(3):
            for x, y in loader:
                loss = (model(x).squeeze(1) - y).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    from hotloop.hardware import Processes

    raw = train(lambda source: source)
    ours = train(lambda source: Loader(source, device=torch.device("cpu"), processes=Processes()))
    assert all(torch.equal(a, b) for a, b in zip(raw, ours, strict=True))


def test_stream_with_random_numbers_is_the_raw_one_between_dropouts(load):
    class Noise(IterableDataset):
        def __iter__(self):
            for _ in range(6):
                yield torch.rand(2)

    def run(wrap):
        torch.manual_seed(5)
        seen = []
        for batch in wrap(DataLoader(Noise(), batch_size=2)):
            seen.append((batch.tolist(), torch.rand(1).item()))
        return seen

    assert run(load) == run(lambda source: source)


def test_cpu_batches_are_the_source_s_own_objects(load):
    batches = [torch.ones(2), {"a": [torch.ones(1)]}, "text"]
    assert all(a is b for a, b in zip(load(batches), batches, strict=True))


def test_attributes_fall_through_to_the_source(load):
    source = SOURCES["shuffle"]()
    source.note = "mine"
    loader = load(source)
    for name in ("dataset", "batch_size", "sampler", "batch_sampler", "collate_fn", "num_workers", "note"):
        assert getattr(loader, name) is getattr(source, name)
    assert loader.drop_last is False
    assert loader.multiprocessing_context is None
    with pytest.raises(AttributeError):
        loader.nothing_of_that_name
    assert load(loader).source is source


def test_position_counts_over_epochs_and_an_abandoned_loop_disturbs_nothing(load):
    torch.manual_seed(2)
    raw = SOURCES["shuffle"]()
    wanted = []
    for batch in raw:
        wanted.append(flatten(batch))
        break
    wanted.extend(flatten(batch) for batch in raw)

    torch.manual_seed(2)
    loader = load(SOURCES["shuffle"]())
    seen = []
    for batch in loader:
        seen.append(flatten(batch))
        break
    assert not loader.live
    assert loader.handed_out == 1
    seen.extend(flatten(batch) for batch in loader)
    assert seen == wanted
    assert loader.handed_out == 7
    assert loader.at_last


def test_two_loops_at_once_over_one_loader(load):
    loader = load(DataLoader(TensorDataset(Y), batch_size=5))
    outer = iter(loader)
    one = next(outer)[0]
    inner = [batch[0].tolist() for batch in loader]
    assert joined(inner) == Y.tolist()
    assert not loader.live
    rest = [batch[0].tolist() for batch in outer]
    assert one.tolist() + joined(rest) == Y.tolist()
    assert loader.epoch == 1


def test_hook_runs_before_every_batch_and_may_end_the_loop(load):
    loader = load(DataLoader(TensorDataset(Y), batch_size=5))
    seen = []

    def hook():
        seen.append((loader.handed_out, loader.state_dict()["samples"]))
        if loader.handed_out == 3:
            raise SystemExit(7)

    loader.before_batch = hook
    with pytest.raises(SystemExit):
        for _ in loader:
            pass
    assert seen == [(0, 0), (1, 5), (2, 10), (3, 15)]
    assert not loader.live
    loader.before_batch = None
    assert next(iter(loader))[0].tolist() == [15, 16, 17, 18, 19]


def test_remembers_gradient_mode_and_indices(load):
    torch.manual_seed(0)
    loader = load(SOURCES["shuffle"]())
    for _, y in loader:
        assert loader.indices_of(loader.handed_out) == y.tolist()
        assert loader.with_grad
    with torch.no_grad():
        for _ in loader:
            assert not loader.with_grad
    assert loader.indices_of(1) is not None
    for _ in range(12):
        for _ in loader:
            pass
    assert loader.indices_of(1) is None
    assert loader.waited_s > 0


def test_set_epoch_reaches_samplers_and_datasets(load):
    class Epochal(Dataset):
        def __init__(self):
            self.epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index

    from torch.utils.data.distributed import DistributedSampler

    data = Epochal()
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
    loader = load(DataLoader(data, batch_size=2, sampler=sampler))
    loader.set_epoch(5)
    assert (data.epoch, sampler.epoch, loader.epoch) == (5, 5, 5)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(8)).tolist()
    assert torch.cat(list(loader)).tolist() == order

    class Whole:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            yield self.epoch

    whole = load(Whole())
    whole.set_epoch(3)
    assert list(whole) == [3]


def test_functions_iterators_and_what_cannot_be_looped_over(load):
    assert list(load(lambda: (i for i in range(3)))) == [0, 1, 2]
    loader = load(i for i in range(5))
    it = iter(loader)
    assert [next(it), loader.at_last] == [0, False]
    it.close()
    assert list(loader) == [1, 2, 3, 4]
    with pytest.raises(DataError, match="looped over once"):
        iter(loader)
    with pytest.raises(PrepareError, match="int"):
        load(3)


def test_errors_of_the_dataset_come_through_as_they_are(load):
    class Broken(Rows):
        def __getitem__(self, index):
            if index == 9:
                raise KeyError("row nine")
            return X[index]

    for workers in (0, 1):
        loader = load(DataLoader(Broken(), batch_size=4, num_workers=workers))
        seen = []
        with pytest.raises(KeyError, match="row nine"):
            for batch in loader:
                seen.append(batch)
        assert len(seen) == 2
        assert not loader.live

    with pytest.raises(IndexError, match="out of bounds for dimension 0 with size 23"):
        list(load(DataLoader(TensorDataset(Y), batch_sampler=[[1, 2], [40]])))


def test_error_of_the_sampler_comes_in_its_turn(load):
    def batches():
        yield [0, 1]
        yield [2]
        raise OSError("no more")

    class Sampler:
        def __iter__(self):
            return batches()

    for workers in (0, 1):
        loader = load(DataLoader(TensorDataset(Y), batch_sampler=Sampler(), num_workers=workers))
        seen = []
        with pytest.raises(OSError, match="no more"):
            for (batch,) in loader:
                seen.append((batch.tolist(), loader.at_last))
        assert seen == [([0, 1], False), ([2], False)]


def test_a_sampler_is_not_read_ahead_unless_asked(load):
    """A sampler that reacts to training sees every step before it draws the next batch."""
    drawn = []

    class Adaptive:
        def __iter__(self):
            for i in range(4):
                drawn.append(i)
                yield [i]

    loader = load(DataLoader(TensorDataset(Y), batch_sampler=Adaptive()))
    for number, _ in enumerate(loader):
        assert len(drawn) == number + 1
    for _ in loader:
        last = loader.at_last
    assert last
    assert drawn == [0, 1, 2, 3] * 2


def test_batches_may_be_skipped_for_one_epoch(load):
    for source in (
        DataLoader(TensorDataset(Y), batch_size=4, drop_last=True),
        DataLoader(Count(), batch_size=4, drop_last=True),
    ):
        loader = load(source)
        whole = [flatten(batch) for batch in loader]
        assert loader.skip(3) is loader
        assert [flatten(batch) for batch in loader] == whole[3:]
        assert [flatten(batch) for batch in loader] == whole
        loader.skip(3)
        next(iter(loader))
        loader.skip(2)
        assert loader.skip(99) is loader
        assert list(loader) == []


def test_skipping_reads_no_data(load):
    read_rows = []

    class Counting(Rows):
        def __getitem__(self, index):
            read_rows.append(index)
            return index

    loader = load(DataLoader(Counting(), batch_size=4))
    list(loader.skip(5))
    assert read_rows == [20, 21, 22]


# --- resume -----------------------------------------------------------------------------------------------


class Private(torch.utils.data.Sampler):
    """Draws from a generator of its own, and differently each time."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.count = 0

    def __iter__(self):
        self.count += 1
        return iter([*self.rng.permutation(N).tolist(), self.count])

    def __len__(self):
        return N + 1


class Unforeseeable(torch.utils.data.Sampler):
    """Its order cannot be drawn again from anything."""

    def __iter__(self):
        return iter(np.random.default_rng().permutation(N).tolist())

    def __len__(self):
        return N


class Endless:
    def __iter__(self):
        while True:
            yield from torch.randperm(N).split(4)


class Stateful(torch.utils.data.Sampler):
    def __init__(self):
        self.shift = [0]

    def __iter__(self):
        self.shift = [self.shift[0] + 1]
        return iter([(i + self.shift[0]) % N for i in range(N)])

    def __len__(self):
        return N

    def state_dict(self):
        return {"shift": self.shift[0]}

    def load_state_dict(self, state):
        self.shift = [state["shift"]]


class Augmented(Rows):
    def __getitem__(self, index):
        noise = [random.random(), float(np.random.normal()), float(torch.rand(()))]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


class Position(IterableDataset):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < N:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Shuffled(IterableDataset):
    def __iter__(self):
        return iter(torch.randperm(N).tolist())


RESUMED = {
    **{k: v for k, v in SOURCES.items() if "worker" not in k},
    "private": lambda: DataLoader(TensorDataset(Y), batch_size=4, sampler=Private()),
    "stateful sampler": lambda: DataLoader(TensorDataset(Y), batch_size=4, sampler=Stateful()),
    "augmented": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "position": lambda: DataLoader(Position(), batch_size=4),
    "position, singly": lambda: DataLoader(Position(), batch_size=None),
    "shuffled stream": lambda: DataLoader(Shuffled(), batch_size=4),
}
WITH_WORKERS = {
    "workers": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2),
    "lasting": lambda: DataLoader(
        Augmented(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stream workers": lambda: DataLoader(Shuffled(), batch_size=4, num_workers=1),
    "stream lasting": lambda: DataLoader(Shuffled(), batch_size=4, num_workers=1, persistent_workers=True),
}


def store(state):
    """Through a file, as a checkpoint would, loading no code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def global_streams():
    from hotloop.seeds import rng_state

    return rng_state()


def run_from(loader, start, limit, epochs, look):
    """Steps from `start` on: (batch, number drawn by the script); stops after `limit` batches in all."""
    seen = []
    at = start
    for _ in range(epochs):
        for batch in loader:
            at += 1
            looked = loader.at_last if look else None
            seen.append((flatten(batch), looked, torch.rand(1).item(), random.random()))
            if at == limit:
                return seen, (loader.state_dict(), global_streams())
    return seen, None


def check_resume(source, cuts, load, look, epochs=3):
    from hotloop.seeds import seed_everything, set_rng_state

    seed_everything(11)
    whole, _ = run_from(load(source()), 0, None, epochs, look)
    seed_everything(11)
    loader, seen = load(source()), []
    for cut in cuts:
        part, (state, rng) = run_from(loader, len(seen), cut, epochs, look)
        seen += part
        loader = load(source())
        torch.manual_seed(99)
        torch.rand(5)
        set_rng_state(store(rng))
        loader.load_state_dict(store(state))
        epoch = loader.epoch
        assert epoch == state["epoch"]
    part, _ = run_from(loader, len(seen), None, epochs - loader.epoch, look)
    assert seen + part == whole


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("name", RESUMED)
def test_three_resumes_give_the_unbroken_run(name, look, load):
    per_epoch = sum(1 for _ in load(RESUMED[name]()))
    cuts = [max(per_epoch // 2, 1), per_epoch + 1, 2 * per_epoch]
    check_resume(RESUMED[name], cuts, load, look)


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_resumes_with_workers_give_the_unbroken_run(name, load):
    check_resume(WITH_WORKERS[name], [2, 8], load, look=True)


def test_resume_between_epochs_continues_the_order(load):
    for name in ("shuffle", "generator", "private", "augmented"):
        source = RESUMED[name]
        torch.manual_seed(4)
        loader = load(source())
        read(loader, 1)
        state, rng = store(loader.state_dict()), global_streams()
        wanted = read(loader, 2)
        from hotloop.seeds import set_rng_state

        set_rng_state(rng)
        again = load(source())
        again.load_state_dict(state)
        assert again.epoch == 1
        assert read(again, 2) == wanted


def test_an_order_that_cannot_be_drawn_again_is_kept_whole(load):
    loader = load(DataLoader(TensorDataset(Y), batch_size=4, sampler=Unforeseeable()))
    it = iter(loader)
    head = [next(it)[0].tolist() for _ in range(2)]
    state = store(loader.state_dict())
    tail = [batch[0].tolist() for batch in it]
    assert sorted(joined(head + tail)) == Y.tolist()
    again = load(DataLoader(TensorDataset(Y), batch_size=4, sampler=Unforeseeable()))
    again.load_state_dict(state)
    it = iter(again)
    assert next(it)[0].tolist() == tail[0]
    state = store(again.state_dict())
    third = load(DataLoader(TensorDataset(Y), batch_size=4, sampler=Unforeseeable()))
    third.load_state_dict(state)
    assert [batch[0].tolist() for batch in third] == tail[1:]
    assert len(list(third)) == 6


def test_an_endless_sampler_works_and_resumes(load):
    source = lambda: DataLoader(TensorDataset(Y), batch_sampler=Endless())  # noqa: E731
    torch.manual_seed(1)
    loader = load(source())
    head = [b[0].tolist() for b in itertools.islice(loader, 9)]
    torch.manual_seed(1)
    loader = load(source())
    it = iter(loader)
    assert [next(it)[0].tolist() for _ in range(7)] == head[:7]
    state = store(loader.state_dict())
    again = load(source())
    again.load_state_dict(state)
    it = iter(again)
    assert [next(it)[0].tolist() for _ in range(1)] == head[7:8]


def test_resume_with_another_batch_size_keeps_the_order_of_samples(load):
    torch.manual_seed(3)
    loader = load(DataLoader(TensorDataset(Y), batch_size=4, shuffle=True))
    it = iter(loader)
    head = [next(it)[0].tolist() for _ in range(2)]
    state = loader.state_dict()
    tail = joined(b[0].tolist() for b in it)
    again = load(DataLoader(TensorDataset(Y), batch_size=6, shuffle=True))
    again.load_state_dict(state)
    got = [b[0].tolist() for b in again]
    assert [len(b) for b in got] == [6, 6, 3]
    assert joined(got) == tail
    assert len(joined(head)) + len(tail) == N


def test_saved_state_is_kept_until_it_is_taken_up(load):
    loader = load(SOURCES["shuffle"]())
    it = iter(loader)
    next(it)
    state = loader.state_dict()
    again = load(SOURCES["shuffle"]())
    again.load_state_dict(state)
    assert again.state_dict() is state
    again.set_epoch(0)
    assert again.state_dict() is state
    again.set_epoch(1)
    assert not again.state_dict()["open"]


def test_states_of_other_things_are_refused(load):
    loader = load([1, 2])
    with pytest.raises(DataError, match="version None"):
        loader.load_state_dict({"epoch": 1})
    with pytest.raises(DataError, match="MapFeed"):
        loader.load_state_dict(load(SOURCES["plain"]()).state_dict())


def test_state_is_small(load):
    loader = load(DataLoader(TensorDataset(torch.arange(100_000)), batch_size=10, shuffle=True))
    it = iter(loader)
    next(it)
    buffer = io.BytesIO()
    torch.save(loader.state_dict(), buffer)
    assert buffer.tell() < 20_000


def test_a_copy_of_a_loader_s_attributes_does_not_recurse(load):
    loader = load([1])
    bare = object.__new__(Loader)
    with pytest.raises(AttributeError):
        bare.anything
    assert copy.copy(loader).source == [1]
