"""Sums, means, extremes, variances, running sums and pooling."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hotloop.native.capture import Call, Ref
from hotloop.native.graph import Expr, Map, Reduce, View, constant, load
from hotloop.native.lowering.context import Context, Region, Rule, Time, full_region, register
from hotloop.native.lowering.layout import argument, find_dim
from hotloop.native.lowering.pointwise import binary, unary

__all__: list[str] = []


def _dims(context: Context, call: Call) -> tuple[list[int], bool]:
    """Reduced dimensions and whether they stay with size 1."""
    rank = len(context.shape(call.args[0]))
    found: Any = argument(call, 1, "dim")
    if call.op in ("mean", "sum", "max", "min") or found is None or found == []:
        found = list(range(rank))
    if isinstance(found, int):
        found = [found]
    if call.op in ("var.correction", "std.correction"):
        keep = call.kwargs.get("keepdim", False)
    elif call.op in ("var.dim", "std.dim", "linalg_vector_norm", "norm.ScalarOpt_dim"):
        keep = argument(call, 3, "keepdim", False)
        if call.op in ("linalg_vector_norm", "norm.ScalarOpt_dim"):
            found = argument(call, 2, "dim") or list(range(rank))
    else:
        keep = argument(call, 2, "keepdim", False)
    return sorted(find_dim(d, rank) for d in found), bool(keep)


def _pull(context: Context, call: Call, region: Any) -> list[tuple[Ref, Region]]:
    if isinstance(region, list):
        region = region[0] if region[0] is not None else region[1]
    dims, keep = _dims(context, call)
    shape = context.shape(call.args[0])
    rest = iter(listed for d, listed in enumerate(region) if not (keep and d in dims))
    return [(call.args[0], tuple(tuple(range(s)) if d in dims else next(rest) for d, s in enumerate(shape)))]


def _reduce(context: Context, kind: str, view: View, dims: list[int], keep: bool, scale: float = 1.0) -> View:
    rest = [d for d in range(len(view.shape)) if d not in dims]
    moved = view.permute([*rest, *dims])
    lead = [view.shape[d] for d in rest]
    flat = context.reshape(moved, (*lead, math.prod(view.shape[d] for d in dims)))
    out = context.temp(lead)
    context.emit(Reduce(kind, flat, out, scale))
    for d in dims if keep else ():
        out = out.insert(d)
    return out


def _lower(context: Context, call: Call, region: Any) -> Any:
    dims, keep = _dims(context, call)
    view = context.take(*_pull(context, call, region)[0])
    count = math.prod(view.shape[d] for d in dims)
    base = call.op.partition(".")[0]
    if base in ("var", "std"):
        return _variance(context, call, view, dims, keep, count)
    if base in ("linalg_vector_norm", "norm"):
        order = argument(call, 1, "ord", 2)
        if order not in (2, 2.0):
            raise context.refuse(call, "only the Euclidean norm (order 2) has a C form")
        squares = context.store(view.shape, unary("square", load(view)))
        total = _reduce(context, "sum", squares, dims, keep)
        return context.store(total.shape, unary("sqrt", load(total)))
    kind = {"mean": "sum", "sum": "sum", "amax": "max", "max": "max", "amin": "min", "min": "min"}[base]
    result = _reduce(context, kind, view, dims, keep, 1 / count if base == "mean" else 1.0)
    if isinstance(region, list):
        if region[1] is not None:
            raise context.refuse(call, "where the extreme lies has no C form; use .values or amax alone")
        return [result, None]
    return result


def _variance(context: Context, call: Call, view: View, dims: list[int], keep: bool, count: int) -> View:
    correction = call.kwargs.get("correction", 1)
    if call.op in ("var.dim", "std.dim"):
        correction = int(argument(call, 2, "unbiased", True))
    mean = _reduce(context, "sum", view, dims, True, 1 / count)
    centred = context.store(
        view.shape, unary("square", binary("sub", load(view), load(mean.expand(view.shape))))
    )
    total = _reduce(context, "sum", centred, dims, keep, 1 / max(count - float(correction or 0), 1e-30))
    if call.op.startswith("std"):
        return context.store(total.shape, unary("sqrt", load(total)))
    return total


def _time(context: Context, call: Call) -> Any:
    time = context.time(call.args[0])
    dims, keep = _dims(context, call)
    if time is None or time.dim in dims:
        return None
    moved = Time(time.dim if keep else time.dim - sum(d < time.dim for d in dims), time.shift, time.pinned)
    return moved if len(call.shapes) == 1 else [moved, None]


register(
    "mean mean.dim sum sum.dim_IntList amax amin max min max.dim min.dim var.correction var.dim std.correction std.dim "
    "linalg_vector_norm norm.ScalarOpt_dim",
    Rule(_pull, _lower, _time),
)

# ---- running sums


def _lower_running(context: Context, call: Call, region: Region) -> View:
    view = context.take(call.args[0])
    dim = find_dim(call.args[1], len(view.shape))
    out = context.temp(view.shape)
    for place in range(view.shape[dim]):
        part = view.slice(dim, place, 1)
        expr: Expr = load(part)
        if place:
            op = "mul" if call.op == "cumprod" else "add"
            expr = binary(op, load(out.slice(dim, place - 1, 1)), expr)
        context.emit(Map(part.shape, [(out.slice(dim, place, 1), expr)]))
    return context.subset(out, full_region(call.shapes[0]), region)


register(
    "cumsum cumprod",
    Rule(lambda c, call, _region: [(call.args[0], full_region(c.shape(call.args[0])))], _lower_running),
)

# ---- pooling


def _windows(context: Context, call: Call) -> tuple[list[list[list[int]]], list[int]]:
    """For each pooled dimension and output position the positions read (maybe outside), and the padding."""
    shape, out = context.shape(call.args[0]), call.shapes[0]
    dims = int(call.op.partition(".")[0].removesuffix("_with_indices").removesuffix("d")[-1])

    def spread(value: Any) -> list[int]:
        if isinstance(value, int):
            return [value] * dims
        return list(value) * (dims if len(value) == 1 else 1)

    sizes, outs = shape[-dims:], out[-dims:]
    if call.op.startswith("adaptive"):
        return [
            [list(range(p * s // o, -(-(p + 1) * s // o))) for p in range(o)]
            for s, o in zip(sizes, outs, strict=True)
        ], [0] * dims
    kernel = spread(call.args[1])
    stride = spread(argument(call, 2, "stride", []) or kernel)
    pads = spread(argument(call, 3, "padding", 0))
    dilation = spread(argument(call, 4, "dilation", 1)) if call.op.startswith("max") else [1] * dims
    return [
        [[p * st - pad + d * k for k in range(kk)] for p in range(o)]
        for o, kk, st, pad, d in zip(outs, kernel, stride, pads, dilation, strict=True)
    ], pads


def _pool_region(region: Any) -> Region:
    found: Region = region[0] if isinstance(region, list) else region
    return found


def _pull_pool(context: Context, call: Call, region: Any) -> list[tuple[Ref, Region]]:
    region = _pool_region(region)
    tables, _ = _windows(context, call)
    shape, time = context.shape(call.args[0]), context.times.get(call.name)
    wanted = list(region[: len(region) - len(tables)])
    for listed, table, dim in zip(
        region[-len(tables) :], tables, range(len(region) - len(tables), len(region)), strict=True
    ):
        if time is not None and time.dim == dim:
            # rows of the table advance by one; the position may lie before the first event
            found = {i + p for p in listed for i in table[0]}
        else:
            found = {i for p in listed for i in table[p] if 0 <= i < shape[dim]}
        wanted.append(tuple(sorted(found)))
    return [(call.args[0], tuple(wanted))]


def _lower_pool(context: Context, call: Call, region: Any) -> Any:
    wanted = _pool_region(region)
    tables, _ = _windows(context, call)
    ref, pulled = _pull_pool(context, call, region)[0]
    view = context.take(ref, pulled)
    several = isinstance(region, list)
    if several and region[1] is not None:
        raise context.refuse(call, "where the maximum lies has no C form")
    first = len(wanted) - len(tables)
    maximum = "max" in call.op
    divisor = argument(call, 6, "divisor_override") if call.op.startswith("avg") else None
    count_outside = argument(call, 5, "count_include_pad", True) if call.op.startswith("avg") else False
    time = context.times.get(call.name)
    for dim, table in enumerate(tables, start=first):
        places = {index: place for place, index in enumerate(pulled[dim])}
        rows = []
        for p in wanted[dim]:
            row = [i + p for i in table[0]] if time is not None and time.dim == dim else table[p]
            rows.append(([places[i] for i in row if i in places], len(row)))
        view = _pool_dim(context, view, dim, rows, maximum, bool(count_outside))
    if divisor:
        kernel = math.prod(len(table[0]) for table in tables)
        view = context.store(view.shape, binary("mul", load(view), constant(kernel / divisor)))
    return [view, *([None] * (len(call.shapes) - 1))] if several else view


def _pool_dim(
    context: Context,
    view: View,
    dim: int,
    rows: list[tuple[list[int], int]],
    maximum: bool,
    count_outside: bool,
) -> View:
    """Pool one dimension; runs of positions whose windows advance evenly become one loop."""
    # channels last, so that they are what a vector holds
    order = [d for d in range(len(view.shape)) if d != 1] + ([1] if len(view.shape) > 1 else [])
    shape = [len(rows) if d == dim else view.shape[d] for d in range(len(view.shape))]
    natural = context.temp([shape[d] for d in order])
    out = natural.permute([order.index(d) for d in range(len(order))])
    start = 0
    while start < len(rows):
        stop = start + 1
        step = rows[stop][0][0] - rows[start][0][0] if stop < len(rows) else 1
        while (
            stop < len(rows)
            and len(rows[stop][0]) == len(rows[start][0])
            and all(b - a == step for a, b in zip(rows[stop - 1][0], rows[stop][0], strict=True))
        ):
            stop += 1
        parts = [load(view.slice(dim, place, stop - start, step).permute(order)) for place in rows[start][0]]
        total = parts[0]
        for part in parts[1:]:
            total = binary("max" if maximum else "add", total, part)
        if not maximum:
            total = binary("mul", total, constant(1 / (rows[start][1] if count_outside else len(parts))))
        target = out.slice(dim, start, stop - start).permute(order)
        context.emit(Map(target.shape, [(target, total)]))
        start = stop
    return out


def _time_pool(context: Context, call: Call) -> Any:
    time = context.time(call.args[0])
    tables, pads = _windows(context, call)
    if time is None:
        return None
    first = len(call.shapes[0]) - len(tables)
    if time.dim >= first:
        table, pad = tables[time.dim - first], pads[time.dim - first]
        if (
            pad
            or len(table) < 2
            or any(b[0] - a[0] != 1 or len(a) != len(b) for a, b in itertools.pairwise(table))
        ):
            return None
        time = Time(time.dim, time.shift + table[0][-1], time.pinned)
    return time if len(call.shapes) == 1 else [time, *([None] * (len(call.shapes) - 1))]


register(
    "avg_pool1d avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d "
    "max_pool2d_with_indices max_pool1d_with_indices _adaptive_avg_pool2d",
    Rule(_pull_pool, _lower_pool, _time_pool),
)
