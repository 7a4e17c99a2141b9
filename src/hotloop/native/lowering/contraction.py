"""Linear layers, convolutions, matrix products and einsum: contractions with weights, or of two computed values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hotloop.native.capture import Call, Ref
from hotloop.native.graph import Array, Expr, Map, MatMul, Taps, View, constant, load
from hotloop.native.lowering.context import Context, Region, Rule, Time, register
from hotloop.native.lowering.layout import argument
from hotloop.native.lowering.pointwise import binary

__all__ = ["contract", "offsets_of", "project"]


def offsets_of(view: View) -> npt.NDArray[np.int64]:
    """The offset of every element of a view from its first, flattened, in elements."""
    total = np.zeros(view.shape, np.int64)
    for dim, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        total += (np.arange(size) * stride).reshape([-1 if d == dim else 1 for d in range(len(view.shape))])
    return total.reshape(-1)


def contract(
    context: Context,
    source: View,
    rows: npt.NDArray[np.int64],
    step: int,
    weight: Array,
    bias: Array | None,
    *,
    epilogue: Expr | None = None,
) -> View:
    """Emit a contraction with weights [taps, C, N]; returns [M, N]. `rows` [M, taps] are offsets from `source`."""
    out = context.temp((rows.shape[0], weight.shape[2]))
    base = View(source.buffer, (), (), source.offset, source.terms)
    context.emit(
        Taps(base, rows, step, np.ascontiguousarray(weight, np.float32), bias, out, epilogue, reach=source)
    )
    return out


def project(
    context: Context, view: View, weight: Array, bias: Array | None, epilogue: Expr | None = None
) -> View:
    """[..., C] times weight [N, C] transposed, plus bias: [M, N] with the leading dimensions flattened."""
    lead = View(view.buffer, view.shape[:-1], view.strides[:-1], view.offset, view.terms)
    step = view.strides[-1] if view.shape[-1] > 1 else 1
    rows = offsets_of(lead).reshape(-1, 1)
    return contract(context, view, rows, step, weight.T[None], bias, epilogue=epilogue)


# ---- linear


def _pull_linear(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    inner = tuple(range(context.shape(call.args[0])[-1]))
    return [(call.args[0], (*region[:-1], inner))]


def _lower_linear(context: Context, call: Call, region: Region) -> View:
    bias = argument(call, 2, "bias")
    picked = list(region[-1])
    weight = context.array(call.args[1])[picked]
    shift = None if bias is None else context.array(bias, "the bias")[picked]
    view = context.take(*_pull_linear(context, call, region)[0])
    flat = project(context, view, weight, shift)
    found = flat.reshape([len(listed) for listed in region])
    assert found is not None
    return found


def _time_linear(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    return time if time is not None and time.dim < len(call.shapes[0]) - 1 else None


register("linear", Rule(_pull_linear, _lower_linear, _time_linear))

# ---- products of two; each is an einsum


def _equation(context: Context, call: Call) -> tuple[str, str, str, list[Any]]:
    """Labels of the first and second operand and of the result, and the operands."""
    base = call.op.partition(".")[0]
    if base == "einsum":
        equation, operands = call.args[0].replace(" ", ""), list(call.args[1])
        if len(operands) != 2 or "." in equation:
            raise context.refuse(
                call, "einsum has a C form for two operands without an ellipsis; split it into such"
            )
        left, _, out = equation.partition("->")
        a, b = left.split(",")
        if not out:
            out = "".join(sorted(c for c in set(a + b) if (a + b).count(c) == 1))
        return a, b, out, operands
    first = 1 if base in ("addmm", "baddbmm", "addmv") else 0
    operands = [call.args[first], call.args[first + 1]]
    ranks = [len(context.shape(ref)) for ref in operands]
    letters = "zyxwvutsrq"
    batch = max(ranks[0], ranks[1], 2) - 2
    a = letters[batch - max(ranks[0] - 2, 0) : batch] + ("m" if ranks[0] > 1 else "") + "k"
    b = letters[batch - max(ranks[1] - 2, 0) : batch] + "k" + ("n" if ranks[1] > 1 else "")
    out = letters[:batch] + ("m" if ranks[0] > 1 else "") + ("n" if ranks[1] > 1 else "")
    return a, b, out, operands


def _pull_product(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    a, b, out, operands = _equation(context, call)
    listed = dict(zip(out, region, strict=True))
    found: list[tuple[Ref, Region]] = []
    for labels, ref in ((a, operands[0]), (b, operands[1])):
        shape = context.shape(ref)
        found.append(
            (
                ref,
                tuple(
                    (0,) if size == 1 else listed.get(c, tuple(range(size)))
                    for c, size in zip(labels, shape, strict=True)
                ),
            )
        )
    if call.op in ("addmm", "baddbmm"):
        found.append((call.args[0], _fit(context, call.args[0], region)))
    return found


def _fit(context: Context, ref: Ref, region: Region) -> Region:
    shape = context.shape(ref)
    extra = len(region) - len(shape)
    return tuple((0,) if size == 1 else region[d + extra] for d, size in enumerate(shape))


def _lower_product(context: Context, call: Call, region: Region) -> View:
    a, b, out, operands = _equation(context, call)
    pulled = _pull_product(context, call, region)
    sizes = {c: len(listed) for c, listed in zip(out, region, strict=True)}
    for labels, (_, part) in ((a, pulled[0]), (b, pulled[1])):
        for c, listed in zip(labels, part, strict=True):
            sizes[c] = max(sizes.get(c, 1), len(listed))
    summed = [c for c in a if c in b and c not in out]
    lonely = [c for c in a + b if c not in out and not (c in a and c in b)]
    if lonely:
        raise context.refuse(
            call, f"index {lonely[0]!r} is summed over in one operand alone; call .sum() on it before"
        )
    shared = [c for c in out if c in a and c in b]
    if context.is_constant(operands[0]) and not context.is_constant(operands[1]):
        a, b, operands, pulled = b, a, operands[::-1], [pulled[1], pulled[0], *pulled[2:]]
    view = context.take(*pulled[0])
    mine = [c for c in out if c in a and c not in shared]
    other = [c for c in out if c in b and c not in shared]
    if context.is_constant(operands[1]) and (not shared or all(sizes[c] == 1 for c in shared)):
        result = _with_weights(context, view, a, b, pulled[1], (shared + mine, other, summed), sizes)
    else:
        result = _of_two(context, view, context.take(*pulled[1]), a, b, (shared, mine, other, summed), sizes)
    order = [*shared, *mine, *other]
    result = result.permute([order.index(c) for c in out])
    if call.op in ("addmm", "baddbmm"):
        return _add_bias(context, call, region, result)
    return result


def _with_weights(
    context: Context,
    view: View,
    a: str,
    b: str,
    part: tuple[Ref, Region],
    labels: tuple[list[str], list[str], list[str]],
    sizes: dict[str, int],
) -> View:
    rows_of, other, summed = labels
    weight = context.array(part[0])[np.ix_(*part[1])]
    weight = np.squeeze(weight, tuple(i for i, c in enumerate(b) if c not in other and c not in summed))
    kept = [c for c in b if c in other or c in summed]
    flat = weight.transpose([kept.index(c) for c in (*other, *summed)]).reshape(
        math.prod(sizes[c] for c in other), math.prod(sizes[c] for c in summed)
    )
    aligned = view.permute([a.index(c) for c in (*(c for c in rows_of if c in a), *summed)])
    lead = len(aligned.shape) - len(summed)
    lead_shape = [sizes[c] for c in rows_of if c in a]
    joined = aligned.reshape((*lead_shape, flat.shape[1]))
    if joined is None:
        joined = context.reshape(aligned, (*lead_shape, flat.shape[1]))
    assert lead == len(lead_shape)
    result = project(context, joined, flat, None)
    return context.reshape(result, [sizes[c] for c in (*rows_of, *other)])


def _of_two(
    context: Context,
    x: View,
    y: View,
    a: str,
    b: str,
    labels: tuple[list[str], list[str], list[str], list[str]],
    sizes: dict[str, int],
) -> View:
    shared, mine, other, summed = labels

    def align(view: View, own: str, order: list[str], shape: list[int]) -> View:
        present = [c for c in order if c in own]
        moved = view.permute([own.index(c) for c in present])
        for place, c in enumerate(order):
            if c not in own:
                moved = moved.insert(place)
        moved = moved.expand([sizes[c] for c in order])
        return context.reshape(moved, shape)

    batch = [sizes[c] for c in shared]
    m, n, k = (math.prod(sizes[c] for c in part) for part in (mine, other, summed))
    left = align(x, a, [*shared, *mine, *summed], [*batch, m, k])
    right = align(y, b, [*shared, *summed, *other], [*batch, k, n])
    out = context.temp([*batch, m, n])
    context.emit(MatMul(left, right, out))
    return context.reshape(out, [sizes[c] for c in (*shared, *mine, *other)])


def _add_bias(context: Context, call: Call, region: Region, product: View) -> View:
    shape = [len(listed) for listed in region]
    beta, alpha = call.kwargs.get("beta", 1), call.kwargs.get("alpha", 1)
    bias: Expr = load(context.take(call.args[0], _fit(context, call.args[0], region)).expand(shape))
    total: Expr = load(product)
    if beta != 1:
        bias = binary("mul", bias, constant(beta))
    if alpha != 1:
        total = binary("mul", total, constant(alpha))
    return context.store(shape, binary("add", total, bias))


def _time_product(context: Context, call: Call) -> Time | None:
    a, b, out, operands = _equation(context, call)
    found: list[tuple[str, Time]] = []
    for labels, ref in ((a, operands[0]), (b, operands[1])):
        time = context.time(ref)
        if time is not None:
            found.append((labels[time.dim], time))
    kept = [(label, time) for label, time in found if label in out]
    if not kept or len({label for label, _ in kept}) > 1:
        # both along time (scores of queries against keys): the queries' time stays, keys are a window
        if len(kept) == 2 and kept[0][0] != kept[1][0]:
            label, time = kept[0]
            return Time(out.index(label), time.shift, True)
        return None
    label, time = kept[0]
    if a.count(label) and b.count(label) and len(found) < 2:
        other = operands[1] if found[0][0] in a and context.time(operands[0]) is not None else operands[0]
        if not context.is_constant(other):
            return None
        return Time(out.index(label), time.shift, True)
    changing = any(context.time(ref) is None and not context.is_constant(ref) for ref in operands)
    if call.op in ("addmm", "baddbmm"):
        changing |= not context.is_constant(call.args[0])
    return Time(out.index(label), max(t.shift for _, t in kept), changing or any(t.pinned for _, t in kept))


register("matmul mm bmm mv addmm baddbmm einsum", Rule(_pull_product, _lower_product, _time_product))

# ---- convolution


def _geometry(context: Context, call: Call) -> dict[str, Any]:
    weight = context.array(call.args[1])
    dims = weight.ndim - 2

    def spread(value: Any) -> list[int]:
        if isinstance(value, int):
            return [value] * dims
        return list(value) * (dims if len(value) == 1 else 1)

    if call.op == "convolution":
        bias, stride, padding, dilation, transposed, _, groups = call.args[2:9]
        if transposed:
            raise context.refuse(call, "transposed convolution has no C form; upsample and convolve instead")
    else:
        bias = argument(call, 2, "bias")
        stride, padding = argument(call, 3, "stride", 1), argument(call, 4, "padding", 0)
        dilation, groups = argument(call, 5, "dilation", 1), argument(call, 6, "groups", 1)
    dilation = spread(dilation)
    kernel = list(weight.shape[2:])
    if isinstance(padding, str):
        spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pads = [0] * dims if padding == "valid" else [span // 2 for span in spans]
    else:
        pads = spread(padding)
    return {
        "weight": weight,
        "bias": None if bias is None else context.array(bias, "the bias"),
        "stride": spread(stride),
        "pads": pads,
        "dilation": dilation,
        "kernel": kernel,
        "groups": groups,
    }


def _spatial(context: Context, call: Call, region: Region, g: dict[str, Any]) -> list[list[list[int]]]:
    """For each spatial dimension, for each output position, where each tap reads (maybe outside)."""
    return [
        [[p * stride - pad + d * k for k in range(size)] for p in listed]
        for listed, stride, pad, d, size in zip(
            region[2:], g["stride"], g["pads"], g["dilation"], g["kernel"], strict=True
        )
    ]


def _pull_conv(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    shape, g = context.shape(call.args[0]), _geometry(context, call)
    time = context.times.get(call.name)
    wanted = []
    for dim, table in enumerate(_spatial(context, call, region, g)):
        found = {i for row in table for i in row}
        if time is None or time.dim != dim + 2:
            found = {i for i in found if 0 <= i < shape[dim + 2]} or {0}
        wanted.append(tuple(sorted(found)))
    return [(call.args[0], (region[0], tuple(range(shape[1])), *wanted))]


def _lower_conv(context: Context, call: Call, region: Region) -> View:
    g = _geometry(context, call)
    (ref, pulled) = _pull_conv(context, call, region)[0]
    time = context.times.get(call.name)
    tables = _spatial(context, call, region, g)
    picked = list(region[1])
    bias = None if g["bias"] is None else g["bias"][picked]
    if time is not None and len(pulled[time.dim]) > 1 and g["groups"] == 1:
        return _split_conv(context, ref, pulled, region, g, tables, time.dim, bias)
    view = context.take(ref, pulled)
    view, have = _pad_for(context, view, pulled, tables, time)
    return _convolve(context, view, have, region, g, tables, bias, None)


def _pad_for(
    context: Context, view: View, have: Region, tables: list[list[list[int]]], time: Time | None
) -> tuple[View, list[list[int]]]:
    """The view with zeros around it wherever a tap reads outside, and which positions it then holds."""
    positions = [list(listed) for listed in have[2:]]
    spread = [sorted({i for row in table for i in row}) for table in tables]
    if all(set(s) <= set(p) for s, p in zip(spread, positions, strict=True)):
        return view, positions
    out = context.fixed((view.shape[0], *(len(s) for s in spread), view.shape[1]))
    out = out.permute([0, len(spread) + 1, *range(1, len(spread) + 1)])
    target, source = out, view
    for dim, (s, p) in enumerate(zip(spread, positions, strict=True), start=2):
        inside = [i for i in s if i in set(p)]
        if inside:
            target = target.slice(dim, s.index(inside[0]), len(inside))
            source = source.slice(dim, p.index(inside[0]), len(inside))

    natural = [0, *range(2, len(target.shape)), 1]
    target, source = target.permute(natural), source.permute(natural)
    context.emit(Map(target.shape, [(target, load(source))]))
    return out, spread


def _convolve(
    context: Context,
    view: View,
    have: list[list[int]],
    region: Region,
    g: dict[str, Any],
    tables: list[list[list[int]]],
    bias: Array | None,
    before: View | None,
    taps: list[tuple[int, ...]] | None = None,
) -> View:
    """Emit the contraction(s); returns [N, O, positions…]. `before` [M, O] is added; `taps`: only those."""
    places = [{index: place for place, index in enumerate(listed)} for listed in have]
    kernel = taps if taps is not None else list(itertools.product(*(range(k) for k in g["kernel"])))
    spatial = [len(table) for table in tables]
    strides = view.strides[2:]
    per_dim = [
        np.array([[place[i] * stride if i in place else 0 for i in row] for row in table], np.int64)
        for table, place, stride in zip(tables, places, strides, strict=True)
    ]
    rows = np.zeros((view.shape[0], *spatial, len(kernel)), np.int64)
    rows += (np.arange(view.shape[0]) * view.strides[0]).reshape([-1] + [1] * (len(spatial) + 1))
    for t, tap in enumerate(kernel):
        for dim, k in enumerate(tap):
            column = per_dim[dim][:, k]
            rows[..., t] += column.reshape([-1 if d == dim + 1 else 1 for d in range(len(spatial) + 1)])
    flat = rows.reshape(-1, len(kernel))
    weight, groups = g["weight"], g["groups"]
    picked = list(region[1])
    shape = [view.shape[0], *spatial, len(picked)]
    taken = np.stack([weight[(slice(None), slice(None), *tap)] for tap in kernel])  # [taps, O, C / groups]
    step = view.strides[1] if view.shape[1] > 1 else 1
    epilogue = None if before is None else binary("add", Expr("acc"), load(before))
    if groups == 1:
        out = contract(
            context, view, flat, step, taken[:, picked].transpose(0, 2, 1), bias, epilogue=epilogue
        )
    elif weight.shape[1] == 1 and weight.shape[0] == groups:
        out = _depthwise(context, view, flat, step, taken[:, picked, 0], bias, picked)
    else:
        out = _grouped(context, view, flat, step, taken, bias, picked, groups)
    found = out.reshape(shape)
    assert found is not None
    return found.permute([0, len(shape) - 1, *range(1, len(shape) - 1)])


def _depthwise(
    context: Context,
    view: View,
    rows: npt.NDArray[np.int64],
    step: int,
    weight: Array,
    bias: Array | None,
    picked: list[int],
) -> View:
    """One channel to one channel: multiply and add along the channels."""
    count, taps = rows.shape
    channels = len(picked)
    first = picked[0] * step
    # rows that advance evenly are one view for each tap
    even = count == 1 or all(len(set(np.diff(rows[:, t]).tolist())) == 1 for t in range(taps))
    out = context.temp((count, channels))

    for start in [0] if even else range(count):
        size = count if even else 1
        stride = int(rows[1, 0] - rows[0, 0]) if even and count > 1 else 0
        total: Expr | None = None if bias is None else load(context.const(bias).expand((size, channels)))
        for t in range(taps):
            part = View(
                view.buffer,
                (size, channels),
                (stride, step),
                view.offset + int(rows[start, t]) + first,
                view.terms,
            )
            term = binary("mul", load(part), load(context.const(weight[t]).expand((size, channels))))
            total = term if total is None else binary("add", total, term)
        assert total is not None
        context.emit(Map((size, channels), [(out.slice(0, start, size), total)]))
    return out


def _grouped(
    context: Context,
    view: View,
    rows: npt.NDArray[np.int64],
    step: int,
    weight: Array,
    bias: Array | None,
    picked: list[int],
    groups: int,
) -> View:
    outputs, inputs = weight.shape[1] // groups, weight.shape[2]
    out = context.temp((rows.shape[0], len(picked)))
    for group in range(groups):
        mine = [i for i, o in enumerate(picked) if o // outputs == group]
        if not mine:
            continue
        part = weight[:, [picked[i] for i in mine]].transpose(0, 2, 1)
        base = View(view.buffer, (), (), view.offset + group * inputs * step, view.terms)
        shift = None if bias is None else bias[mine]
        target = out.slice(1, mine[0], len(mine))
        context.emit(Taps(base, rows, step, np.ascontiguousarray(part), shift, target, reach=view))
    return out


def _split_conv(
    context: Context,
    ref: Ref,
    pulled: Region,
    region: Region,
    g: dict[str, Any],
    tables: list[list[list[int]]],
    dim: int,
    bias: Array | None,
) -> View:
    """A state machine's convolution: what the old positions contribute is summed before the event is there."""
    newest = pulled[dim][-1]
    table = tables[dim - 2]
    old_taps = [k for k, i in enumerate(table[0]) if i != newest]
    new_taps = [k for k, i in enumerate(table[0]) if i == newest]
    every = [range(k) for k in g["kernel"]]

    def part(
        indices: list[int], positions: tuple[int, ...], shift: Array | None, before: View | None
    ) -> View:
        taps = list(itertools.product(*(indices if d == dim - 2 else every[d] for d in range(len(every)))))
        wanted = (*pulled[:dim], positions, *pulled[dim + 1 :])
        view = context.take(ref, wanted)
        view, have = _pad_for(
            context,
            view,
            wanted,
            [
                [[i for k, i in enumerate(row) if k in indices] for row in t] if d == dim - 2 else t
                for d, t in enumerate(tables)
            ],
            None,
        )
        return _convolve(context, view, have, region, g, tables, shift, before, taps)

    with context.before_event():
        old = part(old_taps, pulled[dim][:-1], bias, None)
    natural = old.permute([0, *range(2, len(old.shape)), 1])
    flat = context.reshape(natural, (natural.count // natural.shape[-1], natural.shape[-1]))
    return part(new_taps, (newest,), None, flat)


def _time_conv(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    if time is None or time.dim < 2:
        return None
    g = _geometry(context, call)
    d = time.dim - 2
    if g["stride"][d] != 1:
        return None
    return Time(time.dim, time.shift - g["pads"][d] + g["dilation"][d] * (g["kernel"][d] - 1), time.pinned)


register(
    "conv1d conv2d conv3d convolution conv1d.padding conv2d.padding",
    Rule(_pull_conv, _lower_conv, _time_conv),
)
