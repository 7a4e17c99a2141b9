"""Elementary functions and small reductions written in those that have a C form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotloop.native.faults import NoForm

__all__ = ["FUNCTIONS"]

Tensor = torch.Tensor

# Abramowitz and Stegun, 4.4.49: arctan on [-1, 1], absolute error below 2e-8; coefficients of x**2 from the highest.
_ARCTAN = (
    0.0028662257,
    -0.0161657367,
    0.0429096138,
    -0.0752896400,
    0.1065626393,
    -0.1420889944,
    0.1999355085,
    -0.3333314528,
    1.0,
)


def _atan(x: Tensor) -> Tensor:
    large = torch.abs(x) > 1
    t = torch.where(large, torch.reciprocal(torch.where(large, x, 1.0)), x)
    square = t * t
    total = torch.full_like(x, _ARCTAN[0])
    for coefficient in _ARCTAN[1:]:
        total = total * square + coefficient
    found = total * t
    return torch.where(large, torch.sign(x) * (math.pi / 2) - found, found)


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    # the origin has the angle 0, as for positive zeros in PyTorch
    angle = _atan(y / torch.where(x == 0, 1.0, x))
    half = torch.where(y < 0, -math.pi, math.pi)
    angle = torch.where(x < 0, angle + half, angle)
    upright = torch.sign(y) * (math.pi / 2)
    return torch.where(x == 0, upright, angle)


def _asin(x: Tensor) -> Tensor:
    return _atan2(x, torch.sqrt((1 - x) * (1 + x)))


def _acos(x: Tensor) -> Tensor:
    return _atan2(torch.sqrt((1 - x) * (1 + x)), x)


def _sinh(x: Tensor) -> Tensor:
    e = torch.expm1(torch.abs(x))
    return torch.sign(x) * 0.5 * (e + torch.where(e > 1e30, 1.0, e / (e + 1)))


def _cosh(x: Tensor) -> Tensor:
    e = torch.exp(torch.abs(x))
    return 0.5 * e + 0.5 / e


def _asinh(x: Tensor) -> Tensor:
    a = torch.abs(x)
    return torch.sign(x) * torch.log1p(a + a * a / (1 + torch.sqrt(a * a + 1)))


def _acosh(x: Tensor) -> Tensor:
    return torch.log(x + torch.sqrt((x - 1) * (x + 1)))


def _atanh(x: Tensor) -> Tensor:
    return 0.5 * torch.log1p(2 * x / (1 - x))


def _exp2(x: Tensor) -> Tensor:
    # the whole part is exact, so that the error does not grow with x
    whole = torch.floor(x)
    return torch.exp((x - whole) * math.log(2)) * torch.pow(torch.full_like(x, 2.0), whole)


def _power_of(base: Any, x: Tensor) -> Tensor:
    if base <= 0:
        raise NoForm("a power of a number that is not positive has no C form")
    return _exp2(x) if base == 2 else torch.exp(x * math.log(base))


def _fmod(x: Tensor, y: Any) -> Tensor:
    return x - y * torch.trunc(x / y)


def _round_decimals(x: Tensor, decimals: int = 0) -> Tensor:
    scale = 10.0**decimals
    return torch.round(x * scale) * (1 / scale)


def _copysign(x: Tensor, y: Any) -> Tensor:
    # the sign of a zero is lost
    return torch.where(y < 0, -torch.abs(x), torch.abs(x))


def _vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    dims = list(range(x.ndim)) if dim is None or dim == [] else dim
    if ord == math.inf:
        return torch.amax(torch.abs(x), dims, keepdim=keepdim)
    if ord == -math.inf:
        return torch.amin(torch.abs(x), dims, keepdim=keepdim)
    if ord == 0:
        return torch.sum(torch.where(x != 0, 1.0, 0.0), dims, keepdim=keepdim)
    total = torch.sum(torch.pow(torch.abs(x), ord) if ord != 1 else torch.abs(x), dims, keepdim=keepdim)
    return total if ord == 1 else torch.pow(total, 1 / ord)


def _var_mean(x: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    dims = rest[0] if rest and not isinstance(rest[0], bool) else options.get("dim")
    return torch.var(x, *rest, **options), torch.mean(x, dims, keepdim=options.get("keepdim", False))


def _std_mean(x: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    variance, mean = _var_mean(x, *rest, **options)
    return torch.sqrt(variance), mean


def _broadcast(x: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    for d in range(len(shape)):
        x = x if d in dims else x.unsqueeze(d)
    return x.expand(shape)


def _prod(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if dim is None:
        return _prod(x.flatten(), 0)
    found = torch.cumprod(x, dim).narrow(dim, x.shape[dim] - 1, 1)
    return found if keepdim else found.squeeze(dim)


def _cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    return _vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, [-1]) if p != 2 else _euclid(x, y)


def _euclid(x: Tensor, y: Tensor) -> Tensor:
    d = x.unsqueeze(-2) - y.unsqueeze(-3)
    return torch.sqrt(torch.sum(d * d, -1))


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    outputs, left, right = weight.shape
    pairs = (x.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)
    return torch.nn.functional.linear(pairs, weight.reshape(outputs, left * right), bias)


def _einsum(equation: str, operands: Sequence[Tensor], path: Any = None) -> Tensor:
    """Any einsum: each operand over all labels, multiplied and summed; two plain ones at a time where that does."""
    left, _, out = equation.replace(" ", "").partition("->")
    names = left.split(",")
    free = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    dots = max((t.ndim - len(n.replace("...", "")) for n, t in zip(names, operands, strict=True)), default=0)
    filler = "".join(next(c for c in free if c not in left) for _ in range(dots))
    labels, values = [], []
    for name, t in zip(names, operands, strict=True):
        count = t.ndim - len(name.replace("...", ""))
        name = name.replace("...", filler[dots - count :])
        for c in sorted(set(name)):
            while name.count(c) > 1:
                a, b = name.index(c), name.rindex(c)
                t = torch.diagonal(t, 0, a, b)
                name = name[:a] + name[a + 1 : b] + name[b + 1 :] + c
        labels.append(name)
        values.append(t)
    if "->" in equation:
        out = out.replace("...", filler)
    else:
        joined = "".join(labels)
        out = filler + "".join(sorted(c for c in set(joined) if c not in filler and joined.count(c) == 1))
    while len(values) > 2:
        kept = "".join(sorted(set(labels[0] + labels[1]) & set("".join(labels[2:]) + out)))
        values[:2] = [_contract(labels[0], labels[1], kept, values[0], values[1])]
        labels[:2] = [kept]
    if len(values) == 2:
        return _contract(labels[0], labels[1], out, values[0], values[1])
    gone = [d for d, c in enumerate(labels[0]) if c not in out]
    rest = [c for c in labels[0] if c in out]
    value = torch.sum(values[0], gone) if gone else values[0]
    return value.permute([rest.index(c) for c in out])


def _contract(a: str, b: str, out: str, x: Tensor, y: Tensor) -> Tensor:
    sizes = dict(zip(a, x.shape, strict=True))
    if any(sizes.get(c, n) != n for c, n in zip(b, y.shape, strict=True)):
        raise NoForm("an einsum whose sizes differ (1 against more) has no C form; expand before")
    x, a = _sum_alone(a, b + out, x)
    y, b = _sum_alone(b, a + out, y)
    every = sorted(set(a + b), key=lambda c: (c not in out, c))
    if all(c in out for c in every):
        # no sum: a product of what is spread over all labels
        def spread(name: str, t: Tensor) -> Tensor:
            order = [name.index(c) for c in out if c in name]
            t = t.permute(order)
            for d, c in enumerate(out):
                t = t if c in name else t.unsqueeze(d)
            return t

        return spread(a, x) * spread(b, y)
    return torch.ops.aten.einsum.default(f"{a},{b}->{out}", [x, y])


def _sum_alone(labels: str, others: str, x: Tensor) -> tuple[Tensor, str]:
    gone = [d for d, c in enumerate(labels) if c not in others]
    return (torch.sum(x, gone) if gone else x), "".join(c for c in labels if c in others)


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    value = source.to(x.dtype) if source.dtype != x.dtype else source
    return value.expand(x.shape)


def _fill(x: Tensor, value: Any) -> Tensor:
    filled = torch.full_like(x, 0.0 if isinstance(value, Tensor) else value)
    return filled + value if isinstance(value, Tensor) else filled


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "atan": _atan,
    "atan2": _atan2,
    "asin": _asin,
    "acos": _acos,
    "sinh": _sinh,
    "cosh": _cosh,
    "tan": lambda x: torch.sin(x) / torch.cos(x),
    "asinh": _asinh,
    "acosh": _acosh,
    "atanh": _atanh,
    "exp2": _exp2,
    "log2": lambda x: torch.log(x) * (1 / math.log(2)),
    "log10": lambda x: torch.log(x) * (1 / math.log(10)),
    "erfc": lambda x: 1 - torch.erf(x),
    "hypot": lambda x, y: torch.sqrt(x * x + y * y),
    "pow.Scalar": _power_of,
    "fmod.Scalar": _fmod,
    "fmod.Tensor": _fmod,
    "round.decimals": _round_decimals,
    "copysign.Tensor": _copysign,
    "copysign.Scalar": lambda x, y: torch.abs(x) if y >= 0 else -torch.abs(x),
    "linalg_vector_norm": _vector_norm,
    "norm.ScalarOpt_dim": _vector_norm,
    "var_mean.dim": _var_mean,
    "var_mean.correction": _var_mean,
    "std_mean.dim": _std_mean,
    "std_mean.correction": _std_mean,
    "broadcast_in_dim": _broadcast,
    "prod": _prod,
    "prod.dim_int": _prod,
    "cdist": _cdist,
    "bilinear": _bilinear,
    "einsum": _einsum,
    "copy": _copy,
    "fill.Scalar": _fill,
    "fill.Tensor": _fill,
    "zero": lambda x: torch.zeros_like(x),
}
