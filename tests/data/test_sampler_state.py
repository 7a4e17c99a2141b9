import io
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hotloop.data.sampler_state import SamplerState

DATA = TensorDataset(torch.arange(10))


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Own:
    """Generators of every kind, a counter that moves and settings that do not."""

    def __init__(self, rank=0):
        self.rank = rank
        self.batch = 4
        self.seen = 0
        self.a = torch.Generator().manual_seed(1)
        self.b = np.random.default_rng(1)
        self.c = np.random.RandomState(1)
        self.d = random.Random(1)

    def __iter__(self):
        self.seen += 1
        drawn = [torch.rand(1, generator=self.a).item(), self.b.random(), self.c.normal(), self.d.random()]
        return iter([int(1e6 * value) % 10 for value in drawn] + [self.seen])


def test_generators_and_what_moved_are_kept_and_settings_are_not():
    source = DataLoader(DATA, 2, sampler=Own())
    memory = SamplerState(source)
    assert not memory.built_in
    assert not memory.stateful
    list(source.sampler)
    state = through_a_file(memory.take())
    wanted = [list(source.sampler) for _ in range(3)]
    other = DataLoader(DATA, 2, sampler=Own(rank=3))
    other.sampler.batch = 9
    SamplerState(other).put(state)
    assert [list(other.sampler) for _ in range(3)] == wanted
    assert (other.sampler.rank, other.sampler.batch) == (3, 9)


def test_torch_s_own_samplers_keep_their_generators_alone():
    generator = torch.Generator().manual_seed(2)
    source = DataLoader(DATA, 2, shuffle=True, generator=generator)
    memory = SamplerState(source)
    assert memory.built_in
    state = through_a_file(memory.take())
    wanted = list(source.sampler)
    other = DataLoader(DATA, 5, shuffle=True, generator=torch.Generator())
    SamplerState(other).put(state)
    assert list(other.sampler) == wanted
    assert other.batch_size == other.batch_sampler.batch_size == 5
    nested = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=generator), 2, False))
    assert SamplerState(nested).built_in
    assert "batch_sampler.sampler" in SamplerState(nested).take()


def test_a_distributed_sampler_keeps_its_epoch_not_its_rank():
    source = DataLoader(DATA, 2, sampler=DistributedSampler(DATA, num_replicas=2, rank=0))
    memory = SamplerState(source)
    source.sampler.set_epoch(4)
    other = DataLoader(DATA, 2, sampler=DistributedSampler(DATA, num_replicas=3, rank=2))
    SamplerState(other).put(through_a_file(memory.take()))
    assert (other.sampler.epoch, other.sampler.rank, other.sampler.num_replicas) == (4, 2, 3)


@pytest.mark.parametrize("source", [[1, 2], DataLoader(DATA, batch_sampler=[[1], [2]]), object()], ids=str)
def test_sources_without_samplers_have_nothing_to_keep(source):
    memory = SamplerState(source)
    assert memory.take() == {}
    memory.put({})
