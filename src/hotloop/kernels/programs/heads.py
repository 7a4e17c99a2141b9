"""Programs between the projection of queries, keys and values and attention: norm, rotation, one layout."""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["join_heads", "split_heads"]


@jit
def split_heads(
    qkv,
    cos,
    sin,
    query,
    key,
    value,
    n_rows,
    times,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows are (token, head). query, key: each head's two halves, normed and rotated by its time; value: copied."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    role = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    mask = (row < n_rows)[:, None] & (column < HALF)[None, :]
    token = row // HEADS
    source = (token.to(tl.int64) * (3 * HEADS) + role * HEADS + row % HEADS)[:, None] * (2 * HALF) + column[
        None, :
    ]
    target = row.to(tl.int64)[:, None] * (2 * HALF) + column[None, :]
    # what comes in keeps its name: a branch must not change a type
    front = tl.load(qkv + source, mask=mask, other=0.0)
    back = tl.load(qkv + source + HALF, mask=mask, other=0.0)
    if role == 2:
        tl.store(value + target, front, mask=mask)
        tl.store(value + target + HALF, back, mask=mask)
    else:
        a = front.to(tl.float32)
        b = back.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)
            a *= scale[:, None]
            b *= scale[:, None]
        place = (token % times)[:, None] * HALF + column[None, :]
        c = tl.load(cos + place, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + place, mask=mask, other=0.0).to(tl.float32)
        first = (a * c - b * s).to(qkv.dtype.element_ty)
        second = (b * c + a * s).to(qkv.dtype.element_ty)
        if role == 0:
            tl.store(query + target, first, mask=mask)
            tl.store(query + target + HALF, second, mask=mask)
        else:
            tl.store(key + target, first, mask=mask)
            tl.store(key + target + HALF, second, mask=mask)


@jit
def join_heads(
    query_slope,
    key_slope,
    value_slope,
    qkv,
    cos,
    sin,
    slope,
    n_rows,
    times,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradient of qkv from those of query, key and value: rotated back, and through the norm."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    role = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    mask = (row < n_rows)[:, None] & (column < HALF)[None, :]
    token = row // HEADS
    target = (token.to(tl.int64) * (3 * HEADS) + role * HEADS + row % HEADS)[:, None] * (2 * HALF) + column[
        None, :
    ]
    source = row.to(tl.int64)[:, None] * (2 * HALF) + column[None, :]
    if role == 2:
        tl.store(slope + target, tl.load(value_slope + source, mask=mask, other=0.0), mask=mask)
        tl.store(slope + target + HALF, tl.load(value_slope + source + HALF, mask=mask, other=0.0), mask=mask)
    else:
        if role == 0:
            f = tl.load(query_slope + source, mask=mask, other=0.0).to(tl.float32)
            g = tl.load(query_slope + source + HALF, mask=mask, other=0.0).to(tl.float32)
        else:
            f = tl.load(key_slope + source, mask=mask, other=0.0).to(tl.float32)
            g = tl.load(key_slope + source + HALF, mask=mask, other=0.0).to(tl.float32)
        place = (token % times)[:, None] * HALF + column[None, :]
        c = tl.load(cos + place, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + place, mask=mask, other=0.0).to(tl.float32)
        for_a = f * c + g * s
        for_b = g * c - f * s
        if NORM:
            a = tl.load(qkv + target, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(qkv + target + HALF, mask=mask, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]
            a *= scale
            b *= scale
            along = (tl.sum(for_a * a + for_b * b, axis=1) / (2 * HALF))[:, None]
            for_a = scale * (for_a - a * along)
            for_b = scale * (for_b - b * along)
        tl.store(slope + target, for_a.to(slope.dtype.element_ty), mask=mask)
        tl.store(slope + target + HALF, for_b.to(slope.dtype.element_ty), mask=mask)
