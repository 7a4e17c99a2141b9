"""relu(x)² in one pass each way (So et al. 2021, "Primer"): stock kernels make two forwards and three back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["squared_relu", "squared_relu_eager"]

_SIZE = 4096


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The square of what is above 0 in `x`, of any shape, in its dtype."""
    out: torch.Tensor = _forward(x)
    return out


def squared_relu_eager(x: torch.Tensor) -> torch.Tensor:
    """The twin of `squared_relu` by torch's own functions."""
    return F.relu(x).square()


def _by_kernel(x: torch.Tensor) -> bool:
    from hotloop.kernels.language import runs_on

    return runs_on(x.device) and x.dtype != torch.float64 and x.numel() > 0


@torch.library.custom_op("hotloop::squared_relu", mutates_args=())
def _forward(x: torch.Tensor) -> torch.Tensor:
    if not _by_kernel(x):
        return squared_relu_eager(x)
    from hotloop.kernels.language import triton
    from hotloop.kernels.programs.squares import squared_relu_forward

    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.numel()
    squared_relu_forward[(triton.cdiv(n, _SIZE),)](x, out, n, SIZE=_SIZE, num_warps=8)
    return out


@_forward.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("hotloop::squared_relu_backward", mutates_args=())
def _backward(slope: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not _by_kernel(x):
        return slope * (2.0 * F.relu(x))
    from hotloop.kernels.language import triton
    from hotloop.kernels.programs.squares import squared_relu_backward

    slope, x = slope.contiguous(), x.contiguous()
    out = torch.empty_like(x)
    n = x.numel()
    squared_relu_backward[(triton.cdiv(n, _SIZE),)](slope, x, out, n, SIZE=_SIZE, num_warps=8)
    return out


@_backward.register_fake
def _(slope: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _differentiate(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _backward(slope, ctx.saved_tensors[0])
    return found


_forward.register_autograd(_differentiate, setup_context=_keep)
