"""Programs for relu(x)², element by element."""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["squared_relu_backward", "squared_relu_forward"]


@jit
def squared_relu_forward(x, out, n, SIZE: tl.constexpr):
    """out = max(x, 0)²; what is not a number stays so, for others to see."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    v = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, (v * v).to(out.dtype.element_ty), mask=at < n)


@jit
def squared_relu_backward(slope, x, out, n, SIZE: tl.constexpr):
    """out = slope · 2 max(x, 0)."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    v = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    g = tl.load(slope + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(
        out + at,
        (g * 2.0 * tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)).to(out.dtype.element_ty),
        mask=at < n,
    )
