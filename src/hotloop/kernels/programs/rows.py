"""Programs over rows of features: layer norm with what stands around it, GELU with its bias, sums of columns."""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["column_sums", "gelu_backward", "gelu_forward", "norm_backward", "norm_forward", "sum_partials"]


@jit
def norm_forward(
    x,
    branch,
    bias,
    weight,
    shift,
    added,
    out,
    statistics,
    n_rows,
    eps,
    WIDTH: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """added = x + branch + bias; out = (added - mean) / deviation * weight + shift; statistics float32 [2, n_rows]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    mask = (row < n_rows)[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        v += tl.load(branch + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            v += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        # what is normalised is what others read: the rounded sum
        rounded = v.to(added.dtype.element_ty)
        tl.store(added + at, rounded, mask=mask)
        v = rounded.to(tl.float32)
    mean = tl.sum(v, axis=1) / WIDTH
    centred = tl.where(mask, v - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1) / WIDTH + eps)
    tl.store(statistics + row, mean, mask=row < n_rows)
    tl.store(statistics + n_rows + row, inverse, mask=row < n_rows)
    y = centred * inverse[:, None] * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_SHIFT:
        y += tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@jit
def norm_backward(
    slope,
    added_slope,
    x,
    weight,
    statistics,
    x_slope,
    branch_slope,
    partials,
    n_rows,
    tiles_each,
    WIDTH: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    TWICE: tl.constexpr,
    FLAT: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradient of x, and each program's sums for weight, shift and bias: partials float32 [programs, 3, WIDTH].

    TWICE: the branch that was added has another type than x, and gets the gradient in its own. FLAT: sums over a
    tile's rows are taken at once (for programs of one warp, where a thread has them all), else at the end.
    """
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if FLAT:
        for_weight = tl.zeros([COLUMNS], dtype=tl.float32)
        for_shift = tl.zeros([COLUMNS], dtype=tl.float32)
        for_bias = tl.zeros([COLUMNS], dtype=tl.float32)
    else:
        for_weight = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for_shift = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for_bias = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for tile in tl.range(0, tiles_each, num_stages=STAGES):
        row = (program * tiles_each + tile) * ROWS + tl.arange(0, ROWS)
        there = row < n_rows
        mask = there[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        mean = tl.load(statistics + row, mask=there, other=0.0)[:, None]
        inverse = tl.load(statistics + n_rows + row, mask=there, other=0.0)[:, None]
        g = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        if HAS_SLOPE:
            g = tl.load(slope + at, mask=mask, other=0.0).to(tl.float32)
        normal = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean) * inverse
        # beyond the row's end everything is to be 0: g is, and so is what it weighs
        normal = tl.where(mask, normal, 0.0)
        weighted = g * w
        along = tl.sum(weighted * normal, axis=1)[:, None] / WIDTH
        level = tl.sum(weighted, axis=1)[:, None] / WIDTH
        d = (weighted - normal * along - level) * inverse
        if HAS_ADDED:
            d += tl.load(added_slope + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_slope + at, d.to(x_slope.dtype.element_ty), mask=mask)
        if TWICE:
            tl.store(branch_slope + at, d.to(branch_slope.dtype.element_ty), mask=mask)
        d = tl.where(mask, d, 0.0)
        if FLAT:
            for_weight += tl.sum(g * normal, axis=0)
            for_shift += tl.sum(g, axis=0)
            for_bias += tl.sum(d, axis=0)
        else:
            for_weight += g * normal
            for_shift += g
            for_bias += d
    if not FLAT:
        for_weight = tl.sum(for_weight, axis=0)
        for_shift = tl.sum(for_shift, axis=0)
        for_bias = tl.sum(for_bias, axis=0)
    here = partials + program * 3 * WIDTH + column
    tl.store(here, for_weight, mask=inside)
    tl.store(here + WIDTH, for_shift, mask=inside)
    tl.store(here + 2 * WIDTH, for_bias, mask=inside)


@jit
def sum_partials(
    partials, first, second, third, n_partials, n_columns,
    N: tl.constexpr, PARTIALS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """N vectors, each the sum over programs of its part of partials [n_partials, N, n_columns], in a fixed order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    vector = tl.program_id(1)
    inside = column < n_columns
    total = tl.zeros([PARTIALS, COLUMNS], dtype=tl.float32)
    for start in range(0, n_partials, PARTIALS):
        which = start + tl.arange(0, PARTIALS)
        mask = (which < n_partials)[:, None] & inside[None, :]
        at = (which[:, None] * N + vector) * n_columns + column[None, :]
        total += tl.load(partials + at, mask=mask, other=0.0)
    result = tl.sum(total, axis=0)
    if vector == 0:
        tl.store(first + column, result.to(first.dtype.element_ty), mask=inside)
    elif vector == 1:
        tl.store(second + column, result.to(second.dtype.element_ty), mask=inside)
    else:
        tl.store(third + column, result.to(third.dtype.element_ty), mask=inside)


@jit
def _normal_distribution(u):
    """(Φ(u), e^(-u²/2)): erfc by Abramowitz and Stegun 7.1.26, which is within 1.5e-7, from the same exponential."""
    bell = tl.exp(-0.5 * u * u)
    below = 1.0 + 0.23164189 * tl.abs(u)
    # the reciprocal, by one instruction of the special function unit
    t = tl.rsqrt(below * below)
    series = 1.061405429 * t - 1.453152027
    series = series * t + 1.421413741
    series = series * t - 0.284496736
    series = (series * t + 0.254829592) * t
    tail = 0.5 * series * bell
    return tl.where(u >= 0, 1.0 - tail, tail), bell


@jit
def gelu_forward(
    z, bias, out, n, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr
):
    """out = u Φ(u), u = z + bias, over all elements; EVEN: n is a multiple of SIZE."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    if EVEN:
        u = tl.load(z + at).to(tl.float32)
    else:
        u = tl.load(z + at, mask=at < n, other=0.0).to(tl.float32)
    if HAS_BIAS:
        u += tl.load(bias + at % WIDTH).to(tl.float32)
    phi, _ = _normal_distribution(u)
    y = (u * phi).to(out.dtype.element_ty)
    if EVEN:
        tl.store(out + at, y)
    else:
        tl.store(out + at, y, mask=at < n)


@jit
def gelu_backward(
    slope,
    z,
    bias,
    z_slope,
    partials,
    n_rows,
    rows_each,
    n_columns,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """z_slope = slope (Φ(u) + u φ(u)); with a bias its sums over this program's rows: [programs, n_columns]."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n_columns
    first = tl.program_id(0) * rows_each
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    for start in range(0, rows_each, ROWS):
        row = first + start + tl.arange(0, ROWS)
        mask = ((row < n_rows) & (row < first + rows_each))[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * n_columns + column[None, :]
        u = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            u += b
        phi, bell = _normal_distribution(u)
        g = tl.load(slope + at, mask=mask, other=0.0).to(tl.float32)
        d = g * (phi + u * 0.3989422804014327 * bell)
        tl.store(z_slope + at, d.to(z_slope.dtype.element_ty), mask=mask)
        total += d
    if HAS_BIAS:
        tl.store(partials + tl.program_id(0) * n_columns + column, tl.sum(total, axis=0), mask=inside)


@jit
def column_sums(x, partials, n_rows, rows_each, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of each column over this program's rows: partials float32 [programs, n_columns]."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n_columns
    first = tl.program_id(0) * rows_each
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, rows_each, ROWS):
        row = first + start + tl.arange(0, ROWS)
        mask = ((row < n_rows) & (row < first + rows_each))[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * n_columns + column[None, :]
        total += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(partials + tl.program_id(0) * n_columns + column, tl.sum(total, axis=0), mask=inside)
