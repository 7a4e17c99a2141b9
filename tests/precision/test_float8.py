"""Numbers in fp8: rounding against its definition, products and gradients against float64 and the twin."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotloop.precision.float8 import FORWARD, GRADIENTS, Float8Numbers, multiply, quantise

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Relative to the whole, in float64."""
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


def representable(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of an fp8 format, from its bits alone."""
    exponent_bits, mantissa_bits = {E4: (4, 3), E5: (5, 2)}[dtype]
    bias = 2 ** (exponent_bits - 1) - 1
    found = []
    for e, m in itertools.product(range(2**exponent_bits), range(2**mantissa_bits)):
        if dtype == E4 and (e, m) == (15, 7):
            continue  # NaN
        if dtype == E5 and e == 31:
            continue  # infinities and NaN
        fraction = m / 2**mantissa_bits
        found.append(fraction * 2.0 ** (1 - bias) if e == 0 else (1 + fraction) * 2.0 ** (e - bias))
    return torch.tensor(sorted({s * v for v in found for s in (1, -1)}), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [E4, E5])
def test_every_number_goes_to_the_nearest_that_there_is(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32) * torch.logspace(-6, 3, 32)
    x8, factor = quantise(x, dtype)
    assert x8.dtype == dtype
    grid = representable(dtype)
    scaled = x.double() / factor.double()
    nearest = (scaled.flatten()[:, None] - grid[None, :]).abs().amin(1)
    mine = (x8.double().flatten() - scaled.flatten()).abs()
    # the factor itself is rounded to float32
    torch.testing.assert_close(mine, nearest, rtol=1e-5, atol=1e-4 * torch.finfo(dtype).max * 2**-20)
    assert (x8.float().abs().max() * factor).item() == pytest.approx(x.abs().max().item(), rel=1e-6)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_factors_are_one_per_tensor_row_or_column(dim: int | None) -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [0.25, 100.0, 3.0]])
    _, factor = quantise(x, E4, dim)
    shape = {None: (), 0: (1, 3), 1: (2, 1)}[dim]
    assert factor.shape == shape
    expected = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    torch.testing.assert_close(factor, expected / 448)


def test_zeros_tiny_and_non_finite_numbers() -> None:
    zeros, factor = quantise(torch.zeros(2, 2), E4)
    assert zeros.float().eq(0).all()
    assert math.isfinite(factor.item())
    tiny = torch.full((2, 2), 1e-25)
    x8, factor = quantise(tiny, E5)
    torch.testing.assert_close(x8.float() * factor, tiny)
    for bad in (math.inf, -math.inf, math.nan):
        x8, factor = quantise(torch.tensor([[1.0, bad]]), E4)
        # a step with such a number must look non-finite afterwards
        assert not (x8.float() * factor).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("left", "rowwise"), [(E4, False), (E5, False), (E4, True)])
def test_products_against_float64_and_the_twin(dtype: torch.dtype, left: torch.dtype, rowwise: bool) -> None:
    torch.manual_seed(0)
    a, b, bias = torch.randn(32, 64), torch.randn(48, 64), torch.randn(48)
    a8, fa = quantise(a, left, 1 if rowwise else None)
    b8, fb = quantise(b, E4, 1 if rowwise else None)
    fb = fb.reshape(1, -1) if rowwise else fb
    # fp8 numbers are float64 numbers: this product has no rounding worth naming
    exact = (a8.double() @ b8.double().t()) * fa.double() * fb.double() + bias.double()
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-6
    for emulated in (True, False):
        if rowwise and not emulated and dtype == torch.float32:
            continue  # the units give bf16 alone
        found = multiply(a8, b8.t(), fa, fb, dtype, bias=bias, emulated=emulated)
        assert found.dtype == dtype
        assert error(found, exact) < bound
    # and fp8 itself against the numbers it stands for: each is off by at most 2**-4 (e4m3) or 2**-3 (e5m2)
    assert error(exact, a.double() @ b.double().t() + bias.double()) < (0.04 if left == E4 else 0.06)


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("gradients", ["e5m2", "e4m3"])
@pytest.mark.parametrize("rows", [(3, 16), (5, 7)])
def test_a_layer_against_float64(
    emulated: bool, rowwise: bool, gradients: str, rows: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(*rows, 64, requires_grad=True)
    linear = nn.Linear(64, 48)
    numbers = Float8Numbers(gradients, rowwise=rowwise, emulated=emulated)
    y = numbers.linear(x, linear.weight, linear.bias)
    assert (y.shape, y.dtype) == ((*rows, 48), torch.float32)
    grad = torch.randn_like(y)
    y.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, linear.weight, linear.bias)]
    right = F.linear(*wide)
    right.backward(grad.double())
    assert error(y, right) < 0.05
    bound = 0.08 if gradients == "e5m2" else 0.05
    mine = [x.grad, linear.weight.grad, linear.bias.grad]
    for found, expected in zip(mine, wide, strict=True):
        assert found is not None
        assert expected.grad is not None
        assert found.shape == expected.shape
        assert error(found, expected.grad) < bound


def test_the_whole_layer_is_the_product_of_rounded_numbers() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    Float8Numbers(emulated=True).linear(x, weight, None).backward(grad := torch.randn(16, 48))

    def rounded(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        factor = t.detach().abs().max().double() / torch.finfo(dtype).max
        return (t.detach().double() / factor).float().to(dtype).double() * factor

    g = rounded(grad, GRADIENTS["e5m2"])
    assert x.grad is not None
    assert weight.grad is not None
    assert error(x.grad, g @ rounded(weight, FORWARD)) < 1e-2
    assert error(weight.grad, g.t() @ rounded(x, FORWARD)) < 1e-2


def test_autocast_decides_the_dtype_of_results_and_parameters_that_of_gradients() -> None:
    linear = nn.Linear(32, 16)
    x = torch.randn(16, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = Float8Numbers(emulated=True).linear(x, linear.weight, linear.bias)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    # the gradient of a sum over ones is exact in fp8: a column sum of what x is rounded to
    x8, factor = quantise(x.detach(), FORWARD)
    assert linear.weight.grad is not None
    expected = (x8.float() * factor).sum(0).expand(16, 32)
    torch.testing.assert_close(linear.weight.grad, expected, rtol=1e-5, atol=1e-5)


def test_no_rows_at_all() -> None:
    # as an expert of a mixture may get
    linear = nn.Linear(32, 16)
    y = Float8Numbers(emulated=True).linear(torch.zeros(0, 32), linear.weight, linear.bias)
    assert y.shape == (0, 16)
    y.sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.eq(0).all()


def test_only_what_is_needed_is_computed() -> None:
    numbers = Float8Numbers(emulated=True)
    weight = torch.randn(16, 32)
    x = torch.randn(16, 32, requires_grad=True)
    numbers.linear(x, weight, None).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    assert not numbers.linear(x.detach(), weight, None).requires_grad
