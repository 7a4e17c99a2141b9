"""Programs of a Muon step whose iteration runs on Gram matrices (see `hotloop.kernels.gram`).

Matrices of several shapes share a launch: its second dimension counts matrices, and programs beyond the end of a
smaller one return. `extents` is int64 [4, matrices]: rows, columns, where its elements begin in a stack of all, where
its Gram matrix begins.
"""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["finish", "gather", "gram", "gram_product", "iterate_small"]


@jit
def _sum_of(partials, tensor, n_partials, blocks, partials_size: tl.constexpr):
    lanes = tl.arange(0, partials_size)
    return tl.sum(tl.load(partials + tensor * n_partials + lanes, mask=lanes < blocks, other=0.0), axis=0)


@jit
def gather(
    pointers,
    extents,
    stack,
    partials,
    momentum,
    coefficient,
    refuse,
    n_tensors,
    n_partials,
    weight_type: tl.constexpr,
    gradient_type: tl.constexpr,
    mean_type: tl.constexpr,
    has_coefficient: tl.constexpr,
    has_refuse: tl.constexpr,
    has_norms: tl.constexpr,
    nesterov: tl.constexpr,
    size: tl.constexpr,
):
    """Move the running mean of one block by its gradient, write its direction, and the squares' sums of both."""
    block, tensor = tl.program_id(0), tl.program_id(1)
    numel = tl.load(extents + tensor) * tl.load(extents + n_tensors + tensor)
    allowed = block * size < numel
    if has_refuse:
        allowed = allowed & (tl.load(refuse) == 0.0)
    if allowed:
        offsets = block * size + tl.arange(0, size)
        weight = tl.load(pointers + tensor).to(tl.pointer_type(weight_type)) + offsets
        gradient = tl.load(pointers + n_tensors + tensor).to(tl.pointer_type(gradient_type)) + offsets
        mean = tl.load(pointers + 2 * n_tensors + tensor).to(tl.pointer_type(mean_type)) + offsets
        mean = tl.multiple_of(mean, 16)
        wide = tl.load(momentum).to(tl.float64)
        kept = wide.to(tl.float32)
        g = tl.load(tl.multiple_of(gradient, 16)).to(tl.float32)
        m = tl.load(mean).to(tl.float32)
        if has_coefficient:
            g = g * tl.load(coefficient).to(tl.float32)
        share = (1.0 - wide).to(tl.float32) * g
        m = kept * m + share
        u = m
        if nesterov:
            u = kept * m + share
        tl.store(mean, m.to(mean_type))
        first = tl.multiple_of(tl.load(extents + 2 * n_tensors + tensor), 16)
        tl.store(stack + first + offsets, u.to(stack.dtype.element_ty))
        tl.store(partials + tensor * n_partials + block, tl.sum(u * u, axis=0))
        if has_norms:
            w = tl.load(tl.multiple_of(weight, 16)).to(tl.float32)
            tl.store(partials + (n_tensors + tensor) * n_partials + block, tl.sum(w * w, axis=0))


@jit
def gram(
    extents,
    stack,
    partials,
    out,
    eps,
    n_tensors,
    n_partials,
    block: tl.constexpr,
    partials_size: tl.constexpr,
    side: tl.constexpr,
    depth: tl.constexpr,
):
    """One tile of X Xᵀ, X being the direction divided by its norm."""
    tile, tensor = tl.program_id(0), tl.program_id(1)
    rows = tl.load(extents + tensor).to(tl.int32)
    across = rows // side
    if tile < across * across:
        columns = tl.multiple_of(tl.load(extents + n_tensors + tensor).to(tl.int32), 32)
        first = tl.multiple_of(tl.load(extents + 2 * n_tensors + tensor), 16)
        row = (tile // across) * side + tl.arange(0, side)
        other = (tile % across) * side + tl.arange(0, side)
        inner = tl.arange(0, depth)
        at_row = stack + first + row[:, None] * columns + inner[None, :]
        at_other = stack + first + other[:, None] * columns + inner[None, :]
        sums = tl.zeros([side, side], dtype=tl.float32)
        for _start in tl.range(0, columns, depth, num_stages=4):
            sums = tl.dot(tl.load(at_row), tl.trans(tl.load(at_other)), sums)
            at_row += depth
            at_other += depth
        norm = tl.sqrt(_sum_of(partials, tensor, n_partials, rows * columns // block, partials_size)) + eps
        rows = tl.multiple_of(rows, 64)
        begin = tl.multiple_of(tl.load(extents + 3 * n_tensors + tensor), 16)
        place = out + begin + row[:, None] * rows + other[None, :]
        # one division after the other: the square of a small norm is no number of float32's
        tl.store(place, (sums / norm / norm).to(out.dtype.element_ty))


@jit
def gram_product(
    extents,
    a,
    b,
    b_too,
    c,
    out,
    out_too,
    n_tensors,
    alpha,
    beta,
    gamma,
    has_c: tl.constexpr,
    side: tl.constexpr,
    depth: tl.constexpr,
):
    """One tile of alpha A B + beta C + gamma I; the launch's third dimension chooses B and the result."""
    tile, tensor = tl.program_id(0), tl.program_id(1)
    rows = tl.load(extents + tensor).to(tl.int32)
    across = rows // side
    if tile < across * across:
        if tl.program_id(2) == 1:
            b = b_too
            out = out_too
        rows = tl.multiple_of(rows, 64)
        first = tl.multiple_of(tl.load(extents + 3 * n_tensors + tensor), 16)
        row = (tile // across) * side + tl.arange(0, side)
        column = (tile % across) * side + tl.arange(0, side)
        inner = tl.arange(0, depth)
        at_a = a + first + row[:, None] * rows + inner[None, :]
        at_b = b + first + inner[:, None] * rows + column[None, :]
        sums = tl.zeros([side, side], dtype=tl.float32)
        for _start in tl.range(0, rows, depth, num_stages=4):
            sums = tl.dot(tl.load(at_a), tl.load(at_b), sums)
            at_a += depth
            at_b += depth * rows
        place = first + row[:, None] * rows + column[None, :]
        sums = sums * alpha
        if has_c:
            sums += beta * tl.load(c + place).to(tl.float32)
            sums += tl.where(row[:, None] == column[None, :], gamma, 0.0)
        tl.store(out + place, sums.to(out.dtype.element_ty))


@jit
def iterate_small(
    extents,
    stack,
    partials,
    out,
    eps,
    a,
    b,
    c,
    n_tensors,
    n_partials,
    steps: tl.constexpr,
    block: tl.constexpr,
    partials_size: tl.constexpr,
    side: tl.constexpr,
    depth: tl.constexpr,
):
    """The whole iteration of one matrix of `side` rows: what its direction, divided by its norm, is multiplied by."""
    tensor = tl.program_id(0)
    columns = tl.multiple_of(tl.load(extents + n_tensors + tensor).to(tl.int32), 32)
    first = tl.multiple_of(tl.load(extents + 2 * n_tensors + tensor), 16)
    row = tl.arange(0, side)
    at = stack + first + row[:, None] * columns + tl.arange(0, depth)[None, :]
    sums = tl.zeros([side, side], dtype=tl.float32)
    for _start in tl.range(0, columns, depth, num_stages=4):
        x = tl.load(at)
        sums = tl.dot(x, tl.trans(x), sums)
        at += depth
    norm = tl.sqrt(_sum_of(partials, tensor, n_partials, side * columns // block, partials_size)) + eps
    kind = out.dtype.element_ty
    g = (sums / norm / norm).to(kind)
    unit = tl.where(row[:, None] == row[None, :], a, 0.0)
    p = (tl.dot(g, g) * c + g.to(tl.float32) * b + unit).to(kind)
    q = p
    for _step in tl.static_range(1, steps):
        g = tl.dot(tl.dot(p, g).to(kind), p).to(kind)
        p = (tl.dot(g, g) * c + g.to(tl.float32) * b + unit).to(kind)
        q = tl.dot(p, q).to(kind)
    begin = tl.multiple_of(tl.load(extents + 3 * n_tensors + tensor), 16)
    tl.store(out + begin + row[:, None] * side + row[None, :], q)


@jit
def finish(
    pointers,
    extents,
    scales,
    stack,
    partials,
    factor,
    lr,
    weight_decay,
    refuse,
    eps,
    n_tensors,
    n_partials,
    weight_type: tl.constexpr,
    shadow_type: tl.constexpr,
    has_shadow: tl.constexpr,
    has_refuse: tl.constexpr,
    has_norms: tl.constexpr,
    block: tl.constexpr,
    partials_size: tl.constexpr,
    side: tl.constexpr,
    width: tl.constexpr,
):
    """One tile of Q X, and the weights there moved by it; `scales` is float32 [2, matrices]: of updates, and norms."""
    tile, tensor = tl.program_id(0), tl.program_id(1)
    rows = tl.load(extents + tensor).to(tl.int32)
    columns = tl.load(extents + n_tensors + tensor).to(tl.int32)
    across = columns // width
    allowed = tile < (rows // side) * across
    if has_refuse:
        allowed = allowed & (tl.load(refuse) == 0.0)
    if allowed:
        rows = tl.multiple_of(rows, 64)
        columns = tl.multiple_of(columns, 32)
        first = tl.multiple_of(tl.load(extents + 2 * n_tensors + tensor), 16)
        begin = tl.multiple_of(tl.load(extents + 3 * n_tensors + tensor), 16)
        row = (tile // across) * side + tl.arange(0, side)
        column = (tile % across) * width + tl.arange(0, width)
        inner = tl.arange(0, side)
        at_q = factor + begin + row[:, None] * rows + inner[None, :]
        at_x = stack + first + inner[:, None] * columns + column[None, :]
        sums = tl.zeros([side, width], dtype=tl.float32)
        for _start in tl.range(0, rows, side, num_stages=3):
            sums = tl.dot(tl.load(at_q), tl.load(at_x), sums)
            at_q += side
            at_x += side * columns
        blocks = rows * columns // block
        norm = tl.sqrt(_sum_of(partials, tensor, n_partials, blocks, partials_size)) + eps
        rate = tl.load(lr).to(tl.float64)
        kept = (1.0 - rate * tl.load(weight_decay).to(tl.float64)).to(tl.float32)
        if has_norms:
            squares = _sum_of(partials, n_tensors + tensor, n_partials, blocks, partials_size)
            wanted = tl.load(scales + n_tensors + tensor)
            kept = kept * tl.where(squares == 0.0, 1.0, wanted / tl.sqrt(squares))
        move = rate.to(tl.float32) * tl.load(scales + tensor)
        place = row[:, None] * columns + column[None, :]
        weight = tl.load(pointers + tensor).to(tl.pointer_type(weight_type)) + place
        weight = tl.multiple_of(weight, (1, 16))
        w = tl.load(weight).to(tl.float32) * kept - move * (sums / norm)
        tl.store(weight, w.to(weight_type))
        if has_shadow:
            shadow = tl.load(pointers + 3 * n_tensors + tensor).to(tl.pointer_type(shadow_type)) + place
            tl.store(tl.multiple_of(shadow, (1, 16)), w.to(shadow_type))
