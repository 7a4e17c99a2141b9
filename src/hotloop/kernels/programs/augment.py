"""The Triton program of `hotloop.kernels.augment`."""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["augment_kernel", "filtered_kernel"]


@jit
def _reflect(
    at,
    size,
):
    at = tl.where(at < 0, -at, at)
    return tl.where(at >= size, 2 * (size - 1) - at, at)


@jit
def _around(
    word,
    reach,
):
    return ((word >> 8).to(tl.float32) * 1.1920928955078125e-07 - 1.0) * reach


@jit
def _below(
    word,
    n,
):
    return ((word.to(tl.uint64) * n) >> 32).to(tl.int32)


@jit
def _value(
    images, index, now, y, x, c, valid, scale, shift, seed, brightness, contrast,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr, MIRROR: tl.constexpr,
    TRANSLATE: tl.constexpr, FLIP: tl.constexpr, CUTOUT: tl.constexpr, ZERO: tl.constexpr, JITTER: tl.constexpr,
):  # fmt: skip
    """The augmented image at (y, x, c), float32."""
    i32 = index.to(tl.uint32)
    e32 = now.to(tl.uint32)
    zero = i32 * 0
    p0, p1, p2, p3 = tl.philox(seed, i32, e32, zero, zero)
    sy = y + (H - OH) // 2 + DOWN
    sx = x
    if MIRROR:
        sx = OW - 1 - sx
    if FLIP > 0:
        if FLIP == 2:
            f0, _f1, _f2, _f3 = tl.philox(seed, i32, zero, zero + 2, zero)
            coin = (f0 + e32) & 1
        else:
            f0, _f1, _f2, _f3 = tl.philox(seed, i32, e32, zero + 2, zero)
            coin = f0 & 1
        sx = tl.where(coin == 1, OW - 1 - sx, sx)
    sx = sx + (W - OW) // 2 + RIGHT
    if TRANSLATE > 0:
        sy = sy + _below(p0, 2 * TRANSLATE + 1) - TRANSLATE
        sx = sx + _below(p1, 2 * TRANSLATE + 1) - TRANSLATE
    inside = valid
    if ZERO:
        inside = valid & (sy >= 0) & (sy < H) & (sx >= 0) & (sx < W)
    if TRANSLATE > 0 or DOWN != 0 or RIGHT != 0:
        sy = _reflect(sy, H)
        sx = _reflect(sx, W)
    value = tl.load(images + index * (H * W * C) + (sy * W + sx) * C + c, mask=valid, other=0).to(tl.float32)
    value = value * tl.load(scale + c, mask=valid, other=0.0) - tl.load(shift + c, mask=valid, other=0.0)
    if JITTER:
        t0, t1, _t2, _t3 = tl.philox(seed, i32, e32, zero + 1, zero)
        value = (value + _around(t0, brightness)) * (1 + _around(t1, contrast))
    if ZERO:
        value = tl.where(inside, value, 0.0)
    if CUTOUT > 0:
        top = _below(p2, OH) - CUTOUT // 2
        left = _below(p3, OW) - CUTOUT // 2
        hole = (y >= top) & (y < top + CUTOUT) & (x >= left) & (x < left + CUTOUT)
        value = tl.where(hole, 0.0, value)
    return value


@jit
def _write_target(labels, targets, row, index, off, on, CLASSES: tl.constexpr, WIDTH: tl.constexpr):
    label = tl.load(labels + index)
    if CLASSES > 0:
        k = tl.arange(0, WIDTH)
        tl.store(targets + row * CLASSES + k, tl.where(k == label, on, off), mask=k < CLASSES)
    else:
        tl.store(targets + row, label)


@jit(any_value=("seed",))
def augment_kernel(
    images, indices, epoch, scale, shift, out, labels, targets, seed, off, on, brightness, contrast,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr, MIRROR: tl.constexpr,
    TRANSLATE: tl.constexpr, FLIP: tl.constexpr, CUTOUT: tl.constexpr, ZERO: tl.constexpr, JITTER: tl.constexpr,
    EACH: tl.constexpr, LABELLED: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK values of one image of the batch; the first one of each image writes its target."""
    row = tl.program_id(0)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = e < OH * OW * C
    index = tl.load(indices + row)
    now = tl.load(epoch + row * EACH)
    value = _value(
        images, index, now, e // (C * OW), (e // C) % OW, e % C, valid, scale, shift, seed, brightness, contrast,
        H, W, C, OH, OW, DOWN, RIGHT, MIRROR, TRANSLATE, FLIP, CUTOUT, ZERO, JITTER,
    )  # fmt: skip
    tl.store(out + row.to(tl.int64) * (OH * OW * C) + e, value.to(out.dtype.element_ty), mask=valid)
    if LABELLED:  # noqa: SIM102 - known when compiled, the next one is not
        if tl.program_id(1) == 0:
            _write_target(labels, targets, row, index, off, on, CLASSES, WIDTH)


@jit(any_value=("seed",))
def filtered_kernel(
    images, indices, epoch, scale, shift, out, labels, targets, weight, seed, off, on, brightness, contrast,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr, MIRROR: tl.constexpr,
    TRANSLATE: tl.constexpr, FLIP: tl.constexpr, CUTOUT: tl.constexpr, ZERO: tl.constexpr, JITTER: tl.constexpr,
    EACH: tl.constexpr, LABELLED: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr,
    K: tl.constexpr, EDGE: tl.constexpr, OUT: tl.constexpr, PATCH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK pixels of one augmented image through K x K filters and SiLU; PATCH and COLUMNS are padded.

    EDGE: 1 for a row of zeros above the result and a column of zeros to its left.
    """
    row = tl.program_id(0)
    index = tl.load(indices + row)
    now = tl.load(epoch + row * EACH)
    across: tl.constexpr = OW - K + 1 + EDGE
    pixels: tl.constexpr = (OH - K + 1 + EDGE) * across
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, PATCH)
    o = tl.arange(0, COLUMNS)
    y = (p // across - EDGE)[:, None] + (k // (C * K))[None, :]
    x = (p % across - EDGE)[:, None] + ((k // C) % K)[None, :]
    inner = (p < pixels) & (p // across >= EDGE) & (p % across >= EDGE)
    valid = inner[:, None] & (k < C * K * K)[None, :]
    c = (k % C)[None, :] + y * 0
    value = _value(
        images, index, now, y, x, c, valid, scale, shift, seed, brightness, contrast,
        H, W, C, OH, OW, DOWN, RIGHT, MIRROR, TRANSLATE, FLIP, CUTOUT, ZERO, JITTER,
    )  # fmt: skip
    value = tl.where(valid, value, 0.0).to(out.dtype.element_ty)
    filters = tl.load(
        weight + o[None, :] * (C * K * K) + k[:, None],
        mask=(k < C * K * K)[:, None] & (o < OUT)[None, :],
        other=0.0,
    )
    z = tl.dot(value, filters, input_precision="ieee")
    z = z * tl.sigmoid(z)
    at = out + (row.to(tl.int64) * pixels + p)[:, None] * OUT + o[None, :]
    tl.store(at, z.to(out.dtype.element_ty), mask=(p < pixels)[:, None] & (o < OUT)[None, :])
    if LABELLED:  # noqa: SIM102 - known when compiled, the next one is not
        if tl.program_id(1) == 0:
            _write_target(labels, targets, row, index, off, on, CLASSES, WIDTH)
