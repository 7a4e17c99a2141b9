"""Normalisations and softmax."""

from __future__ import annotations

import numpy as np

from hotloop.native.capture import Call, Ref
from hotloop.native.graph import Array, Expr, Norm, Softmax, View, load
from hotloop.native.lowering.context import Context, Region, Rule, Time, full_region, register
from hotloop.native.lowering.layout import argument, find_dim
from hotloop.native.lowering.pointwise import binary

__all__: list[str] = []

# ---- softmax


def _dim(context: Context, call: Call) -> int:
    return find_dim(call.args[1], len(call.shapes[0]))


def _pull_softmax(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    dim = _dim(context, call)
    return [(call.args[0], (*region[:dim], tuple(range(call.shapes[0][dim])), *region[dim + 1 :]))]


def _lower_softmax(context: Context, call: Call, region: Region) -> View:
    dim = _dim(context, call)
    ref, pulled = _pull_softmax(context, call, region)[0]
    view = context.take(ref, pulled)
    order = [d for d in range(len(view.shape)) if d != dim] + [dim]
    source = view.permute(order)
    out = context.temp(source.shape)
    context.emit(Softmax(source, out, log="log" in call.op))
    result = out.permute([order.index(d) for d in range(len(order))])
    return context.subset(result, pulled, region)


def _time_softmax(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    return None if time is None or time.dim == _dim(context, call) else time


register(
    "softmax.int _softmax log_softmax.int _log_softmax _safe_softmax",
    Rule(_pull_softmax, _lower_softmax, _time_softmax),
)

# ---- layer norm, rms norm


def _parts(context: Context, call: Call) -> tuple[int, Ref | None, Ref | None, float]:
    """Normalised dimensions, weight, bias, eps."""
    dims = len(call.args[1])
    if "rms" in call.op:
        eps = argument(call, 3, "eps")
        return dims, argument(call, 2, "weight"), None, 1.1920929e-07 if eps is None else float(eps)
    return dims, argument(call, 2, "weight"), argument(call, 3, "bias"), float(argument(call, 4, "eps", 1e-5))


def _first(region: Region | list[Region | None]) -> Region:
    if isinstance(region, list):
        assert region[0] is not None
        return region[0]
    return region


def _pull_norm(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    region = _first(region)
    dims = _parts(context, call)[0]
    return [(call.args[0], (*region[:-dims], *full_region(call.shapes[0][-dims:])))]


def _lower_norm(context: Context, call: Call, region: Region) -> View | list[View | None]:
    wanted = _first(region)
    dims, weight, bias, eps = _parts(context, call)
    ref, pulled = _pull_norm(context, call, wanted)[0]
    view = context.take(ref, pulled)
    lead, inner = view.shape[:-dims], int(np.prod(view.shape[-dims:]))
    flat = context.reshape(view, (*lead, inner))
    out = context.temp(flat.shape)

    def vector(item: Ref | None) -> View | None:
        return None if item is None else context.const(context.array(item).reshape(-1))

    kind = "rms" if "rms" in call.op else "layer"
    context.emit(Norm(kind, flat, out, vector(weight), vector(bias), eps))
    result = context.subset(context.reshape(out, view.shape), pulled, wanted)
    return [result, None, None][: len(call.shapes)] if isinstance(region, list) else result


def _time_norm(context: Context, call: Call) -> Time | list[Time | None] | None:
    time = context.time(call.args[0])
    if time is None or time.dim >= len(call.shapes[0]) - _parts(context, call)[0]:
        return None
    return time if len(call.shapes) == 1 else [time, None, None]


register("layer_norm native_layer_norm rms_norm", Rule(_pull_norm, _lower_norm, _time_norm))

# ---- batch norm in evaluation mode: one multiplication and addition for each channel


def _pull_batch(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    return [(call.args[0], _first(region))]


def _statistics(context: Context, call: Call) -> tuple[Array, Array]:
    """Scale and shift of each channel, computed in float64."""
    weight, bias, mean, variance = call.args[1:5]
    if "legit_no_training" in call.op:
        eps = call.args[6]
    elif call.op == "instance_norm":
        eps = call.args[7]
    else:
        eps = call.args[7] if len(call.args) > 7 else 1e-5
        if bool(call.args[5]) or mean is None:
            raise context.refuse(
                call, "batch norm uses the batch's own statistics; call model.eval() before building"
            )
    m, v = (context.array(item).astype(np.float64) for item in (mean, variance))
    scale = 1.0 / np.sqrt(v + float(eps))
    if weight is not None:
        scale = scale * context.array(weight)
    shift = -m * scale
    if bias is not None:
        shift = shift + context.array(bias)
    return scale.astype(np.float32), shift.astype(np.float32)


def _lower_batch(context: Context, call: Call, region: Region) -> View | list[View | None]:
    wanted = _first(region)
    scale, shift = _statistics(context, call)
    shape = [len(listed) for listed in wanted]
    # channels last, as convolutions leave them
    order = [0, *range(2, len(shape)), 1]
    view = context.take(call.args[0], wanted).permute(order)
    picked = list(wanted[1])
    factors, shifts = (load(context.const(item[picked]).expand(view.shape)) for item in (scale, shift))
    out = context.store(view.shape, binary("add", binary("mul", load(view), factors), shifts))
    result = out.permute([order.index(d) for d in range(len(order))])
    return [result, *([None] * (len(call.shapes) - 1))] if isinstance(region, list) else result


def _time_batch(context: Context, call: Call) -> Time | list[Time | None] | None:
    time = context.time(call.args[0])
    if time is None or time.dim == 1:
        return None
    return time if len(call.shapes) == 1 else [time, *([None] * (len(call.shapes) - 1))]


register("batch_norm _native_batch_norm_legit_no_training", Rule(_pull_batch, _lower_batch, _time_batch))

# ---- group norm, instance norm: layer norm of a part, then one multiplication and addition for each channel


def _pull_group(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    return [(call.args[0], full_region(context.shape(call.args[0])))]


def _lower_group(context: Context, call: Call, region: Region) -> View:
    shape = context.shape(call.args[0])
    if call.op == "group_norm":
        groups, weight, bias, eps = (
            call.args[1],
            argument(call, 2, "weight"),
            argument(call, 3, "bias"),
            argument(call, 4, "eps", 1e-5),
        )
    else:
        groups, weight, bias, eps = shape[1], call.args[1], call.args[2], call.args[7]
        if not call.args[5]:
            raise context.refuse(call, "instance norm with running statistics has no C form; use batch norm")
    view = context.take(call.args[0])
    flat = context.reshape(view, (shape[0], groups, int(np.prod(shape[1:])) // groups))
    normed = context.temp(flat.shape)
    context.emit(Norm("layer", flat, normed, None, None, float(eps)))
    result = context.reshape(normed, shape)
    if weight is not None:
        expr: Expr = load(result)

        def channel(item: Ref) -> Expr:
            column = context.const(context.array(item))
            for _ in range(len(shape) - 2):
                column = column.insert(len(column.shape))
            return load(column.expand(shape))

        expr = binary("mul", expr, channel(weight))
        result = context.store(shape, binary("add", expr, channel(bias)) if bias is not None else expr)
    return context.subset(result, full_region(shape), region)


register("group_norm instance_norm", Rule(_pull_group, _lower_group))
