"""A matrix scaled into fp8, as it is and transposed, in one pass: fp8 units multiply rows by rows alone.

The backward pass of a linear layer multiplies the same numbers over other dimensions, so it needs them transposed.
Inductor writes a transposed cast in one pass too, but reads or writes it across memory: measured on an H200 at a
quarter of the memory's rate.
"""

from __future__ import annotations

import torch

__all__ = ["cast_both_ways", "cast_both_ways_eager"]

_TILE = 128


def cast_both_ways(
    x: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype, *, sums: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x * inverse`, cut off at the format's ends, in fp8; the same transposed; the sums of `x` over its rows.

    Args:
        x: [M, N] floating.
        inverse: float32 0-d, on the device of `x`.
        dtype: an fp8 dtype.
        sums: also sum the rows of `x`, in float32 and a fixed order.

    Returns:
        fp8 [M, N], fp8 [N, M], float32 [N] (empty without `sums`), all contiguous.
    """
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _cast(x, inverse, dtype, sums)
    return found


def cast_both_ways_eager(
    x: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype, *, sums: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The twin of `cast_both_ways`, for any device; fp8 numbers agree to the bit."""
    most = torch.finfo(dtype).max
    x8 = (x.float() * inverse).clamp(-most, most).to(dtype)
    total = x.sum(0, dtype=torch.float32) if sums else inverse.new_empty(0)
    # a copy even where the transpose is contiguous as it is: results of an operator share no memory
    return x8, x8.t().clone(memory_format=torch.contiguous_format), total


@torch.library.custom_op("hotloop::cast_both_ways", mutates_args=())
def _cast(
    x: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype, sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from hotloop.kernels.language import runs_on, triton

    if not runs_on(x.device) or not x.numel():
        return cast_both_ways_eager(x, inverse, dtype, sums=sums)
    from hotloop.kernels.programs.eight_bits import cast_both_ways as program

    x = x.contiguous()
    n, width = x.shape
    straight = torch.empty(n, width, dtype=dtype, device=x.device)
    turned = torch.empty(width, n, dtype=dtype, device=x.device)
    programs = triton.cdiv(n, _TILE)
    partials = torch.empty(programs if sums else 0, width, dtype=torch.float32, device=x.device)
    program[(programs, triton.cdiv(width, _TILE))](
        x,
        inverse,
        straight,
        turned,
        partials,
        n,
        width,
        MOST=torch.finfo(dtype).max,
        HAS_SUMS=sums,
        ROWS=_TILE,
        COLUMNS=_TILE,
        num_warps=8,
    )
    return straight, turned, partials.sum(0) if sums else inverse.new_empty(0)


@_cast.register_fake
def _(
    x: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype, sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, width = x.shape
    return (
        x.new_empty(n, width, dtype=dtype),
        x.new_empty(width, n, dtype=dtype),
        inverse.new_empty(width if sums else 0),
    )
