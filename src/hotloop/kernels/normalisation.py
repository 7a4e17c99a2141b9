"""Layer norm with the sum before it: residual, branch and the branch's bias in one pass, forwards and back.

The backward pass makes the sums over rows (gradients of weight, shift and bias) on its way through the rows; stock
kernels read everything again for each, or leave partial sums to a slow reduction.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hotloop.errors import KernelError

__all__ = ["layer_norm", "layer_norm_eager"]

# Beyond this a row does not fit the registers of a program.
_WIDEST = 8192
# The way back, rows of up to 1,024: programs of one warp that fetch rows ahead, two at a time up to 512. On an H200,
# 16,384 rows of 384: 17.6 us in bfloat16 where four warps on a row take 36.
_NARROW = 1024
_BACK_STAGES, _BACK_PROGRAMS = 3, 1056
_WIDE_PROGRAMS = 264


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    branch: torch.Tensor | None = None,
    branch_bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(added, normalised): added = x + branch + branch_bias, and its layer norm over the last dimension.

    Args:
        x: [..., D], the residual stream.
        weight, shift: [D], as in `F.layer_norm`.
        branch: what is added to `x`, of the same shape, perhaps of another type; None: `added` is `x`.
        branch_bias: [D], added too.
        dtype: of the normalised; None: that of `x`. `added` has the type of `x`.

    Computed in float32 from the rounded sum. Gradients of weight, shift and bias are summed in float32 in a fixed
    order.
    """
    if x.shape[-1] != weight.shape[0] or (branch is not None and branch.shape != x.shape):
        raise KernelError(
            f"layer_norm: x {tuple(x.shape)}, weight {tuple(weight.shape)} and branch "
            f"{None if branch is None else tuple(branch.shape)} do not fit: [..., D], [D], [..., D]"
        )
    if branch is None and branch_bias is not None:
        raise KernelError("layer_norm: branch_bias without a branch; add it to x, or give the branch")
    added, out, _ = _forward(x, branch, branch_bias, weight, shift, eps, dtype or x.dtype)
    return (x if branch is None else added), out


def layer_norm_eager(
    x: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    branch: torch.Tensor | None = None,
    branch_bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `layer_norm` by torch's own functions; see there. float64 is computed in float64."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    added = x
    if branch is not None:
        wide = x.to(kind) + branch.to(kind)
        added = (wide if branch_bias is None else wide + branch_bias.to(kind)).to(x.dtype)
    s = None if shift is None else shift.to(kind)
    out = F.layer_norm(added.to(kind), (x.shape[-1],), weight.to(kind), s, eps)
    return added, out.to(dtype or x.dtype)


def _by_kernel(x: torch.Tensor) -> bool:
    from hotloop.kernels.language import runs_on

    return runs_on(x.device) and x.dtype != torch.float64 and x.shape[-1] <= _WIDEST


def _tile(width: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile: about 2048 elements."""
    from hotloop.kernels.language import triton

    columns = triton.next_power_of_2(width)
    rows = max(1, 2048 // columns)
    return rows, columns, 4 if columns <= 2048 else 8


@torch.library.custom_op("hotloop::layer_norm", mutates_args=())
def _forward(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    weight: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    n = x.numel() // max(1, width)
    if not _by_kernel(x):
        added, out = layer_norm_eager(
            x, weight, shift, eps, branch=branch, branch_bias=branch_bias, dtype=dtype
        )
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        variance, mean = torch.var_mean(added.reshape(n, width).to(kind), 1, correction=0)
        return (
            added if branch is not None else x.new_empty(0),
            out.clone() if out is x else out,
            torch.stack([mean, (variance + eps).rsqrt()]),
        )
    from hotloop.kernels.language import triton
    from hotloop.kernels.programs.rows import norm_forward

    x = x.contiguous()
    added = torch.empty_like(x) if branch is not None else x.new_empty(0)
    out = torch.empty_like(x, dtype=dtype)
    statistics = torch.empty(2, n, dtype=torch.float32, device=x.device)
    rows, columns, warps = _tile(width)
    if n:
        norm_forward[(triton.cdiv(n, rows),)](
            x,
            branch.contiguous() if branch is not None else x,
            branch_bias if branch_bias is not None else weight,
            weight,
            shift if shift is not None else weight,
            added,
            out,
            statistics,
            n,
            eps,
            WIDTH=width,
            HAS_BRANCH=branch is not None,
            HAS_BIAS=branch_bias is not None,
            HAS_SHIFT=shift is not None,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
        )
    return added, out, statistics


@_forward.register_fake
def _(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    weight: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.numel() // x.shape[-1]
    return (
        x.new_empty(x.shape) if branch is not None else x.new_empty(0),
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(2, rows, dtype=kind),
    )


@torch.library.custom_op("hotloop::layer_norm_backward", mutates_args=())
def _backward(
    slope: torch.Tensor | None,
    added_slope: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    statistics: torch.Tensor,
    branch_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    n = x.numel() // max(1, width)
    if not _by_kernel(x):
        return _backward_eager(slope, added_slope, x, weight, statistics, branch_dtype, bias_dtype)
    from hotloop.kernels.language import triton
    from hotloop.kernels.partials import add_partials
    from hotloop.kernels.programs.rows import norm_backward

    x_slope = torch.empty_like(x)
    twice = branch_dtype != x.dtype
    branch_slope = torch.empty_like(x, dtype=branch_dtype) if twice else x.new_empty(0)
    sums = [torch.empty_like(weight), torch.empty_like(weight), torch.empty_like(weight, dtype=bias_dtype)]
    rows, columns, warps = _tile(width)
    stages, wanted = 1, _WIDE_PROGRAMS
    if columns <= _NARROW:
        rows, warps, stages, wanted = 2 if columns <= 512 else 1, 1, _BACK_STAGES, _BACK_PROGRAMS
    tiles = triton.cdiv(n, rows)
    each = max(1, triton.cdiv(tiles, wanted))
    programs = max(1, triton.cdiv(tiles, each))
    partials = torch.empty(programs, 3, width, dtype=torch.float32, device=x.device)
    norm_backward[(programs,)](
        slope.contiguous() if slope is not None else x,
        added_slope.contiguous() if added_slope is not None else x,
        x,
        weight,
        statistics,
        x_slope,
        branch_slope if twice else x_slope,
        partials,
        n,
        each,
        WIDTH=width,
        HAS_SLOPE=slope is not None,
        HAS_ADDED=added_slope is not None,
        TWICE=twice,
        FLAT=warps == 1,
        STAGES=stages,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
    )
    add_partials(partials, sums)
    return x_slope, branch_slope, sums[0], sums[1], sums[2]


@_backward.register_fake
def _(
    slope: torch.Tensor | None,
    added_slope: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    statistics: torch.Tensor,
    branch_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    twice = branch_dtype != x.dtype
    branch_slope = x.new_empty(x.shape, dtype=branch_dtype) if twice else x.new_empty(0)
    like = (
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape, dtype=bias_dtype),
    )
    return x.new_empty(x.shape), branch_slope, *like


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, branch, branch_bias, weight, shift, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.branch_dtype = branch.dtype if branch is not None else x.dtype
    ctx.bias_dtype = branch_bias.dtype if branch_bias is not None else weight.dtype
    ctx.with_branch, ctx.with_bias, ctx.with_shift = (v is not None for v in (branch, branch_bias, shift))
    ctx.save_for_backward(x if branch is None else output[0], weight, output[2])


def _differentiate(ctx: Any, added_slope: Any, slope: Any, _: Any) -> tuple[Any, ...]:
    x, weight, statistics = ctx.saved_tensors
    if slope is None and added_slope is None:
        return (None,) * 7
    x = x.contiguous()
    dx, again, dw, ds, db = _backward(
        slope,
        added_slope if ctx.with_branch else None,
        x,
        weight,
        statistics,
        ctx.branch_dtype,
        ctx.bias_dtype,
    )
    for_branch = (again if ctx.branch_dtype != x.dtype else dx) if ctx.with_branch else None
    return (
        dx,
        for_branch,
        db if ctx.with_bias else None,
        dw,
        ds if ctx.with_shift else None,
        None,
        None,
    )


_forward.register_autograd(_differentiate, setup_context=_remember)


def _backward_eager(
    slope: torch.Tensor | None,
    added_slope: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    statistics: torch.Tensor,
    branch_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    kind = statistics.dtype
    normal = (x.reshape(-1, width).to(kind) - statistics[0, :, None]) * statistics[1, :, None]
    g = torch.zeros_like(normal) if slope is None else slope.reshape(-1, width).to(kind)
    weighted = g * weight.to(kind)
    along = (weighted * normal).mean(1, keepdim=True)
    d = (weighted - normal * along - weighted.mean(1, keepdim=True)) * statistics[1, :, None]
    if added_slope is not None:
        d = d + added_slope.reshape(-1, width).to(kind)
    sums = [(g * normal).sum(0), g.sum(0), d.sum(0)]
    twice = branch_dtype != x.dtype
    d = d.view(x.shape)
    dw, ds, db = sums[0].to(weight.dtype), sums[1].to(weight.dtype), sums[2].to(bias_dtype)
    return d.to(x.dtype, copy=True), d.to(branch_dtype) if twice else x.new_empty(0), dw, ds, db
