"""The loss of rows of logits, and its gradient written over them."""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["cross_entropy"]


@jit
def cross_entropy(
    logits,
    targets,
    losses,
    scales,
    n_rows,
    n_classes,
    stride,
    ignore_index,
    smoothing,
    with_gradient: tl.constexpr,
    each_row_scaled: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """`rows` rows per program: one pass for maximum and sum, one that writes scale * (softmax - wanted) in place."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    there = row < n_rows
    target = tl.load(targets + row, mask=there, other=0)
    counted = there & (target != ignore_index)
    start = logits + row.to(tl.int64) * stride
    lanes = tl.arange(0, columns)
    largest = tl.full([rows], float("-inf"), dtype=tl.float32)
    total = tl.zeros([rows], dtype=tl.float32)
    plain_sum = tl.zeros([rows], dtype=tl.float32)
    wanted = tl.zeros([rows], dtype=tl.float32)
    for begin in range(0, n_classes, columns):
        column = begin + lanes
        mask = there[:, None] & (column < n_classes)[None, :]
        z = tl.load(start[:, None] + column[None, :], mask=mask, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(z, axis=1))
        # a row of only -inf so far must not give NaN
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(z - base[:, None]), axis=1)
        largest = new
        wanted += tl.sum(tl.where(mask & (column[None, :] == target[:, None]), z, 0.0), axis=1)
        plain_sum += tl.sum(tl.where(mask, z, 0.0), axis=1)
    lse = largest + tl.log(total)
    loss = lse - (1.0 - smoothing) * wanted
    if smoothing != 0.0:
        loss = loss - smoothing * plain_sum / n_classes
    tl.store(losses + row, tl.where(counted, loss, 0.0), mask=there)
    if with_gradient:
        if each_row_scaled:
            factor = tl.load(scales + row, mask=there, other=0.0).to(tl.float32)
        else:
            factor = tl.zeros([rows], dtype=tl.float32) + tl.load(scales).to(tl.float32)
        factor = tl.where(counted, factor, 0.0)
        for begin in range(0, n_classes, columns):
            column = begin + lanes
            mask = there[:, None] & (column < n_classes)[None, :]
            place = start[:, None] + column[None, :]
            z = tl.load(place, mask=mask, other=float("-inf")).to(tl.float32)
            slope = tl.exp(z - lse[:, None]) - smoothing / n_classes
            slope = slope - tl.where(column[None, :] == target[:, None], 1.0 - smoothing, 0.0)
            # a row that does not count gives 0 even where it holds NaN
            slope = tl.where(counted[:, None], slope * factor[:, None], 0.0)
            tl.store(place, slope.to(logits.dtype.element_ty), mask=mask)
