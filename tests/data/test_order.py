"""Several ranks, simulated: threads of one process that run one at a time and talk over a board."""

import functools
import io
import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hotloop.errors import DataError

N = 23
Y = torch.arange(N)


class Drawn(Sampler):
    """Draws from the global stream, as custom samplers without a `generator` do."""

    def __iter__(self):
        return iter(torch.randperm(N).tolist())

    def __len__(self):
        return N


class Uneven(BatchSampler):
    """Batches of 1, 2, 3, 1, 2, 3, ... samples."""

    def __init__(self):
        self.sampler = Drawn()

    def __iter__(self):
        drawn = iter(self.sampler)
        for size in itertools.cycle([1, 2, 3]):
            batch = list(itertools.islice(drawn, size))
            if not batch:
                return
            yield batch

    def __len__(self):
        return 12


def shuffled(batch_size=4, **settings):
    return DataLoader(TensorDataset(Y), batch_size=batch_size, shuffle=True, **settings)


def steps_of(loader, limit=None):
    """(samples, batch_samples, global_samples, is_replay, at_last) for each step."""
    seen = []
    for (batch,) in loader:
        facts = (loader.batch_samples, loader.global_samples, loader.is_replay, loader.at_last)
        seen.append((batch.tolist(), *facts))
        if len(seen) == limit:
            break
    return seen


def global_order(results):
    """Samples in the order of the global stream; replays left out."""
    ordered = []
    for step in zip(*results, strict=True):
        for samples, _, _, replay, _ in step:
            ordered.extend([] if replay else samples)
    return ordered


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "source",
    [
        shuffled,
        functools.partial(shuffled, drop_last=True),
        functools.partial(shuffled, batch_size=1),
        lambda: DataLoader(TensorDataset(Y), batch_size=4, sampler=Drawn()),
        lambda: DataLoader(TensorDataset(Y), batch_sampler=Uneven()),
        lambda: DataLoader(TensorDataset(Y), batch_size=4),
    ],
    ids=["shuffle", "drop_last", "single", "own sampler", "own batches", "in order"],
)
def test_ranks_share_the_one_order_without_loss_or_padding(world, source, simulate, load):
    torch.manual_seed(5)
    alone = steps_of(load(source()))
    torch.manual_seed(5)
    results = simulate(world, lambda rank, make: steps_of(make(source())))
    assert global_order(results) == list(itertools.chain.from_iterable(s[0] for s in alone))
    count = -(-len(alone) // world)
    for rank, result in enumerate(results):
        assert len(result) == count
        for k, (samples, own, total, replay, last) in enumerate(result):
            group = alone[k * world : (k + 1) * world]
            assert total == sum(s[1] for s in group)
            assert last == (k == count - 1)
            assert replay == (rank >= len(group))
            if replay:
                assert own == 0
                assert samples == result[k - 1][0]
            else:
                assert samples == group[rank][0]
                assert own == len(samples)


def test_length_is_the_number_of_steps(simulate):
    def program(rank, make):
        loader = make(shuffled())
        return len(loader), len(list(loader))

    assert simulate(2, program) == [(3, 3)] * 2
    assert simulate(4, program) == [(2, 2)] * 4


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sharded_sampler_is_not_sharded_twice(shuffle, simulate):
    def program(rank, make):
        sampler = DistributedSampler(Y, num_replicas=2, rank=rank, shuffle=shuffle)
        loader = make(DataLoader(TensorDataset(Y), batch_size=4, sampler=sampler))
        found = [steps_of(loader) for _ in range(2)]
        return found, len(loader), list(sampler), loader.per_rank_state

    results = simulate(2, program)
    for found, length, own, per_rank in results:
        assert not per_rank
        for epoch in found:
            assert list(itertools.chain.from_iterable(s[0] for s in epoch)) == own
            assert [s[1:] for s in epoch] == [(4, 8, False, False), (4, 8, False, False), (4, 8, False, True)]
        assert length == 3
    assert set(results[0][2] + results[1][2]) == set(range(N))


def test_a_sharded_sampler_of_uneven_shares_does_not_hang(simulate):
    class Share(Sampler):
        def __init__(self, rank):
            self.rank, self.num_replicas = rank, 2

        def __iter__(self):
            return iter(range(9) if self.rank == 0 else range(9, 12))

        def __len__(self):
            return 9 if self.rank == 0 else 3

    def program(rank, make):
        return steps_of(make(DataLoader(TensorDataset(Y), batch_size=2, sampler=Share(rank))))

    first, second = simulate(2, program)
    assert [s[0] for s in first] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert [s[0] for s in second] == [[9, 10], [11], [11], [11], [11]]
    assert [s[1:] for s in second] == [
        (2, 4, False, False),
        (1, 3, False, False),
        (0, 2, True, False),
        (0, 2, True, False),
        (0, 1, True, True),
    ]


def test_a_sampler_sharded_for_others_is_an_error(simulate):
    def program(rank, make):
        sampler = DistributedSampler(Y, num_replicas=4, rank=3)
        return make(DataLoader(TensorDataset(Y), batch_size=2, sampler=sampler))

    for result in simulate(2, program):
        assert isinstance(result, DataError)
        assert "rank 3 of 4" in str(result)


def test_a_rank_that_never_had_a_batch_makes_all_raise_together(simulate):
    def program(rank, make):
        return steps_of(make(DataLoader(TensorDataset(Y[:5]), batch_size=4)))

    results = simulate(3, program)
    assert all(isinstance(result, DataError) for result in results)
    assert len({str(result) for result in results}) == 1
    assert "rank 2 of 3 never had a batch" in str(results[0])


def test_an_error_of_the_sampler_reaches_every_rank(simulate):
    class Failing:
        def __iter__(self):
            yield from ([0], [1], [2], [3], [4])
            raise OSError("gone")

        def __len__(self):
            return 9

    def program(rank, make):
        seen = []
        try:
            for (batch,) in make(DataLoader(TensorDataset(Y), batch_sampler=Failing())):
                seen.append(batch.item())
        except Exception as error:
            return seen, type(error), str(error)

    first, second = simulate(2, program)
    assert first == ([0, 2], OSError, "gone")
    assert second[:2] == ([1, 3], DataError)
    assert "rank 0" in second[2]


def test_custom_collate_leaves_the_global_count_open(simulate):
    def twice(rows):
        return [torch.stack([row[0] for row in rows for _ in range(2)])]

    def program(rank, make):
        return steps_of(make(DataLoader(TensorDataset(Y), batch_size=4, collate_fn=twice)))

    results = simulate(2, program)
    assert [s[1:3] for s in results[0]] == [(8, -1), (8, -1), (8, -1)]


def test_orders_longer_than_a_chunk(simulate, monkeypatch):
    monkeypatch.setattr("hotloop.data.order.CHUNK_STEPS", 3)
    torch.manual_seed(5)
    results = simulate(2, lambda rank, make: [steps_of(make(shuffled(1))) for _ in range(2)])
    for epoch in range(2):
        assert sorted(global_order([result[epoch] for result in results])) == list(range(N))
        assert [s[4] for s in results[0][epoch]] == [False] * 11 + [True]

    def program(rank, make):
        sampler = DistributedSampler(Y, num_replicas=2, rank=rank)
        return steps_of(make(DataLoader(TensorDataset(Y), batch_size=1, sampler=sampler)))

    results = simulate(2, program)
    assert [s[4] for s in results[0]] == [False] * 11 + [True]
    assert set(global_order(results)) == set(range(N))

    # the last chunk is exactly full
    results = simulate(2, lambda rank, make: steps_of(make(DataLoader(TensorDataset(Y[:12]), batch_size=1))))
    assert [s[4] for s in results[0]] == [False] * 5 + [True]


# --- another number of ranks ------------------------------------------------------------------------------


def stored(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2), (2, 4), (3, 2)])
@pytest.mark.parametrize("sampler", ["shuffle", "own"])
def test_resume_with_another_number_of_ranks_loses_and_repeats_nothing(
    before, after, sampler, simulate, load
):
    def source():
        if sampler == "own":
            return DataLoader(TensorDataset(Y), batch_size=2, sampler=Drawn())
        return shuffled(2)

    def start(rank, make):
        loader = make(source())
        steps_of(loader)
        it = iter(loader)
        head = []
        for _ in range(2):
            (batch,) = next(it)
            head.append((batch.tolist(), loader.batch_samples, -1, loader.is_replay, loader.at_last))
        return head, stored(loader.state_dict())

    def go_on(state, rank, make):
        loader = make(source())
        loader.load_state_dict(state)
        return steps_of(loader)

    def run(world, program):
        if world > 1:
            return simulate(world, program)
        return [program(0, load)]

    torch.manual_seed(3)
    loader = load(source())
    steps_of(loader)
    whole = [sample for step in steps_of(loader) for sample in step[0]]

    torch.manual_seed(3)
    begun = run(before, start)
    head = global_order([result[0] for result in begun])
    torch.manual_seed(1234)
    tail = global_order(run(after, functools.partial(go_on, begun[0][1])))
    assert head + tail == whole


def test_resume_at_a_tail_where_a_rank_is_dry(simulate):
    """After a restart there is nothing in memory to replay: another rank's batch stands in."""

    def begin(rank, make):
        loader = make(DataLoader(TensorDataset(Y[:6]), batch_size=2))
        it = iter(loader)
        next(it)
        return stored(loader.state_dict())

    states = simulate(2, begin)

    def go_on(rank, make):
        loader = make(DataLoader(TensorDataset(Y[:6]), batch_size=2))
        loader.load_state_dict(states[0])
        return steps_of(loader)

    first, second = simulate(2, go_on)
    assert first == [([4, 5], 2, 2, False, True)]
    assert second == [([4, 5], 0, 2, True, True)]


def test_sharded_sampler_resumes_with_another_number_of_ranks(simulate):
    def source(rank, world, batch_size):
        sampler = DistributedSampler(range(24), num_replicas=world, rank=rank, seed=1)
        return DataLoader(TensorDataset(torch.arange(24)), batch_size=batch_size, sampler=sampler)

    def begin(rank, make):
        loader = make(source(rank, 4, 2))
        it = iter(loader)
        head = next(it)[0].tolist()
        return head, stored(loader.state_dict())

    begun = simulate(4, begin)

    def go_on(rank, make):
        loader = make(source(rank, 2, 2))
        loader.load_state_dict(begun[0][1])
        return steps_of(loader)

    rest = global_order(simulate(2, go_on))
    seen = [sample for head, _ in begun for sample in head]
    assert sorted(seen + rest) == list(range(24))


# --- streams ----------------------------------------------------------------------------------------------


class Count(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Share(IterableDataset):
    hotloop_sharded = True

    def __init__(self, start, stop):
        self.start, self.stop = start, stop

    def __iter__(self):
        return iter(range(self.start, self.stop))


def stream_steps(loader, limit=None):
    seen = []
    for batch in loader:
        facts = (loader.batch_samples, loader.global_samples, loader.is_replay, loader.at_last)
        seen.append((batch.tolist(), *facts))
        if len(seen) == limit:
            break
    return seen


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("n", [23, 24, 17])
def test_streams_are_dealt_out_batch_by_batch(world, n, simulate):
    results = simulate(
        world, lambda rank, make: [stream_steps(make(DataLoader(Count(n), batch_size=2))) for _ in range(2)]
    )
    for epoch in range(2):
        found = [result[epoch] for result in results]
        assert global_order(found) == list(range(n))
        batches = -(-n // 2)
        count = -(-batches // world)
        for k, step in enumerate(zip(*found, strict=True)):
            total = sum(own for _, own, _, _, _ in step)
            assert all(s[2] == total for s in step)
            assert all(s[4] == (k == count - 1) for s in step)


def test_streams_of_any_length_end_together(simulate):
    """Each rank's own share: 3 batches here, 1 there, as variable-length streams are."""

    def program(rank, make):
        share = Share(0, 6) if rank == 0 else Share(6, 8)
        return stream_steps(make(DataLoader(share, batch_size=2)))

    first, second = simulate(2, program)
    assert [s[0] for s in first] == [[0, 1], [2, 3], [4, 5]]
    assert [s[0] for s in second] == [[6, 7]] * 3
    assert [s[1:] for s in second] == [(2, 4, False, False), (0, 2, True, False), (0, 2, True, True)]


def test_batches_of_varying_shape_in_a_stream(simulate):
    def program(rank, make):
        return [batch.shape for batch in make([torch.zeros(n, n + 1) for n in range(1, 6)])]

    first, second = simulate(2, program)
    assert first == [(1, 2), (3, 4), (5, 6)]
    assert second == [(2, 3), (4, 5), (4, 5)]


def test_an_empty_share_makes_all_raise_together(simulate):
    def program(rank, make):
        return stream_steps(make(DataLoader(Share(0, 4 * (1 - rank)), batch_size=2)))

    results = simulate(2, program)
    assert all(isinstance(result, DataError) for result in results)
    assert len({str(result) for result in results}) == 1
    assert simulate(2, lambda rank, make: stream_steps(make(DataLoader(Share(0, 0), batch_size=2)))) == [
        [],
        [],
    ]


def test_an_error_in_a_stream_reaches_every_rank(simulate):
    class Bad(IterableDataset):
        hotloop_sharded = True

        def __init__(self, rank):
            self.rank = rank

        def __iter__(self):
            yield 1
            if self.rank == 1:
                raise OSError("disk")
            yield 2
            yield 3

    def program(rank, make):
        return stream_steps(make(DataLoader(Bad(rank), batch_size=1)))

    first, second = simulate(2, program)
    assert isinstance(first, DataError)
    assert "rank 1" in str(first)
    assert isinstance(second, OSError)


def test_random_streams_are_common_to_the_ranks(simulate):
    class Noisy(IterableDataset):
        def __iter__(self):
            for _ in range(8):
                yield torch.rand(())

    def program(rank, make):
        return [batch.item() for batch in make(DataLoader(Noisy(), batch_size=1))]

    first, second = simulate(2, program)
    assert len({*first, *second}) == 8


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
def test_a_stream_resumes_with_another_number_of_ranks(before, after, simulate, load):
    def begin(rank, make):
        loader = make(DataLoader(Count(N), batch_size=2))
        it = iter(loader)
        for _ in range(2):
            next(it)
        return stored(loader.state_dict())

    def go_on(state, rank, make):
        loader = make(DataLoader(Count(N), batch_size=2))
        loader.load_state_dict(state)
        return stream_steps(loader)

    def run(world, program):
        return simulate(world, program) if world > 1 else [program(0, load)]

    state = run(before, begin)[0]
    assert global_order(run(after, functools.partial(go_on, state))) == list(range(2 * 2 * before, N))


def test_a_share_cannot_be_taken_up_by_another_number_of_ranks(simulate):
    def begin(rank, make):
        loader = make(DataLoader(Share(0, 8), batch_size=2))
        it = iter(loader)
        next(it)
        return stored(loader.state_dict())

    state = simulate(3, begin)[0]

    def go_on(rank, make):
        loader = make(DataLoader(Share(0, 8), batch_size=2))
        loader.load_state_dict(state)
        return stream_steps(loader)

    for result in simulate(2, go_on):
        assert isinstance(result, DataError)
        assert "shards itself" in str(result)


def test_skipping_on_several_ranks_keeps_the_rest_as_it_is(simulate):
    """9 samples, 2 ranks, 1 batch skipped: the rest is neither padded nor counted again."""

    def program(rank, make):
        loader = make(DataLoader(TensorDataset(Y[:9]), batch_size=2))
        return steps_of(loader.skip(1))

    results = simulate(2, program)
    assert global_order(results) == [4, 5, 6, 7, 8]

    def stream(rank, make):
        return stream_steps(make(DataLoader(Count(9), batch_size=2)).skip(1))

    assert global_order(simulate(2, stream)) == [4, 5, 6, 7, 8]


class Augmented(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor([index, torch.randint(1 << 30, ()).item()])


def test_random_augmentation_does_not_depend_on_the_number_of_ranks(simulate, load):
    def rows(loader):
        seen = []
        for batch in loader:
            seen.append((batch.tolist(), 0, 0, loader.is_replay, False))
        return seen

    torch.manual_seed(1)
    alone = global_order([rows(load(DataLoader(Augmented(), batch_size=2, shuffle=True)))])
    torch.manual_seed(1)
    both = simulate(2, lambda rank, make: rows(make(DataLoader(Augmented(), batch_size=2, shuffle=True))))
    assert global_order(both) == alone
