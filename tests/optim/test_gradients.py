"""Norm and clip factor are torch's, to the bit; odd gradients give their numbers."""

import pytest
import torch

from hotloop.optim import as_real_dense, clip_coefficient, gradients_of, total_norm


def parameters():
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape)) for shape in [(3, 4), (7,), ()]]
    for p in made:
        p.grad = torch.randn_like(p)
    return [*made, torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_norm_and_clipping_are_torchs(norm_type, max_norm):
    ours, theirs = parameters(), parameters()
    gradients = gradients_of(ours)
    assert len(gradients) == 3
    norm = total_norm(gradients, norm_type)
    torch._foreach_mul_(gradients, clip_coefficient(norm, max_norm))
    want = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert torch.equal(norm, want)
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(a.grad, b.grad)


def test_no_gradients_have_norm_zero():
    assert total_norm([]).item() == 0.0
    assert gradients_of([torch.nn.Parameter(torch.ones(1))]) == []


def test_sparse_and_complex_gradients_share_their_memory():
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()
    values = as_real_dense(table.weight.grad)
    values.mul_(3.0)
    assert table.weight.grad.to_dense().sum().item() == 12.0
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    p.grad = torch.tensor([3 + 4j, 0j])
    assert total_norm(gradients_of([p])).item() == 5.0
    as_real_dense(p.grad).mul_(2.0)
    assert p.grad[0].item() == 6 + 8j
