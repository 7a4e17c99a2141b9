"""Batches: parts for a cache give the same bits, refused coefficients change nothing, copies keep layouts."""

import pytest
import torch
from torch import nn

from hotloop.optim import SGD, AdamW
from hotloop.optim.batch import Batch, Refusal


def make_batch(*shapes, dtype=torch.float32, refuse=None, scale=None):
    weights = [torch.randn(shape, dtype=dtype) for shape in shapes]
    batch = Batch(torch.zeros(()), *Refusal(refuse, scale).on(torch.device("cpu")))
    batch.weights, batch.parameters = weights, list(weights)
    batch.gradients = [torch.randn_like(w) for w in weights]
    batch.state = {"sum": [torch.zeros_like(w) for w in weights]}
    return batch


def test_parts_hold_every_tensor_once_in_order():
    batch = make_batch((40000,), (30000,), (3,), (200000,), (1,), (65536,))
    parts = list(batch.pieces())
    assert [len(part.weights) for part in parts] == [1, 2, 1, 1, 1]
    for name in ("weights", "gradients", "parameters"):
        listed = [t for part in parts for t in getattr(part, name)]
        assert all(a is b for a, b in zip(listed, getattr(batch, name), strict=True))
    assert all(part.step is batch.step for part in parts)
    small = make_batch((3,), (4,))
    assert list(small.pieces()) == [small]


@pytest.mark.parametrize("ours", [AdamW, SGD])
def test_large_tensors_take_torchs_trajectory_to_the_bit(ours):
    theirs = getattr(torch.optim, ours.__name__)
    settings = {"lr": 0.01, "weight_decay": 0.1} | ({"momentum": 0.9} if ours is SGD else {})
    results = []
    for make in (ours, theirs):
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(n, generator=generator)) for n in (70000, 100, 50000, 30000)]
        optimizer = make(weights, **settings)
        for _ in range(4):
            for w in weights:
                w.grad = torch.randn(w.shape, generator=generator)
            optimizer.step()
        results.append([w.detach() for w in weights])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.3, torch.tensor(0.3, dtype=torch.float64)])
@pytest.mark.parametrize("idle", [0.0, 1.0])
def test_coefficients_of_made_and_refused_updates(dtype, value, idle):
    for refused in (0.0, 1.0):
        batch = make_batch((2,), dtype=dtype, refuse=torch.tensor(refused))
        found = batch.gate(value, idle)
        expected = torch.tensor(idle if refused else 0.3, dtype=torch.float64)
        torch.testing.assert_close(
            found.double(), expected, rtol=1e-7 if dtype == torch.float32 else 0, atol=0
        )
    assert make_batch((2,)).gate(value, idle) is value


def test_gradients_are_made_true_beside_the_originals():
    batch = make_batch((4, 3, 2, 2), (5,), refuse=torch.tensor(0.0), scale=torch.tensor(8.0))
    batch.weights[0] = batch.weights[0].contiguous(memory_format=torch.channels_last)
    before = [g.clone() for g in batch.gradients]
    ready = batch.true_gradients(maximize=True)
    for r, g, w in zip(ready, before, batch.weights, strict=True):
        assert torch.equal(r, -g / 8.0)
        assert r.stride() == w.stride()
    assert all(torch.equal(a, b) for a, b in zip(batch.gradients, before, strict=True))
    refused = make_batch((5,), refuse=torch.tensor(1.0))
    refused.gradients[0].fill_(float("nan"))
    assert torch.equal(refused.true_gradients()[0], torch.zeros(5))


def test_what_a_kernel_multiplies_gradients_by():
    assert make_batch((2,)).factor() is None
    assert make_batch((2,)).factor(maximize=True) == -1.0
    scaled = make_batch((2,), scale=torch.tensor(4.0))
    assert scaled.factor() == 0.25
    assert scaled.factor(maximize=True) == -0.25
