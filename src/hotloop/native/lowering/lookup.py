"""Tables: embeddings, and picking rows by constant or computed indices."""

from __future__ import annotations

import math
from typing import Any

from hotloop.native.capture import Call, Ref
from hotloop.native.graph import Lookup, View
from hotloop.native.lowering.context import Context, Region, Rule, Time, full_region, register
from hotloop.native.lowering.layout import find_dim

__all__: list[str] = []


def _pull_embedding(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    return [(call.args[1], region[:-1])]


def _lower_embedding(context: Context, call: Call, region: Region) -> View:
    table = context.const(context.array(call.args[0], "the table"))
    index = context.take(call.args[1], region[:-1])
    width = table.shape[1]
    flat = context.reshape(index, (index.count,))
    out = context.temp((index.count, width))
    context.emit(Lookup(table, flat, out))
    shaped = context.reshape(out, (*index.shape, width))
    have = (*region[:-1], tuple(range(width)))
    return context.subset(shaped, have, region)


def _time_embedding(context: Context, call: Call) -> Time | None:
    return context.time(call.args[1])


register("embedding", Rule(_pull_embedding, _lower_embedding, _time_embedding))


def _constant_rows(context: Context, call: Call) -> tuple[int, list[int], tuple[int, ...]] | None:
    """(dimension, indices, shape of the index) where a single constant index picks along one dimension."""
    shape = context.shape(call.args[0])
    if call.op == "index_select":
        dim, ref = find_dim(call.args[1], len(shape)), call.args[2]
    else:
        given = [(d, ref) for d, ref in enumerate(call.args[1]) if ref is not None]
        if len(given) != 1:
            return None
        dim, ref = given[0]
    if not context.is_constant(ref):
        return None
    tensor = context.captured.constants[ref.name]
    if str(tensor.dtype) == "torch.bool":
        tensor = tensor.nonzero().reshape(-1)
    indices = [int(i) % shape[dim] for i in tensor.reshape(-1).tolist()]
    return dim, indices, tuple(tensor.shape)


def _pull_index(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    found = _constant_rows(context, call)
    if found is None:
        return _pull_computed(context, call, region)
    dim, indices, index_shape = found
    shape = context.shape(call.args[0])
    if len(index_shape) == 1:
        wanted = tuple(sorted({indices[p] for p in region[dim]}))
        return [(call.args[0], (*region[:dim], wanted, *region[dim + 1 :]))]
    rest = list(full_region(shape))
    rest[dim] = tuple(sorted(set(indices)))
    return [(call.args[0], tuple(rest))]


def _lower_index(context: Context, call: Call, region: Region) -> View:
    found = _constant_rows(context, call)
    if found is None:
        return _lower_computed(context, call, region)
    dim, indices, index_shape = found
    ref, pulled = _pull_index(context, call, region)[0]
    view = context.take(ref, pulled)
    place = {index: p for p, index in enumerate(pulled[dim])}
    if len(index_shape) == 1:
        return context.gather(view, dim, [place[indices[p]] for p in region[dim]])
    picked = context.gather(view, dim, [place[i] for i in indices])
    shaped = context.reshape(picked, (*view.shape[:dim], *index_shape, *view.shape[dim + 1 :]))
    return context.subset(shaped, full_region(call.shapes[0]), region)


def _computed(context: Context, call: Call) -> tuple[Any, Any]:
    """Table and index of a lookup by a computed index along dimension 0."""
    if call.op == "index_select":
        if find_dim(call.args[1], len(context.shape(call.args[0]))) != 0:
            raise context.refuse(call, "a computed index must pick along dimension 0; permute before")
        return call.args[0], call.args[2]
    given = call.args[1]
    if len(given) != 1 or given[0] is None:
        raise context.refuse(
            call,
            "indexing by computed values has a C form for one index along dimension 0 (table[index]) only",
        )
    return call.args[0], given[0]


def _pull_computed(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    return [(ref, full_region(context.shape(ref))) for ref in _computed(context, call)]


def _lower_computed(context: Context, call: Call, region: Region) -> View:
    table_ref, index_ref = _computed(context, call)
    if len(call.shapes[0]) != len(context.shape(index_ref)) + len(context.shape(table_ref)) - 1:
        raise context.refuse(
            call, "picking by a computed mask has a result of no fixed size; use torch.where"
        )
    table = context.compact(context.take(table_ref))
    index = context.take(index_ref)
    width = math.prod(table.shape[1:])
    flat = context.reshape(table, (table.shape[0], width))
    out = context.temp((index.count, width))
    context.emit(Lookup(flat, context.reshape(index, (index.count,)), out))
    shaped = context.reshape(out, (*index.shape, *table.shape[1:]))
    return context.subset(shaped, full_region(call.shapes[0]), region)


def _time_index(context: Context, call: Call) -> Time | None:
    found = _constant_rows(context, call)
    time = context.time(call.args[0])
    if found is None or time is None or time.dim == found[0] or len(found[2]) != 1:
        return None
    return time


register("index.Tensor index_select", Rule(_pull_index, _lower_index, _time_index))
