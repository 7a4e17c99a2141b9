"""Student's t distribution, as far as paired comparisons and bands of few runs need it."""

from __future__ import annotations

import functools
import math

__all__ = ["t_quantile", "t_tail"]


def t_tail(t: float, freedom: float) -> float:
    """P(T > t) with `freedom` degrees of freedom, to about 1e-10.

    By Simpson's rule over u with t = tan(u), where the density is smooth and the interval finite.
    """
    if t < 0:
        return 1.0 - t_tail(-t, freedom)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def density(u: float) -> float:
        c = math.cos(u)
        if c <= 1e-12:
            return 0.0 if freedom > 1 else scale * freedom
        x = math.tan(u)
        return scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2) / (c * c)

    low, high, pieces = math.atan(t), math.pi / 2, 400
    width = (high - low) / pieces
    total = density(low) + density(high)
    total += sum((4 if i % 2 else 2) * density(low + i * width) for i in range(1, pieces))
    return total * width / 3


@functools.cache
def t_quantile(probability: float, freedom: float) -> float:
    """The t with P(T <= t) = `probability`, for probabilities of at least one half."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > 1 - probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if t_tail(middle, freedom) > 1 - probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2
