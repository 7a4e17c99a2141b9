"""Programs around Muon's matrix products: momentum into a stack of directions, and updates out of one."""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["apply", "gather", "normalise", "product"]


@jit
def gather(
    pointers,
    stack,
    partials,
    momentum,
    coefficient,
    refuse,
    numel,
    n_tensors,
    gradient_type: tl.constexpr,
    mean_type: tl.constexpr,
    has_coefficient: tl.constexpr,
    has_refuse: tl.constexpr,
    nesterov: tl.constexpr,
    whole: tl.constexpr,
    size: tl.constexpr,
):
    """Move the running mean of one block by its gradient, write what is to be orthogonalised and its sum of squares."""
    tensor, block = tl.program_id(0), tl.program_id(1)
    allowed = True
    if has_refuse:
        allowed = tl.load(refuse) == 0.0
    if allowed:
        offsets = block * size + tl.arange(0, size)
        mask = offsets < numel
        gradient = tl.load(pointers + tensor).to(tl.pointer_type(gradient_type)) + offsets
        mean = tl.load(pointers + n_tensors + tensor).to(tl.pointer_type(mean_type)) + offsets
        wide = tl.load(momentum).to(tl.float64)
        kept = wide.to(tl.float32)
        new = (1.0 - wide).to(tl.float32)
        # a mask takes wide loads away: whole blocks go without
        if whole:
            g = tl.load(tl.multiple_of(gradient, 16)).to(tl.float32)
            m = tl.load(tl.multiple_of(mean, 16)).to(tl.float32)
        else:
            g = tl.load(gradient, mask=mask, other=0.0).to(tl.float32)
            m = tl.load(mean, mask=mask, other=0.0).to(tl.float32)
        if has_coefficient:
            g = g * tl.load(coefficient).to(tl.float32)
        share = new * g
        m = kept * m + share
        u = m
        if nesterov:
            u = kept * m + share
        place = stack + tensor.to(tl.int64) * numel + offsets
        if whole:
            tl.store(tl.multiple_of(mean, 16), m.to(mean_type))
            tl.store(place, u)
        else:
            tl.store(mean, m.to(mean_type), mask=mask)
            tl.store(place, u, mask=mask)
        tl.store(partials + tensor * tl.num_programs(1) + block, tl.sum(tl.where(mask, u * u, 0.0), axis=0))


@jit
def normalise(
    stack,
    partials,
    out,
    eps,
    numel,
    n_partials,
    partials_size: tl.constexpr,
    whole: tl.constexpr,
    size: tl.constexpr,
):
    """Divide one block by the norm of its matrix."""
    tensor, block = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, partials_size)
    sums = tl.load(partials + tensor * n_partials + lanes, mask=lanes < n_partials, other=0.0)
    norm = tl.sqrt(tl.sum(sums, axis=0)) + eps
    offsets = block * size + tl.arange(0, size)
    mask = offsets < numel
    place = tensor.to(tl.int64) * numel + offsets
    if whole:
        x = tl.load(stack + place)
        tl.store(out + place, (x / norm).to(out.dtype.element_ty))
    else:
        x = tl.load(stack + place, mask=mask, other=0.0)
        tl.store(out + place, (x / norm).to(out.dtype.element_ty), mask=mask)


@jit
def apply(
    pointers,
    updates,
    lr,
    weight_decay,
    refuse,
    scale,
    numel,
    n_tensors,
    weight_type: tl.constexpr,
    shadow_type: tl.constexpr,
    has_shadow: tl.constexpr,
    has_refuse: tl.constexpr,
    whole: tl.constexpr,
    size: tl.constexpr,
):
    """Decay one block of a weight, move it, and round it into its 16-bit copy."""
    tensor, block = tl.program_id(0), tl.program_id(1)
    allowed = True
    if has_refuse:
        allowed = tl.load(refuse) == 0.0
    if allowed:
        offsets = block * size + tl.arange(0, size)
        mask = offsets < numel
        weight = tl.load(pointers + tensor).to(tl.pointer_type(weight_type)) + offsets
        update = updates + tensor.to(tl.int64) * numel + offsets
        rate = tl.load(lr).to(tl.float64)
        kept = (1.0 - rate * tl.load(weight_decay).to(tl.float64)).to(tl.float32)
        if whole:
            w = tl.load(tl.multiple_of(weight, 16)).to(tl.float32)
            x = tl.load(update).to(tl.float32)
        else:
            w = tl.load(weight, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(update, mask=mask, other=0.0).to(tl.float32)
        w = w * kept - (rate * scale).to(tl.float32) * x
        shadow = weight
        if has_shadow:
            shadow = tl.load(pointers + n_tensors + tensor).to(tl.pointer_type(shadow_type)) + offsets
        if whole:
            tl.store(tl.multiple_of(weight, 16), w.to(weight_type))
            if has_shadow:
                tl.store(tl.multiple_of(shadow, 16), w.to(shadow_type))
        else:
            tl.store(weight, w.to(weight_type), mask=mask)
            if has_shadow:
                tl.store(shadow, w.to(shadow_type), mask=mask)


@jit
def product(
    a,
    b,
    c,
    out,
    m,
    n,
    k,
    a_batch,
    a_row,
    a_column,
    b_batch,
    b_row,
    b_column,
    alpha,
    beta,
    has_c: tl.constexpr,
    whole: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """One tile of alpha A B + beta C for each pair of a batch; C and the result are [m, n], contiguous."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    across = tl.cdiv(n, columns)
    row = (tile // across) * rows + tl.arange(0, rows)
    column = (tile % across) * columns + tl.arange(0, columns)
    inner = tl.arange(0, depth)
    at_a = a + batch * a_batch + row[:, None] * a_row + inner[None, :] * a_column
    at_b = b + batch * b_batch + inner[:, None] * b_row + column[None, :] * b_column
    sums = tl.zeros([rows, columns], dtype=tl.float32)
    for start in range(0, k, depth):
        if whole:
            x = tl.load(at_a)
            y = tl.load(at_b)
        else:
            left = k - start
            x = tl.load(at_a, mask=(row[:, None] < m) & (inner[None, :] < left), other=0.0)
            y = tl.load(at_b, mask=(inner[:, None] < left) & (column[None, :] < n), other=0.0)
        sums = tl.dot(x, y, sums, input_precision="ieee")
        at_a += depth * a_column
        at_b += depth * b_row
    sums = sums * alpha
    place = batch * m * n + row[:, None] * n + column[None, :]
    if whole:
        if has_c:
            sums += beta * tl.load(c + place).to(tl.float32)
        tl.store(out + place, sums.to(out.dtype.element_ty))
    else:
        inside = (row[:, None] < m) & (column[None, :] < n)
        if has_c:
            sums += beta * tl.load(c + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)
