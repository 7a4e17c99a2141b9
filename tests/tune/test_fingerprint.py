"""Marks of samples, weights and gradients: what they depend on, and what not."""

from __future__ import annotations

import torch
from torch import nn

from hotloop.tune.fingerprint import hash_samples, hash_tensors, mark_weights, sample_gradients


def test_samples_are_known_whatever_batch_they_come_in() -> None:
    x, y = torch.randn(8, 3, 4, 4), torch.arange(8)
    whole = hash_samples([x, y])
    halves = torch.cat([hash_samples((x[:3], y[:3])), hash_samples((x[3:], y[3:]))])
    assert torch.equal(whole, halves)
    laid_out = x.to(memory_format=torch.channels_last)
    assert torch.equal(whole, hash_samples({"x": laid_out, "y": y}))


def test_any_change_of_a_sample_changes_its_number_alone() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        x = (torch.arange(24).reshape(4, 6) % 7).to(dtype)
        y = x.clone()
        y[2, 1] = 1 - y[2, 1].to(torch.int64) if dtype is torch.bool else y[2, 1] + 1
        different = hash_samples(x) != hash_samples(y)
        assert different.tolist() == [False, False, True, False]
    swapped = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0]])
    assert hash_samples(swapped[0]) != hash_samples(swapped[1])


def test_what_has_no_samples_has_no_numbers() -> None:
    assert hash_samples({"a": 1, "b": torch.tensor(2.0)}) is None


def test_weights_are_marked_and_hashed() -> None:
    model = nn.Linear(3, 3)
    parameters = [p.detach() for p in model.parameters()]
    before, digest = mark_weights(parameters), hash_tensors(parameters)
    assert mark_weights(parameters) == before
    with torch.no_grad():
        model.bias[1] += 1e-3
    assert mark_weights(parameters) != before
    assert hash_tensors(parameters) != digest


def test_gradients_are_thinned_out_evenly() -> None:
    small, large = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1 << 21))
    small.grad = torch.tensor([1.0, 2.0, 3.0])
    assert sample_gradients([small]).tolist() == [1.0, 2.0, 3.0]
    large.grad = torch.arange(1 << 21, dtype=torch.float32)
    sampled = sample_gradients([large])
    assert sampled.numel() == 1 << 20
    assert sampled[1] == 2.0
    assert sample_gradients([nn.Parameter(torch.zeros(2))]).numel() == 0
