"""The program of stochastic gradient descent over many tensors at once."""

# mypy: ignore-errors
# Triton compiles this function; its arguments have no Python types.
from __future__ import annotations

from hotloop.kernels.language import jit, tl

__all__ = ["sgd"]


@jit
def sgd(
    extents,
    pointers,
    lr,
    momentum,
    weight_decay,
    coefficient,
    refuse,
    n_blocks,
    n_tensors,
    master_type: tl.constexpr,
    gradient_type: tl.constexpr,
    sum_type: tl.constexpr,
    shadow_type: tl.constexpr,
    has_momentum: tl.constexpr,
    nesterov: tl.constexpr,
    has_shadow: tl.constexpr,
    has_coefficient: tl.constexpr,
    has_refuse: tl.constexpr,
    aligned: tl.constexpr,
    size: tl.constexpr,
):
    """One block of one tensor per program."""
    program = tl.program_id(0)
    allowed = True
    if has_refuse:
        allowed = tl.load(refuse) == 0.0
    if allowed:
        tensor = tl.load(extents + program)
        first = tl.load(extents + n_blocks + program)
        left = tl.load(extents + 2 * n_blocks + program)
        offsets = tl.arange(0, size)
        master = tl.load(pointers + tensor).to(tl.pointer_type(master_type)) + first + offsets
        gradient = tl.load(pointers + n_tensors + tensor).to(tl.pointer_type(gradient_type)) + first + offsets
        rate = tl.load(lr).to(tl.float32)
        decay = tl.load(weight_decay).to(tl.float32)
        sums = master
        if has_momentum:
            sums = tl.load(pointers + 2 * n_tensors + tensor).to(tl.pointer_type(sum_type)) + first + offsets
        shadow = master
        if has_shadow:
            row = 3 if has_momentum else 2
            shadow = tl.load(pointers + row * n_tensors + tensor).to(tl.pointer_type(shadow_type))
            shadow = shadow + first + offsets
        # a mask takes wide loads away: whole blocks go without
        if aligned and left >= size:
            p = tl.load(tl.multiple_of(master, 16)).to(tl.float32)
            g = tl.load(tl.multiple_of(gradient, 16)).to(tl.float32)
            if has_coefficient:
                g = g * tl.load(coefficient).to(tl.float32)
            g = g + decay * p
            if has_momentum:
                m = tl.load(momentum).to(tl.float32)
                s = m * tl.load(tl.multiple_of(sums, 16)).to(tl.float32) + g
                tl.store(tl.multiple_of(sums, 16), s.to(sum_type))
                if nesterov:
                    g = g + m * s
                else:
                    g = s
            p = p - rate * g
            tl.store(tl.multiple_of(master, 16), p.to(master_type))
            if has_shadow:
                tl.store(tl.multiple_of(shadow, 16), p.to(shadow_type))
        else:
            mask = offsets < left
            p = tl.load(master, mask=mask, other=0.0).to(tl.float32)
            g = tl.load(gradient, mask=mask, other=0.0).to(tl.float32)
            if has_coefficient:
                g = g * tl.load(coefficient).to(tl.float32)
            g = g + decay * p
            if has_momentum:
                m = tl.load(momentum).to(tl.float32)
                s = m * tl.load(sums, mask=mask, other=0.0).to(tl.float32) + g
                tl.store(sums, s.to(sum_type), mask=mask)
                if nesterov:
                    g = g + m * s
                else:
                    g = s
            p = p - rate * g
            tl.store(master, p.to(master_type), mask=mask)
            if has_shadow:
                tl.store(shadow, p.to(shadow_type), mask=mask)
