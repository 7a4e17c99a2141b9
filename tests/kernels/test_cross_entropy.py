"""Cross-entropy of a linear layer in pieces against torch's own, in float64 and in training types."""

import pytest
import torch

from hotloop.errors import KernelError
from hotloop.kernels import cross_entropy_eager, linear_cross_entropy


def inputs(dtype, *, rows=37, width=24, classes=65, bias=True):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    w = (torch.randn(classes, width, generator=generator) / 4).to(dtype)
    b = torch.randn(classes, generator=generator).to(dtype) if bias else None
    t = torch.randint(classes, (rows,), generator=generator)
    t[3] = t[17] = -100
    return [v.requires_grad_() if v is not None else None for v in (x, w, b)], t


def losses_and_gradients(function, given, targets, **options):
    x, w, b = given
    loss = function(x, w, targets, b, **options)
    weights = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)
    grads = torch.autograd.grad((loss * weights).sum(), [v for v in given if v is not None])
    return [loss.detach(), *grads]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_are_torchs_in_float64(reduction, smoothing, bias):
    given, targets = inputs(torch.float64, bias=bias)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    # 10 rows of logits at a time: 37 rows are four pieces of unequal size
    ours = losses_and_gradients(linear_cross_entropy, given, targets, chunk_bytes=10 * 65 * 8, **options)
    exact = losses_and_gradients(cross_entropy_eager, given, targets, **options)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("classes", [65, 4099])
def test_training_types_are_near_float64(dtype, reduction, classes):
    given, targets = inputs(dtype, classes=classes)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    ours = losses_and_gradients(linear_cross_entropy, given, targets, chunk_bytes=10 * classes * 4, **options)
    wide = [v.detach().double().requires_grad_() for v in given]
    exact = losses_and_gradients(cross_entropy_eager, wide, targets, **options)
    bound = 1e-5 if dtype == torch.float32 else 1.5e-2
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == (torch.float32 if a is ours[0] else dtype)
        assert (a.double() - b).norm() <= bound * b.norm()


def test_shapes_of_tokens_and_other_ignored_index():
    given, targets = inputs(torch.float64)
    x = given[0].detach()[:36].view(4, 9, -1)
    t = targets[:36].view(4, 9).where(targets[:36].view(4, 9) >= 0, 7)
    ours = linear_cross_entropy(x, given[1], t, given[2], ignore_index=7, reduction="none")
    assert ours.shape == (4, 9)
    torch.testing.assert_close(
        ours, cross_entropy_eager(x, given[1], t, given[2], ignore_index=7, reduction="none")
    )


def test_autocast_computes_in_its_type():
    given, targets = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(given[0], given[1], targets, given[2])
    loss.backward()
    half = [v.detach().bfloat16() for v in given]
    assert loss.item() == linear_cross_entropy(half[0], half[1], targets, half[2]).item()
    assert given[1].grad.dtype == torch.float32


def test_without_gradient_nothing_is_kept():
    given, targets = inputs(torch.float32)
    with torch.no_grad():
        loss = linear_cross_entropy(given[0], given[1], targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, cross_entropy_eager(given[0], given[1], targets).detach())


def test_misfits_are_named():
    given, targets = inputs(torch.float32)
    with pytest.raises(KernelError, match=r"targets \(36,\)"):
        linear_cross_entropy(given[0], given[1], targets[1:])
    with pytest.raises(KernelError, match="'max'"):
        linear_cross_entropy(given[0], given[1], targets, reduction="max")
    with pytest.raises(KernelError, match=r"targets are torch.float32"):
        linear_cross_entropy(given[0], given[1], targets.float())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows_at_all_have_gradients_of_zero_as_torchs(reduction):
    given, targets = inputs(torch.float64, rows=20)
    x, w, b = given
    none, shorter = targets[:0], [x.detach()[:0].requires_grad_(), w, b]
    ours = losses_and_gradients(linear_cross_entropy, shorter, none, reduction=reduction)
    exact = losses_and_gradients(cross_entropy_eager, shorter, none, reduction=reduction)
    for a, e in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
