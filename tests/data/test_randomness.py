import io
import random

import numpy as np
import pytest
import torch

from hotloop.data.randomness import FetchStreams, GlobalStreams, batch_seed, plain, seed_streams, unplain


def drawn():
    return random.random(), np.random.random(), np.random.normal(), torch.rand(2).tolist()


def test_batch_seeds_do_not_collide():
    seeds = {batch_seed(base, ordinal) for base in range(50) for ordinal in range(-1, 200)}
    assert len(seeds) == 50 * 201
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert batch_seed(2**63 - 1, 10**9) != batch_seed(2**63 - 2, 10**9)


def test_streams_are_even():
    """The first number of each batch's stream is uniform: mean 1/2, variance 1/12, over 4,000 batches."""
    first = []
    for ordinal in range(4000):
        seed_streams(batch_seed(7, ordinal))
        first.append((random.random(), np.random.random(), torch.rand(()).item()))
    table = torch.tensor(first, dtype=torch.float64)
    assert torch.allclose(table.mean(0), torch.tensor(0.5, dtype=torch.float64), atol=0.02)
    assert torch.allclose(table.var(0), torch.tensor(1 / 12, dtype=torch.float64), atol=0.005)
    assert torch.corrcoef(table.T).fill_diagonal_(0).abs().max() < 0.08


def test_a_fetch_runs_under_its_seed_and_leaves_nothing_behind():
    streams = FetchStreams()
    seed_streams(5)
    wanted = drawn()
    np.random.seed(3)
    np.random.normal()
    state = GlobalStreams()
    before = [drawn() for _ in range(3)]
    state.put_back()
    after = []
    for _ in range(3):
        assert streams.run(5, drawn) == wanted
        after.append(drawn())
        with pytest.raises(KeyError):
            streams.run(5, {}.__getitem__, "nothing")
    assert after == before


def test_own_generators_of_numpy_are_put_back_too():
    ours = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(4))
        wanted = np.random.random(3).tolist()
        np.random.set_bit_generator(np.random.PCG64(4))
        streams, got = FetchStreams(), []
        for _ in range(3):
            got.append(np.random.random())
            streams.run(9, drawn)
        assert got == wanted
    finally:
        np.random.set_bit_generator(ours)


def test_global_streams_through_a_file_and_for_a_while():
    state = GlobalStreams()
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    wanted = drawn()
    outside = GlobalStreams()
    following = drawn()
    outside.put_back()
    buffer.seek(0)
    with GlobalStreams.from_state_dict(torch.load(buffer, weights_only=True)).in_force():
        assert drawn() == wanted
    assert drawn() == following
    partial = GlobalStreams(torch_only=True)
    random_before = random.getstate()
    with partial.in_force():
        torch.rand(3)
        random.random()
    assert random.getstate() != random_before


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_states_of_numpy_generators_are_kept_exactly(kind):
    generator = np.random.Generator(getattr(np.random, kind)(3))
    generator.random(5)
    buffer = io.BytesIO()
    torch.save(plain(generator.bit_generator.state), buffer)
    buffer.seek(0)
    wanted = generator.random(5).tolist()
    again = np.random.Generator(getattr(np.random, kind)(0))
    again.bit_generator.state = unplain(torch.load(buffer, weights_only=True))
    assert again.random(5).tolist() == wanted
