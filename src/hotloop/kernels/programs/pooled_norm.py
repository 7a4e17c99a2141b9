"""The Triton programs of `hotloop.kernels.pooled_norm`.

All tensors are channels-last, flattened to [pixels, C]. A tile is BP pixels by BC channels; sums over pixels are kept
per program and added up in a fixed order by `add_up`, so that results do not change from run to run.
"""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = [
    "add_up",
    "pool_and_sum",
    "scale_and_gate",
    "scatter_image",
    "slope_and_scatter",
    "slope_and_sum",
    "take_largest",
]


@jit
def _window(
    image,
    row,
    column,
    H,
    W,
):
    """First pixel of a 2 x 2 window."""
    return (image * H + 2 * row) * W + 2 * column


@jit
def _largest(
    x,
    at,
    c,
    C,
    W,
    mask,
):
    """The largest of a window's four values and which it is, the first of equals."""
    best = tl.load(x + at * C + c, mask=mask, other=0.0)
    which = tl.zeros(best.shape, tl.int8)
    other = tl.load(x + (at + 1) * C + c, mask=mask, other=0.0)
    which = tl.where(other > best, 1, which)
    best = tl.maximum(best, other, propagate_nan=tl.PropagateNan.ALL)
    other = tl.load(x + (at + W) * C + c, mask=mask, other=0.0)
    which = tl.where(other > best, 2, which)
    best = tl.maximum(best, other, propagate_nan=tl.PropagateNan.ALL)
    other = tl.load(x + (at + W + 1) * C + c, mask=mask, other=0.0)
    which = tl.where(other > best, 3, which)
    best = tl.maximum(best, other, propagate_nan=tl.PropagateNan.ALL)
    return best, which.to(tl.int8)


@jit
def pool_and_sum(
    x,
    pooled,
    which,
    partial,
    pixels,
    mean_guess,
    H,
    W,
    C,
    POOL: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    TURNS,
):
    """Pool 2 x 2 (if POOL) and add up value and square of each channel, both less a guess of its mean.

    partial: float32 [programs, 2, C].
    """
    program = tl.program_id(0)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    c = channels[None, :]
    guess = tl.load(mean_guess + channels)
    # whole tiles are added up and reduced once: a reduction each turn would cost more than the loads
    total = tl.zeros((BP, BC), tl.float32)
    square = tl.zeros((BP, BC), tl.float32)
    # windows of float32 three stages ahead are more than the shared memory of most GPUs
    stages: tl.constexpr = (2 if x.dtype.element_ty.primitive_bitwidth > 16 else 3) if POOL else 4
    for turn in tl.range(0, TURNS, num_stages=stages):
        p = (program * TURNS + turn) * BP + tl.arange(0, BP)
        inside = (p < pixels)[:, None]
        mask = inside & (c < C)
        at = p.to(tl.int64)[:, None]
        if POOL:
            h = H // 2
            w = W // 2
            first = _window(p // (h * w), (p // w) % h, p % w, H, W).to(tl.int64)[:, None]
            value, place = _largest(x, first, c, C, W, mask)
            tl.store(pooled + at * C + c, value, mask=mask)
            tl.store(which + at * C + c, place, mask=mask)
        else:
            value = tl.load(x + at * C + c, mask=mask, other=0.0)
        v = tl.where(inside, value.to(tl.float32) - guess[None, :], 0.0)
        total += v
        square += v * v
    tl.store(partial + program * 2 * C + channels, tl.sum(total, 0))
    tl.store(partial + program * 2 * C + C + channels, tl.sum(square, 0))


@jit
def add_up(
    partial,
    out,
    programs,
    pixels,
    running_mean,
    running_var,
    momentum,
    eps,
    C,
    STATISTICS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    TURNS,
):
    """Sum `partial` over programs. Out, float32 [2, C]: the sums; or (STATISTICS) mean and 1 / deviation.

    With STATISTICS the sums are less `running_mean`, which is updated after it was read, as `running_var` is.
    """
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.zeros((BR, BC), tl.float32)
    second = tl.zeros((BR, BC), tl.float32)
    for turn in range(TURNS):
        r = (turn * BR + tl.arange(0, BR))[:, None]
        at = partial + r * 2 * C + channels[None, :]
        first += tl.load(at, mask=r < programs, other=0.0)
        second += tl.load(at + C, mask=r < programs, other=0.0)
    one = tl.sum(first, 0)
    two = tl.sum(second, 0)
    if STATISTICS:
        old = tl.load(running_mean + channels)
        off = one / pixels
        var = tl.maximum(two / pixels - off * off, 0.0, propagate_nan=tl.PropagateNan.ALL)
        mean = old + off
        was = tl.load(running_var + channels)
        tl.store(running_mean + channels, old + momentum * off)
        tl.store(running_var + channels, was + momentum * (var * (pixels / (pixels - 1.0)) - was))
        one = mean
        two = 1.0 / tl.sqrt(var + eps)
    tl.store(out + channels, one)
    tl.store(out + C + channels, two)


@jit
def _sigmoid(z, FAST: tl.constexpr):
    """FAST: by the hardware's tanh, whose error of 2^-11 16-bit results do not show."""
    if FAST:
        half = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z * 0.5], tl.float32, True, 1)
        return half * 0.5 + 0.5
    return tl.sigmoid(z)


@jit
def _past_edge(p, H, W):
    """Where pixel p of an image of H x W lies in one that has a row above and a column to the left more."""
    return ((p // (H * W)) * (H + 1) + (p // W) % H + 1) * (W + 1) + p % W + 1


@jit
def scale_and_gate(
    x, out, statistics, bias, pixels, eps,
    H, W, C, POOL: tl.constexpr, EDGE: tl.constexpr, INFER: tl.constexpr, FAST: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """z = (x - mean) / deviation + bias, out = z * sigmoid(z). INFER: statistics are mean and variance.

    EDGE (never with POOL): out has a row above and a column to the left more, of zeros, and `pixels` is that of out.
    """
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    c = channels[None, :]
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    mask = (p < pixels)[:, None] & (c < C)
    at = p.to(tl.int64)[:, None]
    if POOL:
        h = H // 2
        w = W // 2
        first = _window(p // (h * w), (p // w) % h, p % w, H, W).to(tl.int64)[:, None]
        value, _place = _largest(x, first, c, C, W, mask)
    elif EDGE:
        column = p % (W + 1)
        row = (p // (W + 1)) % (H + 1)
        inner = (row > 0) & (column > 0)
        q = ((p // ((H + 1) * (W + 1))) * H + row - 1) * W + column - 1
        value = tl.load(x + q.to(tl.int64)[:, None] * C + c, mask=mask & inner[:, None], other=0.0)
    else:
        value = tl.load(x + at * C + c, mask=mask, other=0.0)
    mean = tl.load(statistics + channels)
    inverse = tl.load(statistics + C + channels)
    if INFER:
        inverse = 1.0 / tl.sqrt(inverse + eps)
    shift = tl.load(bias + channels) - mean * inverse
    z = value.to(tl.float32) * inverse[None, :] + shift[None, :]
    if EDGE:
        z = tl.where(inner[:, None], z, 0.0)
    tl.store(out + at * C + c, (z * _sigmoid(z, FAST)).to(out.dtype.element_ty), mask=mask)


@jit
def _slope(x, gradient, p, h, w, c, C, mask, inverse, shift, bias, EDGE: tl.constexpr, FAST: tl.constexpr):
    """(gradient of z, normalised x) at pixels p of h x w; EDGE: the gradient has a row and a column more."""
    value = tl.load(x + p.to(tl.int64)[:, None] * C + c, mask=mask, other=0.0).to(tl.float32)
    if EDGE:
        p = _past_edge(p, h, w)
    dy = tl.load(gradient + p.to(tl.int64)[:, None] * C + c, mask=mask, other=0.0).to(tl.float32)
    normal = value * inverse + shift
    z = normal + bias
    s = _sigmoid(z, FAST)
    return dy * (s + z * (s - s * s)), normal


@jit
def slope_and_sum(
    x, gradient, statistics, bias, partial, pixels,
    H, W, C, EDGE: tl.constexpr, FAST: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, TURNS,
):  # fmt: skip
    """Add up, per channel, the gradient of z and its product with normalised x. partial: float32 [programs, 2, C].

    H and W are those of x; EDGE: the gradient has a row above and a column to the left more.
    """
    program = tl.program_id(0)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    c = channels[None, :]
    inverse = tl.load(statistics + C + channels)
    shift = -tl.load(statistics + channels) * inverse
    own = tl.load(bias + channels)[None, :]
    inverse = inverse[None, :]
    shift = shift[None, :]
    total = tl.zeros((BP, BC), tl.float32)
    product = tl.zeros((BP, BC), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=4):
        p = (program * TURNS + turn) * BP + tl.arange(0, BP)
        mask = (p < pixels)[:, None] & (c < C)
        slope, normal = _slope(x, gradient, p, H, W, c, C, mask, inverse, shift, own, EDGE, FAST)
        total += slope
        product += slope * normal
    tl.store(partial + program * 2 * C + channels, tl.sum(total, 0))
    tl.store(partial + program * 2 * C + C + channels, tl.sum(product, 0))


@jit
def slope_and_scatter(
    x, gradient, statistics, bias, sums, which, out, windows, pixels,
    H, W, C, POOL: tl.constexpr, EDGE: tl.constexpr, FAST: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of what was pooled: that of the norm at each window's largest value, zero elsewhere.

    With POOL, `windows` counts partial windows at odd borders too, and `pixels` is that of the pooled image.
    """
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    c = channels[None, :]
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    inside = p < windows
    q = p
    whole = inside
    if POOL:
        h = H // 2
        w = W // 2
        hh = (H + 1) // 2
        ww = (W + 1) // 2
        column = p % ww
        above = p // ww
        row = above % hh
        image = above // hh
        q = (image * h + row) * w + column
        whole = inside & (row < h) & (column < w)
    mask = whole[:, None] & (c < C)
    at = q.to(tl.int64)[:, None]
    inverse = tl.load(statistics + C + channels)
    shift = -tl.load(statistics + channels) * inverse
    own = tl.load(bias + channels)[None, :]
    slope, normal = _slope(
        x, gradient, q, H, W, c, C, mask, inverse[None, :], shift[None, :], own, EDGE, FAST
    )
    one = (tl.load(sums + channels) / pixels)[None, :]
    two = (tl.load(sums + C + channels) / pixels)[None, :]
    dx = (inverse[None, :] * (slope - one - normal * two)).to(out.dtype.element_ty)
    if POOL:
        place = tl.load(which + at * C + c, mask=mask, other=4)
        first = _window(image, row, column, H, W).to(tl.int64)[:, None]
        here = inside[:, None] & (c < C)
        right = here & (2 * column + 1 < W)[:, None]
        below = here & (2 * row + 1 < H)[:, None]
        zero = tl.zeros(dx.shape, dx.dtype)
        tl.store(out + first * C + c, tl.where(place == 0, dx, zero), mask=here)
        tl.store(out + (first + 1) * C + c, tl.where(place == 1, dx, zero), mask=right)
        tl.store(out + (first + W) * C + c, tl.where(place == 2, dx, zero), mask=below)
        tl.store(out + (first + W + 1) * C + c, tl.where(place == 3, dx, zero), mask=right & below)
    else:
        tl.store(out + at * C + c, dx, mask=mask)


@jit
def take_largest(x, out, which, samples, C, PIXELS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):
    """The largest value of each image's channel and the pixel that has it, the first of equals."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    mask = (n < samples) & (c < C)
    first = x + n.to(tl.int64) * (PIXELS * C) + c
    best = tl.load(first, mask=mask, other=0.0)
    place = tl.zeros(best.shape, tl.int16)
    for p in tl.static_range(1, PIXELS):
        other = tl.load(first + p * C, mask=mask, other=0.0)
        place = tl.where(other > best, p, place)
        best = tl.maximum(best, other, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + n * C + c, best, mask=mask)
    tl.store(which + n * C + c, place.to(tl.int16), mask=mask)


@jit
def scatter_image(gradient, which, dx, samples, C, PIXELS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):
    """The gradient of an image: that of its largest value there, zero elsewhere."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    mask = (n < samples) & (c < C)
    own = tl.load(gradient + n * C + c, mask=mask, other=0.0)
    place = tl.load(which + n * C + c, mask=mask, other=0)
    zero = tl.zeros(own.shape, own.dtype)
    first = dx + n.to(tl.int64) * (PIXELS * C) + c
    for p in tl.static_range(0, PIXELS):
        tl.store(first + p * C, tl.where(place == p, own, zero), mask=mask)
