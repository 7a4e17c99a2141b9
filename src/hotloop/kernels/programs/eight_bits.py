"""Programs over matrices on their way to 8 bits: scaled, rounded, and written both ways round."""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["cast_both_ways"]


@jit
def cast_both_ways(
    x,
    inverse,
    straight,
    turned,
    partials,
    n_rows,
    n_columns,
    MOST: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """straight [M, N] and turned [N, M] = x * inverse in fp8; partials [programs, N] = sums of x over its rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < n_rows)[:, None] & (column < n_columns)[None, :]
    at = row.to(tl.int64)[:, None] * n_columns + column[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_SUMS:
        tl.store(
            partials + tl.program_id(0).to(tl.int64) * n_columns + column,
            tl.sum(v, axis=0),
            mask=column < n_columns,
        )
    v = v * tl.load(inverse)
    # comparisons, not a clamp: NaN must stay NaN
    v = tl.where(v > MOST, MOST, tl.where(v < -MOST, -MOST, v))
    y = v.to(straight.dtype.element_ty)
    tl.store(straight + at, y, mask=mask)
    turned_at = column.to(tl.int64)[:, None] * n_rows + row[None, :]
    tl.store(turned + turned_at, tl.trans(y), mask=(column < n_columns)[:, None] & (row < n_rows)[None, :])
