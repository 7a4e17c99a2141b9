"""The way back through attention over short sequences, into one tensor that holds queries, keys and values."""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["attention_backward"]


@jit
def _load(places, mask, EVEN: tl.constexpr):
    if EVEN:
        x = tl.load(places)
    else:
        x = tl.load(places, mask=mask, other=0.0)
    return x


@jit
def attention_backward(
    packed,
    out,
    slope,
    lse,
    packed_slope,
    partials,
    length,
    heads,
    scale,
    DEPTH: tl.constexpr,
    BIG: tl.constexpr,
    SMALL: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One program: gradients of BIG queries and of BIG keys and values of one head of one sequence.

    packed, packed_slope: [batch, length, 3, heads, DEPTH]; out, slope: [batch, length, heads, DEPTH]; lse: float32
    [batch, heads, length], natural logarithms; partials: float32 [batch * blocks, 3, heads, DEPTH], sums over rows;
    EVEN: length is a multiple of BIG and of SMALL.
    Dao (2023), "FlashAttention-2", algorithm 2, with dq by a pass of its own instead of atomic additions.
    """
    block = tl.program_id(0)
    head = tl.program_id(1) % heads
    sequence = (tl.program_id(1) // heads).to(tl.int64)
    row = heads * DEPTH
    queries = packed + sequence * length * 3 * row + head * DEPTH
    keys = queries + row
    values = keys + row
    outs = out + sequence * length * row + head * DEPTH
    slopes = slope + sequence * length * row + head * DEPTH
    sums = lse + (sequence * heads + head) * length
    d = tl.arange(0, DEPTH)
    big = block * BIG + tl.arange(0, BIG)
    there = big < length
    at_big = big[:, None] * 3 * row + d[None, :]
    log2_e = 1.4426950408889634
    to_power = scale * log2_e

    # keys and values: over the queries that see them
    k = _load(keys + at_big, there[:, None], EVEN)
    v = _load(values + at_big, there[:, None], EVEN)
    dk = tl.zeros([BIG, DEPTH], dtype=tl.float32)
    dv = tl.zeros([BIG, DEPTH], dtype=tl.float32)
    begin = 0
    if CAUSAL:
        begin = block * BIG
    for start in range(begin, length, SMALL):
        small = start + tl.arange(0, SMALL)
        inside = small < length
        q = _load(queries + small[:, None] * 3 * row + d[None, :], inside[:, None], EVEN)
        at = small[:, None] * row + d[None, :]
        g = _load(slopes + at, inside[:, None], EVEN)
        o = _load(outs + at, inside[:, None], EVEN)
        level = tl.sum(o.to(tl.float32) * g.to(tl.float32), axis=1)
        total = _load(sums + small, inside, EVEN) * log2_e
        p = tl.exp2(tl.dot(k, tl.trans(q)) * to_power - total[None, :])
        if CAUSAL:
            p = tl.where(small[None, :] >= big[:, None], p, 0.0)
        if not EVEN:
            p = tl.where(there[:, None] & inside[None, :], p, 0.0)
        dv += tl.dot(p.to(g.dtype), g)
        ds = p * (tl.dot(v, tl.trans(g)) - level[None, :])
        dk += tl.dot(ds.to(q.dtype), q)
    dk = dk * scale
    into = packed_slope + sequence * length * 3 * row + head * DEPTH
    tl.store(into + row + at_big, dk.to(packed_slope.dtype.element_ty), mask=there[:, None])
    tl.store(into + 2 * row + at_big, dv.to(packed_slope.dtype.element_ty), mask=there[:, None])

    # queries: over the keys that they see
    q_big = _load(queries + at_big, there[:, None], EVEN)
    at_out = big[:, None] * row + d[None, :]
    g_big = _load(slopes + at_out, there[:, None], EVEN)
    o_big = _load(outs + at_out, there[:, None], EVEN)
    level_big = tl.sum(o_big.to(tl.float32) * g_big.to(tl.float32), axis=1)
    total_big = _load(sums + big, there, EVEN) * log2_e
    dq = tl.zeros([BIG, DEPTH], dtype=tl.float32)
    end = length
    if CAUSAL:
        end = tl.minimum((block + 1) * BIG, length)
    for start in range(0, end, SMALL):
        seen_keys = start + tl.arange(0, SMALL)
        near = seen_keys < length
        at_small = seen_keys[:, None] * 3 * row + d[None, :]
        k_small = _load(keys + at_small, near[:, None], EVEN)
        v_small = _load(values + at_small, near[:, None], EVEN)
        weight = tl.exp2(tl.dot(q_big, tl.trans(k_small)) * to_power - total_big[:, None])
        if CAUSAL:
            weight = tl.where(seen_keys[None, :] <= big[:, None], weight, 0.0)
        if not EVEN:
            weight = tl.where(there[:, None] & near[None, :], weight, 0.0)
        dw = weight * (tl.dot(g_big, tl.trans(v_small)) - level_big[:, None])
        dq += tl.dot(dw.to(k_small.dtype), k_small)
    dq = dq * scale
    tl.store(into + at_big, dq.to(packed_slope.dtype.element_ty), mask=there[:, None])
    if HAS_BIAS:
        here = partials + (sequence * tl.num_programs(0) + block) * 3 * row + head * DEPTH + d
        tl.store(here, tl.sum(dq, axis=0))
        tl.store(here + row, tl.sum(dk, axis=0))
        tl.store(here + 2 * row, tl.sum(dv, axis=0))
