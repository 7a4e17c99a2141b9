"""Kernels of the fast GPT on a device: against their twins in float64, and inside a CUDA graph."""

import pytest
import torch

from hotloop.kernels import rotary_tables, split_heads, split_heads_eager, squared_relu, squared_relu_eager

pytestmark = pytest.mark.gpu


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(4, 256, 6, 64), (3, 37, 5, 24), (1, 1, 1, 2)])
@pytest.mark.parametrize("norm", [True, False])
def test_split_heads(dtype, bound, shape, norm):
    B, T, heads, D = shape
    torch.manual_seed(0)
    qkv = torch.randn(B, T, 3 * heads * D, device="cuda", dtype=dtype, requires_grad=True)
    cos, sin = rotary_tables(T + 3, D, device="cuda")
    found = split_heads(qkv, cos, sin, heads, norm=norm)
    slopes = [torch.randn(B, heads, T, D, device="cuda", dtype=dtype) for _ in range(3)]
    (gradient,) = torch.autograd.grad(found, qkv, slopes)
    exact = qkv.detach().double().requires_grad_()
    wanted = split_heads_eager(exact, cos, sin, heads, norm=norm)
    (right,) = torch.autograd.grad(wanted, exact, [s.double() for s in slopes])
    assert max(error(a, b) for a, b in zip((*found, gradient), (*wanted, right), strict=True)) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(64, 256, 1536), (1001,), ()])
def test_squared_relu(dtype, bound, shape):
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=dtype).abs().requires_grad_()
    slope = torch.randn(shape, device="cuda", dtype=dtype)
    (gradient,) = torch.autograd.grad(squared_relu(x), x, slope)
    exact = x.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(squared_relu_eager(exact), exact, slope.double())
    assert error(squared_relu(x.detach()), squared_relu_eager(exact.detach())) < bound
    assert error(gradient, right) < bound
    bad = torch.tensor([float("nan"), -1.0, 2.0], device="cuda", dtype=dtype)
    assert squared_relu(bad).isnan().tolist() == [True, False, False]


def test_inside_a_graph():
    qkv = torch.randn(2, 64, 3 * 128, device="cuda", dtype=torch.bfloat16)
    cos, sin = rotary_tables(64, 64, device="cuda")

    def work():
        return [squared_relu(t) for t in split_heads(qkv, cos, sin, 2)]

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()
    qkv.normal_()
    graph.replay()
    for found, wanted in zip(outputs, work(), strict=True):
        assert torch.equal(found, wanted)
