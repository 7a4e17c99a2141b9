"""Operations that only say where elements lie: views, permutations, slices, and the joins and pads that copy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from hotloop.native.capture import Call, Ref
from hotloop.native.graph import Map, View, constant, load
from hotloop.native.lowering.context import Context, Region, Rule, Time, full_region, register

__all__ = ["argument", "find_dim"]


def argument(call: Call, index: int, name: str, default: Any = None) -> Any:
    """A positional or keyword argument of a call."""
    if index < len(call.args):
        return call.args[index]
    return call.kwargs.get(name, default)


def find_dim(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim + rank if dim < 0 else dim


def _moved(time: Time | None, dim: int | None, shift: int | None = None) -> Time | None:
    if time is None or dim is None:
        return None
    return Time(dim, time.shift if shift is None else shift, time.pinned)


# ---- nothing but another name


def _same(_context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    return [(call.args[0], region)]


register(
    "contiguous clone detach alias dropout feature_dropout alpha_dropout lift_fresh_copy lift_fresh "
    "to.dtype to.device to.dtype_layout to.other _to_copy type_as",
    Rule(
        _same,
        lambda context, call, region: context.take(call.args[0], region),
        lambda context, call: context.time(call.args[0]),
        is_view=True,
    ),
)

# ---- order of dimensions


def _order(context: Context, call: Call) -> list[int]:
    rank = len(context.shape(call.args[0]))
    order = list(range(rank))
    base = call.op.partition(".")[0]
    if base == "permute":
        return [find_dim(d, rank) for d in call.args[1]]
    if base in ("t", "numpy_T"):
        return order[::-1]
    if base == "movedim":
        source, target = find_dim(call.args[1], rank), find_dim(call.args[2], rank)
        order.remove(source)
        order.insert(target, source)
        return order
    if base == "mT":
        order[-1], order[-2] = order[-2], order[-1]
        return order
    a, b = find_dim(call.args[1], rank), find_dim(call.args[2], rank)
    order[a], order[b] = order[b], order[a]
    return order


def _pull_order(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    order = _order(context, call)
    return [(call.args[0], tuple(region[order.index(d)] for d in range(len(order))))]


def _time_order(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    return _moved(time, None if time is None else _order(context, call).index(time.dim))


def _lower_order(context: Context, call: Call, region: Region) -> View:
    return context.take(*_pull_order(context, call, region)[0]).permute(_order(context, call))


register(
    "permute transpose.int t numpy_T mT movedim.int",
    Rule(_pull_order, _lower_order, _time_order, is_view=True),
)

# ---- shape: views, (un)squeeze, (un)flatten


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of old and new dimensions with equal products; dimensions of size 1 stand in no run."""
    a, b = [d for d, s in enumerate(old) if s != 1], [d for d, s in enumerate(new) if s != 1]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        left, right = [a[i]], [b[j]]
        i, j = i + 1, j + 1
        while (x := math.prod(old[d] for d in left)) != (y := math.prod(new[d] for d in right)):
            if x < y:
                left.append(a[i])
                i += 1
            else:
                right.append(b[j])
                j += 1
        groups.append((left, right))
    return groups


def _pull_shape(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    old, new = context.shape(call.args[0]), call.shapes[0]
    wanted = [tuple(range(size)) for size in old]
    for left, right in _groups(old, new):
        if len(left) == 1:
            # one dimension opened into several: a block of those is a list of indices of the one
            total = np.zeros(1, np.int64)
            for dim in right:
                total = (total[:, None] * new[dim] + np.array(region[dim])).reshape(-1)
            wanted[left[0]] = tuple(total.tolist())
    return [(call.args[0], tuple(wanted))]


def _lower_shape(context: Context, call: Call, region: Region) -> View:
    old, new = context.shape(call.args[0]), call.shapes[0]
    pulled = _pull_shape(context, call, region)[0][1]
    have = [tuple(range(size)) for size in new]
    for left, right in _groups(old, new):
        if len(left) == 1:
            for dim in right:
                have[dim] = region[dim]
    view = context.reshape(context.take(call.args[0], pulled), [len(listed) for listed in have])
    return context.subset(view, tuple(have), region)


def _time_shape(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    if time is None:
        return None
    old, new = context.shape(call.args[0]), call.shapes[0]
    for left, right in _groups(old, new):
        if left == [time.dim]:
            return _moved(time, right[0] if len(right) == 1 else None)
    return None


register(
    "view reshape _unsafe_view flatten.using_ints unflatten.int squeeze squeeze.dim squeeze.dims unsqueeze "
    "view_as reshape_as",
    Rule(_pull_shape, _lower_shape, _time_shape, is_view=True),
)

# ---- broadcasting


def _pull_expand(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    old, new = context.shape(call.args[0]), call.shapes[0]
    extra = len(new) - len(old)
    return [
        (
            call.args[0],
            tuple((0,) if size == 1 else region[d + extra] for d, size in enumerate(old)),
        )
    ]


def _lower_expand(context: Context, call: Call, region: Region) -> View:
    view = context.take(*_pull_expand(context, call, region)[0])
    return view.expand([len(listed) for listed in region])


def _time_expand(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    if time is None:
        return None
    return _moved(time, time.dim + len(call.shapes[0]) - len(context.shape(call.args[0])))


register("expand expand_as broadcast_to", Rule(_pull_expand, _lower_expand, _time_expand, is_view=True))

# ---- parts


def _slice(context: Context, call: Call) -> tuple[int, range]:
    shape = context.shape(call.args[0])
    dim = find_dim(argument(call, 1, "dim", 0), len(shape))
    if call.op.startswith("narrow"):
        start, count = call.args[2], call.args[3]
        return dim, range(start, start + count)
    start, stop, step = (argument(call, i, name) for i, name in ((2, "start"), (3, "end"), (4, "step")))
    return dim, range(*slice(start, stop, step or 1).indices(shape[dim]))


def _pull_slice(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    dim, listed = _slice(context, call)
    # negative: before the first event, which only a state machine can ask for
    wanted = tuple(listed[i] if i >= 0 else listed.start + i * listed.step for i in region[dim])
    return [(call.args[0], (*region[:dim], wanted, *region[dim + 1 :]))]


def _time_slice(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    dim, listed = _slice(context, call)
    if time is None or dim != time.dim:
        return time
    return Time(dim, time.shift + listed.start, time.pinned) if listed.step == 1 else None


register(
    "slice.Tensor narrow",
    Rule(
        _pull_slice,
        lambda context, call, region: context.take(*_pull_slice(context, call, region)[0]),
        _time_slice,
        is_view=True,
    ),
)


def _pull_select(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    shape = context.shape(call.args[0])
    dim = find_dim(call.args[1], len(shape))
    index = call.args[2] + (shape[dim] if call.args[2] < 0 else 0)
    return [(call.args[0], (*region[:dim], (index,), *region[dim:]))]


def _lower_select(context: Context, call: Call, region: Region) -> View:
    dim = find_dim(call.args[1], len(context.shape(call.args[0])))
    return context.take(*_pull_select(context, call, region)[0]).drop(dim)


def _time_select(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    dim = find_dim(call.args[1], len(context.shape(call.args[0])))
    if time is None or time.dim == dim:
        return None
    return _moved(time, time.dim - (dim < time.dim))


register("select.int", Rule(_pull_select, _lower_select, _time_select, is_view=True))


def _pull_flip(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    shape = context.shape(call.args[0])
    dims = {find_dim(d, len(shape)) for d in call.args[1]}
    # listed in rising order, as every region is
    wanted = tuple(
        tuple(sorted(shape[d] - 1 - i for i in listed)) if d in dims else listed
        for d, listed in enumerate(region)
    )
    return [(call.args[0], wanted)]


def _lower_flip(context: Context, call: Call, region: Region) -> View:
    view = context.take(*_pull_flip(context, call, region)[0])
    for d in call.args[1]:
        dim = find_dim(d, len(view.shape))
        view = view.slice(dim, view.shape[dim] - 1, view.shape[dim], -1)
    return view


def _time_flip(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    dims = {find_dim(d, len(call.shapes[0])) for d in call.args[1]}
    return None if time is None or time.dim in dims else time


register("flip", Rule(_pull_flip, _lower_flip, _time_flip, is_view=True))


def _pull_unfold(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    dim = find_dim(call.args[1], len(context.shape(call.args[0])))
    step = call.args[3]
    wanted = tuple(sorted({p * step + k for p in region[dim] for k in region[-1]}))
    return [(call.args[0], (*region[:dim], wanted, *region[dim + 1 : -1]))]


def _lower_unfold(context: Context, call: Call, region: Region) -> View:
    full = full_region(context.shape(call.args[0]))
    dim = find_dim(call.args[1], len(full))
    size, step = call.args[2], call.args[3]
    wanted = (*region[:dim], full[dim], *region[dim + 1 : -1])
    view = context.take(call.args[0], wanted)
    count = call.shapes[0][dim]
    stride = view.strides[dim]
    opened = View(
        view.buffer,
        (*view.shape[:dim], count, *view.shape[dim + 1 :], size),
        (*view.strides[:dim], stride * step, *view.strides[dim + 1 :], stride),
        view.offset,
        view.terms,
    )
    have = (*region[:dim], tuple(range(count)), *region[dim + 1 : -1], tuple(range(size)))
    return context.subset(opened, have, region)


def _pull_unfold_all(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    pulled = _pull_unfold(context, call, region)[0][1]
    dim = find_dim(call.args[1], len(pulled))
    full = full_region(context.shape(call.args[0]))
    return [(call.args[0], (*pulled[:dim], full[dim], *pulled[dim + 1 :]))]


register("unfold", Rule(_pull_unfold_all, _lower_unfold, is_view=True))

# ---- joins


def _joined(context: Context, call: Call) -> tuple[list[Ref], int, list[int]]:
    refs = [ref for ref in call.args[0] if context.shape(ref) != (0,)]
    dim = find_dim(argument(call, 1, "dim", 0), len(call.shapes[0]))
    sizes = [1 if call.op.startswith("stack") else context.shape(ref)[dim] for ref in refs]
    return refs, dim, [0, *itertools.accumulate(sizes)]


def _pull_join(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    refs, dim, edges = _joined(context, call)
    found: list[tuple[Ref, Region]] = []
    for ref, start, stop in zip(refs, edges, edges[1:], strict=False):
        # an index before the first event belongs to the first part
        listed = tuple(i - start for i in region[dim] if start <= i < stop or (i < 0 and start == 0))
        if listed and call.op.startswith("stack"):
            found.append((ref, (*region[:dim], *region[dim + 1 :])))
        elif listed:
            found.append((ref, (*region[:dim], listed, *region[dim + 1 :])))
    return found


def _lower_join(context: Context, call: Call, region: Region) -> View:
    dim = _joined(context, call)[1]
    out = context.temp([len(listed) for listed in region])
    start = 0
    for ref, part in _pull_join(context, call, region):
        view = context.take(ref, part)
        if call.op.startswith("stack"):
            view = view.insert(dim)
        context.emit(Map(view.shape, [(out.slice(dim, start, view.shape[dim]), load(view))]))
        start += view.shape[dim]
    return out


def _time_join(context: Context, call: Call) -> Time | None:
    refs, dim, _ = _joined(context, call)
    times = [context.time(ref) for ref in refs]
    first = times[0]
    if first is None or any(time != first for time in times):
        return None
    if call.op.startswith("stack"):
        return _moved(first, first.dim + (dim <= first.dim))
    return None if first.dim == dim else first


register("cat stack concat", Rule(_pull_join, _lower_join, _time_join))


def _lower_repeat(context: Context, call: Call, region: Region) -> View:
    ref, shape = call.args[0], context.shape(call.args[0])
    view = context.take(ref)
    while len(view.shape) < len(region):
        view = view.insert(0)
    full = [1] * (len(region) - len(shape)) + list(shape)
    have = full_region(call.shapes[0])
    for dim, (size, whole_size) in enumerate(zip(full, call.shapes[0], strict=True)):
        if size == whole_size:
            continue
        # [.., size, ..] to [.., times, size, ..] with stride 0, then one dimension
        opened = view.insert(dim).expand((*view.shape[:dim], whole_size // size, *view.shape[dim:]))
        view = context.reshape(opened, (*view.shape[:dim], whole_size, *view.shape[dim + 1 :]))
    return context.subset(view, have, region)


register(
    "repeat tile",
    Rule(lambda c, call, _region: [(call.args[0], full_region(c.shape(call.args[0])))], _lower_repeat),
)


def _lower_roll(context: Context, call: Call, region: Region) -> View:
    view = context.take(call.args[0])
    for amount, dim in zip(call.args[1], argument(call, 2, "dims", []), strict=True):
        dim = find_dim(dim, len(view.shape))
        size = view.shape[dim]
        amount %= size
        out = context.temp(view.shape)
        for start, count, to in ((size - amount, amount, 0), (0, size - amount, amount)):
            if count:
                part = view.slice(dim, start, count)
                context.emit(Map(part.shape, [(out.slice(dim, to, count), load(part))]))
        view = out
    return context.subset(view, full_region(call.shapes[0]), region)


register(
    "roll", Rule(lambda c, call, _region: [(call.args[0], full_region(c.shape(call.args[0])))], _lower_roll)
)

# ---- padding


def _pads(context: Context, call: Call) -> list[tuple[int, int]]:
    rank = len(call.shapes[0])
    flat = list(call.args[1])
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def _pad_mode(call: Call) -> tuple[str, float]:
    if call.op == "pad":
        mode = argument(call, 2, "mode", "constant")
        return mode, float(argument(call, 3, "value", 0.0) or 0.0)
    if call.op == "constant_pad_nd":
        return "constant", float(argument(call, 2, "value", 0.0) or 0.0)
    return ("replicate" if "replication" in call.op else "reflect"), 0.0


def _source_index(index: int, size: int, mode: str) -> int | None:
    """Which position of the input stands at `index` (0 is its first) of the padded one; None for the constant."""
    if 0 <= index < size:
        return index
    if mode == "constant":
        return None
    if mode == "replicate":
        return min(max(index, 0), size - 1)
    if mode == "circular":
        return index % size
    return -index if index < 0 else 2 * (size - 1) - index


def _pull_pad(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    shape, pads = context.shape(call.args[0]), _pads(context, call)
    mode, _ = _pad_mode(call)
    time = context.times.get(call.name)
    wanted = []
    for d, (size, (before, _after), listed) in enumerate(zip(shape, pads, region, strict=True)):
        if time is not None and d == time.dim:
            wanted.append(tuple(i - before for i in listed))
            continue
        found = {_source_index(i - before, size, mode) for i in listed} - {None}
        wanted.append(tuple(sorted(i for i in found if i is not None)))
    return [(call.args[0], tuple(wanted))]


def _lower_pad(context: Context, call: Call, region: Region) -> View:
    ref, pulled = _pull_pad(context, call, region)[0]
    mode, value = _pad_mode(call)
    pads, shape, time = _pads(context, call), context.shape(ref), context.times.get(call.name)
    if any(not listed for listed in pulled):
        return context.store([len(listed) for listed in region], constant(value))
    view, have = context.take(ref, pulled), list(pulled)
    for dim, listed in enumerate(region):
        before = pads[dim][0]
        if (time is not None and dim == time.dim) or pads[dim] == (0, 0):
            continue
        sources = [_source_index(i - before, shape[dim], mode) for i in listed]
        if sources == list(have[dim]):
            continue
        out_shape = (*view.shape[:dim], len(listed), *view.shape[dim + 1 :])
        out = context.fixed(out_shape, value) if mode == "constant" else context.temp(out_shape)
        start = 0
        while start < len(sources):
            stop = start + 1
            origin = sources[start]
            if origin is not None:
                while stop < len(sources) and sources[stop] == origin + stop - start:
                    stop += 1
                part = view.slice(dim, have[dim].index(origin), stop - start)
                if have[dim][have[dim].index(origin) : have[dim].index(origin) + stop - start] != tuple(
                    range(origin, origin + stop - start)
                ):
                    stop = start + 1
                    part = view.slice(dim, have[dim].index(origin), 1)
                context.emit(Map(part.shape, [(out.slice(dim, start, stop - start), load(part))]))
            start = stop
        view = out
    return view


def _time_pad(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    if time is None:
        return None
    before, after = _pads(context, call)[time.dim]
    mode, value = _pad_mode(call)
    if (before or after) and (mode != "constant" or value != 0.0):
        return None
    return Time(time.dim, time.shift - before, time.pinned)


register(
    "constant_pad_nd pad replication_pad1d reflection_pad1d replication_pad2d reflection_pad2d",
    Rule(_pull_pad, _lower_pad, _time_pad, is_view=True),
)
