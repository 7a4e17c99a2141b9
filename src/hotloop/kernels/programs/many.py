"""Programs over many tensors at once, whose addresses lie in device memory (see `hotloop.kernels.tables`)."""

# mypy: ignore-errors
# Triton compiles these functions; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["adamw", "scale", "square_sums"]


@jit
def _numbers(lr, beta1, beta2, eps, weight_decay, step):
    """What all elements share, in float64 as torch has it: 1 - 0.999 in float32 is wrong in its fifth digit."""
    rate = tl.load(lr).to(tl.float64)
    b1 = tl.load(beta1).to(tl.float64)
    b2 = tl.load(beta2).to(tl.float64)
    wd = tl.load(weight_decay).to(tl.float64)
    now = (step + 1.0).to(tl.float64)
    rate_now = rate / (1.0 - tl.exp(now * tl.log(b1)))
    root_now = tl.sqrt(1.0 - tl.exp(now * tl.log(b2)))
    return (
        (1.0 - b1).to(tl.float32),
        (1.0 - b2).to(tl.float32),
        rate_now.to(tl.float32),
        root_now.to(tl.float32),
        (1.0 - rate * wd).to(tl.float32),
        wd.to(tl.float32),
        tl.load(eps).to(tl.float32),
    )


@jit
def _adam(p, g, m, v, new1, new2, rate, root, kept, decay, eps, decoupled: tl.constexpr):
    if decoupled:
        p = p * kept
    else:
        g = g + decay * p
    m = m + new1 * (g - m)
    v = v + new2 * (g * g - v)
    p = p - rate * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    return p, m, v


@jit
def adamw(
    extents,
    pointers,
    step_pointers,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    coefficient,
    refuse,
    counter,
    n_blocks,
    n_tensors,
    n_steps,
    master_type: tl.constexpr,
    gradient_type: tl.constexpr,
    moment_type: tl.constexpr,
    shadow_type: tl.constexpr,
    has_shadow: tl.constexpr,
    has_coefficient: tl.constexpr,
    has_refuse: tl.constexpr,
    decoupled: tl.constexpr,
    aligned: tl.constexpr,
    size: tl.constexpr,
    steps_size: tl.constexpr,
):
    """One block of one tensor per program; the last program to finish counts the step.

    The elements are on their way before anything that they wait for is computed, the flag included.
    """
    program = tl.program_id(0)
    tensor = tl.load(extents + program)
    first = tl.load(extents + n_blocks + program)
    left = tl.load(extents + 2 * n_blocks + program)
    master = tl.load(pointers + tensor).to(tl.pointer_type(master_type)) + first
    gradient = tl.load(pointers + n_tensors + tensor).to(tl.pointer_type(gradient_type)) + first
    mean = tl.load(pointers + 2 * n_tensors + tensor).to(tl.pointer_type(moment_type)) + first
    square = tl.load(pointers + 3 * n_tensors + tensor).to(tl.pointer_type(moment_type)) + first
    step = tl.load(tl.load(pointers + 4 * n_tensors + tensor).to(tl.pointer_type(tl.float32)))
    shadow = master
    if has_shadow:
        shadow = tl.load(pointers + 5 * n_tensors + tensor).to(tl.pointer_type(shadow_type)) + first
    factor = 1.0
    if has_coefficient:
        factor = tl.load(coefficient).to(tl.float32)
    allowed = True
    if has_refuse:
        allowed = tl.load(refuse) == 0.0
    offsets = tl.arange(0, size)
    # a mask takes wide loads away: whole blocks go without
    if aligned and left >= size:
        at_master = tl.multiple_of(master + offsets, 16)
        at_mean = tl.multiple_of(mean + offsets, 16)
        at_square = tl.multiple_of(square + offsets, 16)
        p = tl.load(at_master).to(tl.float32)
        g = tl.load(tl.multiple_of(gradient + offsets, 16)).to(tl.float32)
        m = tl.load(at_mean).to(tl.float32)
        v = tl.load(at_square).to(tl.float32)
        new1, new2, rate, root, kept, decay, epsilon = _numbers(lr, beta1, beta2, eps, weight_decay, step)
        if has_coefficient:
            g = g * factor
        p, m, v = _adam(p, g, m, v, new1, new2, rate, root, kept, decay, epsilon, decoupled)
        if allowed:
            tl.store(at_master, p.to(master_type))
            tl.store(at_mean, m.to(moment_type))
            tl.store(at_square, v.to(moment_type))
            if has_shadow:
                tl.store(tl.multiple_of(shadow + offsets, 16), p.to(shadow_type))
    else:
        mask = offsets < left
        p = tl.load(master + offsets, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(mean + offsets, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(square + offsets, mask=mask, other=0.0).to(tl.float32)
        new1, new2, rate, root, kept, decay, epsilon = _numbers(lr, beta1, beta2, eps, weight_decay, step)
        if has_coefficient:
            g = g * factor
        p, m, v = _adam(p, g, m, v, new1, new2, rate, root, kept, decay, epsilon, decoupled)
        if allowed:
            tl.store(master + offsets, p.to(master_type), mask=mask)
            tl.store(mean + offsets, m.to(moment_type), mask=mask)
            tl.store(square + offsets, v.to(moment_type), mask=mask)
            if has_shadow:
                tl.store(shadow + offsets, p.to(shadow_type), mask=mask)
    if allowed:
        # all have read the step before the last one gets here
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == n_blocks - 1:
            for start in range(0, n_steps, steps_size):
                which = start + tl.arange(0, steps_size)
                there = which < n_steps
                address = tl.load(step_pointers + which, mask=there, other=0)
                place = address.to(tl.pointer_type(tl.float32))
                tl.store(place, tl.load(place, mask=there, other=0.0) + 1.0, mask=there)
            tl.atomic_xchg(counter, 0)


@jit
def _load(address, first, left, kind, offsets, whole: tl.constexpr):
    """Elements of a tensor from `first` on as float32; `kind` 0 is float32, 1 bfloat16, 2 float16."""
    mask = offsets < left
    if kind == 0:
        wide = address.to(tl.pointer_type(tl.float32)) + first + offsets
        if whole:
            x = tl.load(tl.multiple_of(wide, 16))
        else:
            x = tl.load(wide, mask=mask, other=0.0)
    elif kind == 1:
        brain = address.to(tl.pointer_type(tl.bfloat16)) + first + offsets
        if whole:
            x = tl.load(tl.multiple_of(brain, 16)).to(tl.float32)
        else:
            x = tl.load(brain, mask=mask, other=0.0).to(tl.float32)
    else:
        half = address.to(tl.pointer_type(tl.float16)) + first + offsets
        if whole:
            x = tl.load(tl.multiple_of(half, 16)).to(tl.float32)
        else:
            x = tl.load(half, mask=mask, other=0.0).to(tl.float32)
    return x


@jit
def square_sums(
    extents,
    pointers,
    partials,
    counter,
    total,
    coefficient,
    inverse,
    n_blocks,
    n_programs,
    max_norm,
    has_inverse: tl.constexpr,
    aligned: tl.constexpr,
    size: tl.constexpr,
    partials_size: tl.constexpr,
):
    """Each program sums the squares of its blocks; the last one to finish adds the sums, always in one order."""
    program = tl.program_id(0)
    offsets = tl.arange(0, size)
    sums = tl.zeros([size], dtype=tl.float32)
    for block in range(program, n_blocks, n_programs):
        tensor = tl.load(extents + block)
        first = tl.load(extents + n_blocks + block)
        left = tl.load(extents + 2 * n_blocks + block)
        kind = tl.load(extents + 3 * n_blocks + block)
        address = tl.load(pointers + tensor)
        if aligned and left >= size:
            x = _load(address, first, left, kind, offsets, True)
            sums += x * x
        else:
            x = _load(address, first, left, kind, offsets, False)
            sums += x * x
    tl.store(partials + program, tl.sum(sums, axis=0))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == n_programs - 1:
        lanes = tl.arange(0, partials_size)
        added = tl.zeros([partials_size], dtype=tl.float64)
        for begin in range(0, n_programs, partials_size):
            which = begin + lanes
            added += tl.load(partials + which, mask=which < n_programs, other=0.0, cache_modifier=".cg").to(
                tl.float64
            )
        norm = tl.sqrt(tl.sum(added, axis=0)).to(tl.float32)
        unscale = 1.0
        if has_inverse:
            unscale = tl.load(inverse).to(tl.float32)
            norm = norm * unscale
        clip = tl.div_rn(max_norm, norm + 1e-6)
        # written so that NaN stays NaN, as torch's clamp has it
        clip = tl.where(clip > 1.0, 1.0, clip)
        if has_inverse:
            clip = clip * unscale
        tl.store(total, norm)
        tl.store(coefficient, clip)
        tl.atomic_xchg(counter, 0)


@jit
def scale(extents, pointers, factor, n_blocks, aligned: tl.constexpr, size: tl.constexpr):
    """Multiply every tensor by one factor that lies on the device."""
    program = tl.program_id(0)
    by = tl.load(factor).to(tl.float32)
    offsets = tl.arange(0, size)
    tensor = tl.load(extents + program)
    first = tl.load(extents + n_blocks + program)
    left = tl.load(extents + 2 * n_blocks + program)
    kind = tl.load(extents + 3 * n_blocks + program)
    address = tl.load(pointers + tensor)
    if aligned and left >= size:
        x = _load(address, first, left, kind, offsets, True) * by
    else:
        x = _load(address, first, left, kind, offsets, False) * by
    mask = offsets < left
    if kind == 0:
        tl.store(address.to(tl.pointer_type(tl.float32)) + first + offsets, x, mask=mask)
    elif kind == 1:
        tl.store(address.to(tl.pointer_type(tl.bfloat16)) + first + offsets, x.to(tl.bfloat16), mask=mask)
    else:
        tl.store(address.to(tl.pointer_type(tl.float16)) + first + offsets, x.to(tl.float16), mask=mask)
