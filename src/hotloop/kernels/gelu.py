"""GELU with the bias before it, and the bias's gradient on the way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hotloop.errors import KernelError
from hotloop.kernels.columns import rows_each

__all__ = ["bias_gelu", "bias_gelu_eager"]

_SIZE = 2048
_PROGRAMS = 1056


def bias_gelu(z: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.gelu(z + bias)`, exact (not the tanh form), for `z` [..., D] without its linear layer's bias [D].

    Stock kernels are bound by arithmetic here, not by memory: an error function and an exponential per element. Both
    come from one exponential (Abramowitz and Stegun 7.1.26, within 1.5e-7 of the distribution function), and the
    gradient of the bias is summed in the pass that makes that of `z`, in float32 and a fixed order.
    """
    if bias is not None and bias.shape != z.shape[-1:]:
        raise KernelError(
            f"bias_gelu: bias {tuple(bias.shape)} does not fit z {tuple(z.shape)}: [D], [..., D]"
        )
    out: torch.Tensor = _forward(z, bias)
    return out


def bias_gelu_eager(z: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The twin of `bias_gelu` by torch's own functions; float64 is computed in float64."""
    kind = torch.float64 if z.dtype == torch.float64 else torch.float32
    u = z.to(kind) if bias is None else z.to(kind) + bias.to(kind)
    return F.gelu(u).to(z.dtype)


def _by_kernel(z: torch.Tensor) -> bool:
    from hotloop.kernels.language import runs_on

    return runs_on(z.device) and z.dtype != torch.float64 and z.numel() > 0


@torch.library.custom_op("hotloop::bias_gelu", mutates_args=())
def _forward(z: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not _by_kernel(z):
        return bias_gelu_eager(z, bias)
    from hotloop.kernels.language import triton
    from hotloop.kernels.programs.rows import gelu_forward

    z = z.contiguous()
    out = torch.empty_like(z)
    n = z.numel()
    gelu_forward[(triton.cdiv(n, _SIZE),)](
        z,
        bias if bias is not None else z,
        out,
        n,
        WIDTH=z.shape[-1],
        HAS_BIAS=bias is not None,
        EVEN=n % _SIZE == 0,
        SIZE=_SIZE,
        num_warps=4,
    )
    return out


@_forward.register_fake
def _(z: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return z.new_empty(z.shape)


@torch.library.custom_op("hotloop::bias_gelu_backward", mutates_args=())
def _backward(
    slope: torch.Tensor, z: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    width = z.shape[-1]
    n = z.numel() // max(1, width)
    for_bias = torch.empty_like(bias) if bias is not None else z.new_empty(0)
    if not _by_kernel(z):
        kind = torch.float64 if z.dtype == torch.float64 else torch.float32
        u = z.to(kind) if bias is None else z.to(kind) + bias.to(kind)
        d = torch.ops.aten.gelu_backward(slope.to(kind), u)
        if bias is not None:
            for_bias.copy_(d.reshape(n, width).sum(0))
        return d.to(z.dtype), for_bias
    from hotloop.kernels.language import triton
    from hotloop.kernels.partials import add_partials
    from hotloop.kernels.programs.rows import gelu_backward

    z = z.contiguous()
    z_slope = torch.empty_like(z)
    rows, columns = _tile(width)
    each = rows_each(n, triton.cdiv(width, columns), rows, _PROGRAMS)
    programs = triton.cdiv(n, each)
    partials = torch.empty(programs, width, dtype=torch.float32, device=z.device)
    gelu_backward[(programs, triton.cdiv(width, columns))](
        slope.contiguous(),
        z,
        bias if bias is not None else z,
        z_slope,
        partials,
        n,
        each,
        width,
        HAS_BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    if bias is not None:
        add_partials(partials, [for_bias])
    return z_slope, for_bias


@_backward.register_fake
def _(slope: torch.Tensor, z: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return z.new_empty(z.shape), z.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, slope: torch.Tensor) -> tuple[Any, ...]:
    z, bias = ctx.saved_tensors
    for_z, for_bias = _backward(slope, z, bias)
    return for_z, for_bias if bias is not None else None


_forward.register_autograd(_differentiate, setup_context=_remember)


def _tile(width: int) -> tuple[int, int]:
    from hotloop.kernels.language import triton

    columns = min(128, triton.next_power_of_2(width))
    return max(1, 2048 // columns), columns
