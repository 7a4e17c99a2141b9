"""The Triton program of `hotloop.kernels.windows`."""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["windows_kernel"]


@jit
def windows_kernel(data, starts, mean, scale, out, size, F, NORMAL: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK values of one window."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = e < size
    value = tl.load(data + tl.load(starts + row) * F + e, mask=valid, other=0.0)
    if NORMAL:
        f = e % F
        x = value.to(tl.float32) - tl.load(mean + f, mask=valid, other=0.0)
        value = x * tl.load(scale + f, mask=valid, other=0.0)
    tl.store(out + row * size + e, value.to(out.dtype.element_ty), mask=valid)
