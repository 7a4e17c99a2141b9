"""Expressions as C on vectors of 16."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hotloop.native.emit.writer import Writer
from hotloop.native.graph import Expr, View

__all__ = ["emit_expression", "number"]

_CALLS = {
    "neg": "vneg",
    "exp": "vexp",
    "log": "vlog",
    "log1p": "vlog1p",
    "expm1": "vexpm1",
    "sqrt": "vsqrt",
    "abs": "vabs",
    "sign": "vsign",
    "floor": "vfloor",
    "ceil": "vceil",
    "round": "vround",
    "trunc": "vtrunc",
    "tanh": "vtanh",
    "sigmoid": "vsigmoid",
    "silu": "vsilu",
    "gelu": "vgelu",
    "gelu_tanh": "vgelu_tanh",
    "sin": "vsin",
    "cos": "vcos",
    "erf": "verf",
    "softplus": "vsoftplus",
    "pow": "vpow",
}
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def number(value: float) -> str:
    """A float32 as a C literal."""
    value = float(np.float32(value))
    if math.isnan(value):
        return '__builtin_nanf("")'
    if math.isinf(value):
        return "__builtin_inff()" if value > 0 else "-__builtin_inff()"
    return f"{value!r}f" if "e" in repr(value) or "." in repr(value) else f"{value!r}.0f"


def emit_expression(
    writer: Writer, expr: Expr, read: Callable[[View], str], known: dict[int, str], acc: str = ""
) -> str:
    """Emit statements for `expr`; returns the variable (or literal) that holds it.

    `read` gives the C text of loading a view at the current position; `known` maps ids of expressions that were
    computed already at this position to their variables.
    """
    if id(expr) in known:
        return known[id(expr)]
    if expr.op == "acc":
        return acc
    if expr.op == "const":
        return f"bc({number(expr.value)})"
    if expr.op == "load":
        assert expr.view is not None
        text = read(expr.view)
    else:
        text = _combine(expr, [emit_expression(writer, arg, read, known, acc) for arg in expr.args])
    name = writer.name("e")
    writer.line(f"V {name} = {text};")
    known[id(expr)] = name
    return name


def _combine(expr: Expr, args: list[str]) -> str:
    op = expr.op
    if op in _CALLS:
        return f"{_CALLS[op]}({', '.join(args)})"
    if op in _SIGNS:
        return f"{args[0]} {_SIGNS[op]} {args[1]}"
    if op in _COMPARISONS:
        return f"vbool((I)({args[0]} {_COMPARISONS[op]} {args[1]}))"
    if op in ("max", "min"):
        # a number known to be one may stand first, where the other's not-a-number wins
        for known, other in ((0, 1), (1, 0)):
            if expr.args[known].op == "const":
                return f"{op}2({args[known]}, {args[other]})"
        return f"v{op}({args[0]}, {args[1]})"
    forms = {
        "relu": "max2(bc(0.0f), {0})",
        "square": "{0} * {0}",
        "rsqrt": "1.0f / vsqrt({0})",
        "reciprocal": "1.0f / {0}",
        "logical_not": "vbool((I)({0} == 0.0f))",
        "where": "sel((I)({0} != 0.0f), {1}, {2})",
        "and": "vbool((I)({0} != 0.0f) & (I)({1} != 0.0f))",
        "or": "vbool((I)({0} != 0.0f) | (I)({1} != 0.0f))",
    }
    return forms[op].format(*args)
