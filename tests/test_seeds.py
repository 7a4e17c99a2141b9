"""Seeds: the calls a careful script makes, streams derived from one number, states that go and come back."""

import hashlib
import io
import random

import numpy as np
import pytest
import torch

import hotloop
from hotloop.seeds import derive_seed, rng_state, seed_everything, set_rng_state


def draw():
    return random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist(), torch.randn(1).item()


def test_seeding_is_the_three_calls():
    seed_everything(2**33 + 5)
    ours = draw()
    random.seed(2**33 + 5)
    np.random.seed(5)
    torch.manual_seed(2**33 + 5)
    assert draw() == ours


def test_state_comes_back_also_through_a_file_without_code():
    seed_everything(3)
    np.random.randn()  # leaves a second normal value cached
    buffer = io.BytesIO()
    torch.save(rng_state(), buffer)
    expected = draw()
    draw()
    buffer.seek(0)
    set_rng_state(torch.load(buffer, weights_only=True))
    assert draw() == expected


def test_derived_seeds_are_fixed_for_ever():
    assert derive_seed(0, "epoch", 1) == derive_seed(0, "epoch", 1)
    seeds = {derive_seed(s, *keys) for s in range(4) for keys in [(), ("a",), ("a", 1), ("a", "1"), (1,)]}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    # blake2b of "(0, 'epoch', 1)", 8 bytes little-endian, without the lowest bit
    digest = hashlib.blake2b(b"(0, 'epoch', 1)", digest_size=8).digest()
    assert derive_seed(0, "epoch", 1) == int.from_bytes(digest, "little") // 2


@pytest.mark.parametrize("seed", [None, 11])
def test_a_loop_seeds_only_when_asked(seed):
    seed_everything(1)
    expected = draw()
    seed_everything(1)
    hotloop.Loop(record=False, device="cpu", seed=seed).end_training()
    drawn = draw()
    assert (drawn == expected) is (seed is None)
    seed_everything(11)
    assert (draw() == drawn) is (seed == 11)
