"""relu(x)² against torch's own, forwards and back."""

import pytest
import torch

from hotloop.kernels import squared_relu, squared_relu_eager


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 0.0), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 300)])
def test_it_is_the_square(dtype, bound, shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.requires_grad_()
    slope = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = x.detach().double().requires_grad_()
    wanted = torch.clamp(exact, min=0.0) ** 2
    (right,) = torch.autograd.grad(wanted, exact, slope.double())
    for function in (squared_relu, squared_relu_eager):
        found = function(x)
        (gradient,) = torch.autograd.grad(found, x, slope)
        for a, b in ((found, wanted), (gradient, right)):
            assert a.dtype == dtype
            assert (a.double() - b).norm() <= bound * b.norm()


def test_what_is_not_finite_stays_so():
    x = torch.tensor([float("nan"), float("inf"), -float("inf")])
    found = squared_relu(x)
    assert found[0].isnan()
    assert found[1:].tolist() == [float("inf"), 0.0]


def test_it_is_an_operator():
    found = torch.library.opcheck(
        torch.ops.hotloop.squared_relu.default, (torch.randn(9, requires_grad=True),)
    )
    assert set(found.values()) == {"SUCCESS"}
