"""Linear layers in 8 bits: numbers scaled into fp8, multiplied there, gradients too.

A tensor (or each of its rows) is divided by its largest magnitude over the format's largest number, found anew at each
call ("dynamic scaling", Micikevicius et al., 2022, "FP8 Formats for Deep Learning"), and rounded to fp8; products add
up in fp32. Forwards use e4m3 (3 bits of mantissa), output gradients e5m2 (2 bits, more range) or e4m3. Everything is
tensor operations without a wait, so that torch.compile fuses the casts and a CUDA graph holds them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["FORWARD", "GRADIENTS", "MULTIPLE", "Float8Numbers", "multiply", "quantise"]

FORWARD = torch.float8_e4m3fn
GRADIENTS = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}
# The matrix units read 16 bytes at a time: every dimension is a multiple of this.
MULTIPLE = 16
# Below this a tensor is as good as zero; keeps the factor finite in float32.
_LEAST = 2.0**-100


def quantise(
    x: torch.Tensor, dtype: torch.dtype, dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` in fp8, and the float32 factor that undoes the scaling: `x ~ x8.float() * factor`.

    Args:
        x: [M, N] floating; infinities and NaN come out as NaN.
        dtype: an fp8 dtype.
        dim: None for one factor (0-d); 1 for one per row ([M, 1]), 0 for one per column ([1, N]).

    >>> x8, factor = quantise(torch.tensor([[1.0, -4.0]]), torch.float8_e4m3fn)
    >>> (x8.float() * factor).tolist()
    [[1.0, -4.0]]
    """
    most = torch.finfo(dtype).max
    magnitude = x.abs()
    # without keepdim: the units want row factors with a last stride of 1
    largest = magnitude.amax() if dim is None else magnitude.amax(dim)
    inverse = most / largest.float().clamp(min=_LEAST)
    factor = inverse.reciprocal()
    if dim is not None:
        inverse, factor = inverse.unsqueeze(dim), factor.unsqueeze(dim)
    # the largest may round up past the format's end, which e4m3 would make NaN
    x8 = (x.float() * inverse).clamp(-most, most).to(dtype)
    return x8, factor


def multiply(
    a8: torch.Tensor,
    b8: torch.Tensor,
    factor_a: torch.Tensor,
    factor_b: torch.Tensor,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    emulated: bool = False,
    fast: bool = False,
) -> torch.Tensor:
    """`(a8 * factor_a) @ (b8 * factor_b) + bias` with sums in fp32, as [M, N] of `dtype`.

    Args:
        a8: [M, K] fp8, rows contiguous.
        b8: [K, N] fp8, columns contiguous (the only layout that fp8 units read).
        factor_a: float32, 0-d or [M, 1].
        factor_b: float32, 0-d or [1, N].
        dtype: of the result.
        bias: [N], or None.
        emulated: multiply what the fp8 numbers stand for in fp32: the twin, on any device.
        fast: sums of long products are kept in fewer bits, as Hopper's units do by themselves.
    """
    if emulated:
        with torch.autocast(a8.device.type, enabled=False):
            wide = (a8.float() @ b8.float()) * factor_a * factor_b
        return (wide if bias is None else wide + bias.float()).to(dtype)
    # the units add a bias only to 16-bit results
    inside = bias is not None and dtype == torch.bfloat16
    within = bias.to(dtype) if bias is not None and inside else None
    out = torch._scaled_mm(
        a8,
        b8,
        scale_a=factor_a,
        scale_b=factor_b,
        bias=within,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return out if bias is None or inside else out + bias.to(dtype)


class Float8Numbers:
    """How one layer computes in fp8.

    Args:
        gradients: "e5m2" or "e4m3".
        rowwise: one factor per row instead of one per tensor; costs casting anew in the backward pass, whose sums run
            over other dimensions.
        emulated: see `multiply`.
    """

    def __init__(self, gradients: str = "e5m2", *, rowwise: bool = False, emulated: bool = False) -> None:
        self.gradients = GRADIENTS[gradients]
        self.rowwise = rowwise
        self.emulated = emulated

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`F.linear(x, weight, bias)` in fp8.

        Args:
            x: [..., K]; weight: [N, K], K and N multiples of 16; bias: [N] or None.

        Returns:
            [..., N], in autocast's dtype where that is on, else in that of `x`.
        """
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if not x.numel():
            return F.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        missing = -rows.shape[0] % MULTIPLE
        if missing:
            # rows of zeros change neither the result nor a gradient
            rows = F.pad(rows, (0, 0, 0, missing))
        function: Any = _Rowwise if self.rowwise else _Tensorwise
        out = function.apply(rows, weight, bias, dtype, self.gradients, self.emulated)
        if missing:
            out = out[:-missing]
        return out.reshape(*x.shape[:-1], weight.shape[0])


class _Tensorwise(torch.autograd.Function):
    """One factor per tensor: what the forward cast serves the backward too, at half the memory of 16 bits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        gradients: torch.dtype,
        emulated: bool,
    ) -> torch.Tensor:
        x8, factor_x = quantise(x, FORWARD)
        w8, factor_w = quantise(weight, FORWARD)
        ctx.save_for_backward(x8, factor_x, w8, factor_w)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.gradients, ctx.emulated = gradients, emulated
        return multiply(x8, w8.t(), factor_x, factor_w, dtype, bias=bias, emulated=emulated, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x8, factor_x, w8, factor_w = ctx.saved_tensors
        x_dtype, w_dtype, b_dtype = ctx.dtypes
        g8, factor_g = quantise(grad, ctx.gradients)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = multiply(g8, _columns(w8), factor_g, factor_w, x_dtype, emulated=ctx.emulated)
        if ctx.needs_input_grad[1]:
            dw = multiply(
                g8.t().contiguous(), _columns(x8), factor_g, factor_x, w_dtype, emulated=ctx.emulated
            )
        if b_dtype is not None and ctx.needs_input_grad[2]:
            db = grad.sum(0, dtype=torch.float32).to(b_dtype)
        return dx, dw, db, None, None, None


class _Rowwise(torch.autograd.Function):
    """One factor per row of the sums: each product casts its own factors, so tensors are kept as they came."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        gradients: torch.dtype,
        emulated: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.b_dtype = None if bias is None else bias.dtype
        ctx.gradients, ctx.emulated = gradients, emulated
        return _multiply_rows(x, weight, bias, FORWARD, dtype, emulated)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _multiply_rows(grad, weight.t(), None, ctx.gradients, x.dtype, ctx.emulated)
        if ctx.needs_input_grad[1]:
            dw = _multiply_rows(grad.t(), x.t(), None, ctx.gradients, weight.dtype, ctx.emulated)
        if ctx.b_dtype is not None and ctx.needs_input_grad[2]:
            db = grad.sum(0, dtype=torch.float32).to(ctx.b_dtype)
        return dx, dw, db, None, None, None


@torch.library.custom_op("hotloop::multiply_rows", mutates_args=())
def _multiply_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    kind: torch.dtype,
    dtype: torch.dtype,
    emulated: bool,
) -> torch.Tensor:
    """`a @ b.t() + bias` for `a` [M, K], `b` [N, K], each row of both in fp8 by its own factor; `a` as `kind`.

    An operator of its own, casts and all: compiled by Inductor of torch 2.11 for a GPU, gradients came out as zeros.
    """
    a8, factor_a = quantise(a, kind, 1)
    b8, factor_b = quantise(b, FORWARD, 1)
    # with row factors the units give bf16 alone
    wide = dtype if emulated else torch.bfloat16
    a8, b8, factor_b = a8.contiguous(), b8.contiguous().t(), factor_b.reshape(1, -1)
    return multiply(a8, b8, factor_a, factor_b, wide, bias=bias, emulated=emulated, fast=True).to(dtype)


@_multiply_rows.register_fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    kind: torch.dtype,
    dtype: torch.dtype,
    emulated: bool,
) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def _columns(a: torch.Tensor) -> torch.Tensor:
    """`a` with its columns contiguous."""
    return a.t().contiguous().t()
