"""A linear layer whose two products on the way back run beside each other, as branches of a graph.

Neither fills the device to its end: the last wave of one leaves room for the first of the other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from hotloop.kernels.columns import column_sums

__all__ = ["linear", "products_beside"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear(x, weight, bias)`: x [..., in], weight [out, in], bias [out] or None."""
    out: torch.Tensor = _forward(x, weight, bias)
    return out


def products_beside(
    slope: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `x` [n, in] and `weight` [out, in] by `slope` [n, out]; in a CUDA graph as two of its branches."""
    for_x = torch.empty_like(x)
    for_weight = torch.empty_like(weight)
    if x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        torch.mm(slope, weight, out=for_x)
        torch.mm(slope.t(), x, out=for_weight)
        return for_x, for_weight
    here, aside = torch.cuda.current_stream(x.device), _side_stream(x.device)
    # memory is this stream's; the other one only works in it, and is waited for
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        torch.mm(slope.t(), x, out=for_weight)
    torch.mm(slope, weight, out=for_x)
    here.wait_stream(aside)
    return for_x, for_weight


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@torch.library.custom_op("hotloop::linear", mutates_args=())
def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


@_forward.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("hotloop::linear_backward", mutates_args=())
def _backward(
    slope: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flat = slope.reshape(-1, slope.shape[-1])
    for_x, for_weight = products_beside(flat, x.reshape(-1, x.shape[-1]).contiguous(), weight)
    for_bias = column_sums(flat) if with_bias else x.new_empty(0)
    return for_x.view(x.shape), for_weight, for_bias


@_backward.register_fake
def _(
    slope: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        x.new_empty(x.shape),
        torch.empty_like(weight),
        x.new_empty(weight.shape[0] if with_bias else 0),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias = inputs
    ctx.with_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, slope: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    for_x, for_weight, for_bias = _backward(slope, x, weight, ctx.with_bias)
    return for_x, for_weight, for_bias if ctx.with_bias else None


_forward.register_autograd(_differentiate, setup_context=_remember)
