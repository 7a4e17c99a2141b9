"""A user's Triton kernel on a CUDA device: checked, recorded, timed; refused where it waits or freezes a value."""

from __future__ import annotations

import pytest
import torch

from hotloop.errors import KernelError
from hotloop.kernels import register
from hotloop.kernels.language import jit, tl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@jit
def square_relu(x, out, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    v = tl.maximum(tl.load(x + at, mask=at < n), 0.0).to(tl.float32)
    tl.store(out + at, v * v, mask=at < n)


def launch(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    square_relu[(-(-x.numel() // 1024),)](x, out, x.numel(), size=1024)
    return out


def twin(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


def inputs(size, dtype, device):
    return (torch.randn(5, size, device=device).to(dtype),)


def test_a_triton_kernel_is_checked_recorded_and_timed():
    kernel = register(launch, twin=twin, inputs=inputs, name="gpu_square_relu")
    assert kernel.device.type == "cuda"
    assert kernel.checks == 36
    assert kernel.capture_safe
    assert kernel.kernel_us > 0
    x = torch.randn(1000, device="cuda", requires_grad=True)
    (grad,) = torch.autograd.grad(kernel(x).sum(), [x])
    assert torch.allclose(grad, 2 * torch.relu(x))
    compiled = torch.compile(lambda x: kernel.operator(x * 2).sum())
    (grad,) = torch.autograd.grad(compiled(x), [x])
    assert torch.allclose(grad, 8 * torch.relu(x))
    assert torch.equal(kernel(torch.tensor([-1.0, 3.0])), torch.tensor([0.0, 9.0]))


def test_rows_read_as_dense_are_refused():
    def careless(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        square_relu[(-(-x.numel() // 1024),)](x, out, x.numel(), size=1024)
        return out

    with pytest.raises(KernelError, match="strided"):
        register(careless, twin=twin, inputs=inputs)


def test_waiting_for_the_device_is_refused():
    def waits(x: torch.Tensor) -> torch.Tensor:
        return launch(x) if x.sum().item() < 1e30 else x

    with pytest.raises(KernelError, match="cannot be recorded"):
        register(waits, twin=twin, inputs=inputs)
