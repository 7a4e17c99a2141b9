"""A linear layer with both products of its way back at once is torch's own."""

import pytest
import torch
import torch.nn.functional as F

from hotloop.kernels.linear import linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6)])
def test_value_and_gradients_are_torchs(bias, shape):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True) if bias else None
    inputs = [v for v in (x, w, b) if v is not None]
    slope = torch.randn(*shape[:-1], 4, dtype=torch.float64)
    ours, exact = linear(x, w, b), F.linear(x, w, b)
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, slope), torch.autograd.grad(exact, inputs, slope)
    )
