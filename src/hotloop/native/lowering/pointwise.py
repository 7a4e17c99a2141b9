"""Elementwise operations as expressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hotloop.native.capture import Call, Ref
from hotloop.native.graph import Expr, View, constant, load
from hotloop.native.lowering.context import Context, Region, Rule, Time, register
from hotloop.native.lowering.layout import argument

__all__ = ["affine", "binary", "unary"]

Build = Callable[[Call, list[Expr]], Expr]


def unary(op: str, x: Expr) -> Expr:
    """op(x)."""
    return Expr(op, (x,))


def binary(op: str, x: Expr, y: Expr) -> Expr:
    """op(x, y)."""
    return Expr(op, (x, y))


def affine(x: Expr, scale: float, shift: float = 0.0) -> Expr:
    """scale * x + shift."""
    if scale != 1.0:
        x = binary("mul", x, constant(scale))
    return x if shift == 0.0 else binary("add", x, constant(shift))


def _operands(call: Call, count: int) -> list[Any]:
    """The first `count` arguments; a missing one is None."""
    return [call.args[i] if i < len(call.args) else None for i in range(count)]


def _broadcast(context: Context, ref: Ref, region: Region, rank: int) -> Region:
    shape = context.shape(ref)
    extra = rank - len(shape)
    return tuple((0,) if size == 1 else region[d + extra] for d, size in enumerate(shape))


def _time(count: int) -> Callable[[Context, Call], Time | None]:
    def find(context: Context, call: Call) -> Time | None:
        rank = len(call.shapes[0])
        found: list[Time] = []
        refs = [value for value in _operands(call, count) if isinstance(value, Ref)]
        for ref in refs:
            time = context.time(ref)
            if time is not None:
                found.append(Time(time.dim + rank - len(context.shape(ref)), time.shift, time.pinned))
        if not found or len({time.dim for time in found}) > 1:
            return None
        dim, pinned = found[0].dim, any(time.pinned for time in found)
        for ref in refs:
            if context.time(ref) is not None:
                continue
            own = dim - (rank - len(context.shape(ref)))
            several = own >= 0 and context.shape(ref)[own] != 1
            if several and not context.is_constant(ref):
                return None
            # a value for each position of the window (a mask, say) is right for the newest one only, and what is
            # computed from the window (its mean, say) was another one at older positions
            pinned |= several or not context.is_constant(ref)
        return Time(dim, max(time.shift for time in found), pinned)

    return find


def _rule(count: int, build: Build) -> Rule:
    def pull(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
        refs = [value for value in _operands(call, count) if isinstance(value, Ref)]
        return [(ref, _broadcast(context, ref, region, len(region))) for ref in refs]

    def lower(context: Context, call: Call, region: Region) -> View:
        shape = [len(listed) for listed in region]
        exprs: list[Expr] = []
        for value in _operands(call, count):
            if isinstance(value, Ref):
                if context.is_constant(value) and math.prod(context.shape(value)) == 1:
                    exprs.append(constant(context.array(value).reshape(-1)[0].item()))
                else:
                    view = context.take(value, _broadcast(context, value, region, len(region)))
                    exprs.append(load(view.expand(shape)))
            elif value is None:
                exprs.append(Expr("none"))
            else:
                exprs.append(constant(float(value)))
        return context.store(shape, build(call, exprs))

    return Rule(pull, lower, _time(count))


def _one(names: str, op: str | Build) -> None:
    build: Build = (lambda _call, x: unary(op, x[0])) if isinstance(op, str) else op
    register(names, _rule(1, build))


def _two(names: str, op: str | Build) -> None:
    build: Build = (lambda _call, x: binary(op, x[0], x[1])) if isinstance(op, str) else op
    register(names, _rule(2, build))


_SIMPLE = (
    "neg exp log log1p expm1 sqrt rsqrt abs sign floor ceil tanh sigmoid sin cos relu erf reciprocal square "
    "round trunc logical_not"
)
for _name in _SIMPLE.split():
    _one(_name, _name)
_one("silu", "silu")
_one("relu6", lambda _c, x: binary("min", binary("max", x[0], constant(0)), constant(6)))
_one(
    "hardtanh",
    lambda c, x: binary(
        "min",
        binary("max", x[0], constant(argument(c, 1, "min_val", -1.0))),
        constant(argument(c, 2, "max_val", 1.0)),
    ),
)
_one(
    "gelu",
    lambda c, x: unary("gelu_tanh" if argument(c, 1, "approximate", "none") == "tanh" else "gelu", x[0]),
)
_one("mish", lambda _c, x: binary("mul", x[0], unary("tanh", unary("softplus", x[0]))))
_one("bitwise_not", "logical_not")
_one("isnan", lambda _c, x: binary("ne", x[0], x[0]))
_one("log_sigmoid", lambda _c, x: unary("neg", unary("softplus", unary("neg", x[0]))))
_one(
    "hardsigmoid",
    lambda _c, x: binary("min", binary("max", affine(x[0], 1 / 6, 0.5), constant(0)), constant(1)),
)
_one(
    "hardswish",
    lambda _c, x: binary(
        "mul", x[0], binary("min", binary("max", affine(x[0], 1 / 6, 0.5), constant(0)), constant(1))
    ),
)
_one("softsign", lambda _c, x: binary("div", x[0], binary("add", unary("abs", x[0]), constant(1))))


def _leaky(call: Call, x: list[Expr]) -> Expr:
    slope = constant(argument(call, 1, "negative_slope", 0.01))
    return Expr("where", (binary("lt", x[0], constant(0)), binary("mul", x[0], slope), x[0]))


def _elu(call: Call, x: list[Expr]) -> Expr:
    alpha = argument(call, 1, "alpha", 1.0)
    scale, inner = argument(call, 2, "scale", 1.0), argument(call, 3, "input_scale", 1.0)
    low = affine(unary("expm1", affine(binary("min", x[0], constant(0)), inner)), alpha)
    return affine(Expr("where", (binary("lt", x[0], constant(0)), low, x[0])), scale)


def _selu(_call: Call, x: list[Expr]) -> Expr:
    # Klambauer et al. 2017, the constants of the self-normalising fixed point
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    low = affine(unary("expm1", binary("min", x[0], constant(0))), alpha)
    return affine(Expr("where", (binary("lt", x[0], constant(0)), low, x[0])), scale)


def _softplus(call: Call, x: list[Expr]) -> Expr:
    beta = argument(call, 1, "beta", 1.0)
    return affine(unary("softplus", affine(x[0], beta)), 1 / beta)


def _clamp(call: Call, x: list[Expr]) -> Expr:
    low, high = argument(call, 1, "min"), argument(call, 2, "max")
    if call.op in ("clamp_min",):
        low, high = call.args[1], None
    if call.op in ("clamp_max",):
        low, high = None, call.args[1]
    result = x[0]
    if low is not None:
        result = binary("max", result, constant(low))
    return result if high is None else binary("min", result, constant(high))


_one("leaky_relu", _leaky)
_one("elu celu", _elu)
_one("selu", _selu)
_one("softplus", _softplus)
_one("clamp clamp_min clamp_max", _clamp)


def _add(call: Call, x: list[Expr]) -> Expr:
    alpha = call.kwargs.get("alpha", 1)
    return binary("add", x[0], x[1] if alpha == 1 else affine(x[1], alpha))


def _sub(call: Call, x: list[Expr]) -> Expr:
    alpha = call.kwargs.get("alpha", 1)
    first, second = (x[1], x[0]) if call.op.startswith("rsub") else (x[0], x[1])
    return binary("sub", first, second if alpha == 1 else affine(second, alpha))


def _div(call: Call, x: list[Expr]) -> Expr:
    mode = call.kwargs.get("rounding_mode")
    if mode is None and x[1].op == "const" and x[1].value != 0:
        return binary("mul", x[0], constant(1 / x[1].value))
    result = binary("div", x[0], x[1])
    return result if mode is None else unary("floor" if mode == "floor" else "trunc", result)


def _pow(_call: Call, x: list[Expr]) -> Expr:
    base, exponent = x
    if exponent.op == "const":
        value = exponent.value
        if value == 2.0:
            return unary("square", base)
        if value == 0.5:
            return unary("sqrt", base)
        if value == -0.5:
            return unary("rsqrt", base)
        if value == -1.0:
            return unary("reciprocal", base)
        if value == float(int(value)) and 0 <= value <= 16:
            return _power(base, int(value))
    return binary("pow", base, exponent)


def _power(base: Expr, exponent: int) -> Expr:
    if exponent == 0:
        return constant(1)
    half = base if exponent == 1 else _power(base, exponent // 2)
    if exponent == 1:
        return half
    squared = unary("square", half)
    return binary("mul", squared, base) if exponent % 2 else squared


_two("add.Tensor add.Scalar", _add)
_two("sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor", _sub)
_two("mul.Tensor mul.Scalar multiply.Tensor", "mul")
_two("div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor", _div)
_two("floor_divide floor_divide.Scalar", lambda _c, x: unary("floor", binary("div", x[0], x[1])))
_two(
    "remainder.Scalar remainder.Tensor",
    lambda _c, x: binary("sub", x[0], binary("mul", x[1], unary("floor", binary("div", x[0], x[1])))),
)
_two("pow.Tensor_Scalar pow.Tensor_Tensor", _pow)
_two("maximum max.other", "max")
_two("minimum min.other", "min")
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _two(f"{_name}.Scalar {_name}.Tensor", _name)
_two("logical_and bitwise_and.Tensor __and__.Tensor", "and")
_two("logical_or bitwise_or.Tensor __or__.Tensor", "or")
_two(
    "logical_xor bitwise_xor.Tensor",
    lambda _c, x: binary("ne", binary("ne", x[0], constant(0)), binary("ne", x[1], constant(0))),
)
register(
    "where.self where.ScalarOther where.ScalarSelf where.Scalar",
    _rule(3, lambda _c, x: Expr("where", (x[0], x[1], x[2]))),
)
register(
    "masked_fill.Scalar masked_fill.Tensor",
    _rule(3, lambda _c, x: Expr("where", (x[1], x[2], x[0]))),
)
register(
    "addcmul",
    _rule(3, lambda c, x: binary("add", x[0], affine(binary("mul", x[1], x[2]), c.kwargs.get("value", 1)))),
)
register(
    "addcdiv",
    _rule(3, lambda c, x: binary("add", x[0], affine(binary("div", x[1], x[2]), c.kwargs.get("value", 1)))),
)
register(
    "lerp.Scalar lerp.Tensor",
    _rule(3, lambda _c, x: binary("add", x[0], binary("mul", x[2], binary("sub", x[1], x[0])))),
)


# ---- PReLU: one slope for each channel, dimension 1


def _pull_prelu(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    return [(call.args[0], region)]


def _lower_prelu(context: Context, call: Call, region: Region) -> View:
    shape = [len(listed) for listed in region]
    slopes = context.array(call.args[1])
    view = context.take(call.args[0], region)
    if slopes.size == 1:
        slope = constant(slopes.reshape(-1)[0].item())
    else:
        column = context.const(slopes[list(region[1])])
        for _ in range(len(shape) - 2):
            column = column.insert(len(column.shape))
        slope = load(column.expand(shape))
    x = load(view)
    return context.store(shape, Expr("where", (binary("lt", x, constant(0)), binary("mul", x, slope), x)))


register(
    "prelu _prelu_kernel",
    Rule(
        _pull_prelu, _lower_prelu, lambda c, call: t if (t := c.time(call.args[0])) and t.dim != 1 else None
    ),
)

# ---- GLU: halves of one dimension


def _halves(context: Context, call: Call, region: Region) -> tuple[Region, Region]:
    rank = len(region)
    dim = argument(call, 1, "dim", -1) % rank
    size = call.shapes[0][dim]
    second = tuple(i + size for i in region[dim])
    return region, (*region[:dim], second, *region[dim + 1 :])


def _pull_glu(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    first, second = _halves(context, call, region)
    return [(call.args[0], first), (call.args[0], second)]


def _lower_glu(context: Context, call: Call, region: Region) -> View:
    first, second = (context.take(call.args[0], part) for part in _halves(context, call, region))
    gate = unary("sigmoid", load(second))
    return context.store([len(listed) for listed in region], binary("mul", load(first), gate))


def _time_glu(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    dim = argument(call, 1, "dim", -1) % len(call.shapes[0])
    return None if time is None or time.dim == dim else time


register("glu", Rule(_pull_glu, _lower_glu, _time_glu))
