"""Scaled dot-product attention; as a state machine, keys and values live in rings."""

from __future__ import annotations

import math

import numpy as np

from hotloop.native.capture import Call, Ref
from hotloop.native.graph import MatMul, Softmax, View, load
from hotloop.native.lowering.context import Context, Region, Rule, Time, register
from hotloop.native.lowering.layout import argument
from hotloop.native.lowering.pointwise import binary

__all__: list[str] = []


def _span(context: Context, call: Call, region: Region) -> tuple[int, ...]:
    """The keys that the wanted queries can see."""
    keys = context.shape(call.args[1])[-2]
    if argument(call, 5, "is_causal", False) and f"{call.name}" not in context.times:
        return tuple(range(min(keys, region[-2][-1] + 1)))
    return tuple(range(keys))


def _pull(context: Context, call: Call, region: Region) -> list[tuple[Ref, Region]]:
    if argument(call, 4, "dropout_p", 0.0):
        raise context.refuse(call, "dropout of attention is on (dropout_p is not 0), which is random")
    q, k, v = call.args[:3]
    span = _span(context, call, region)
    wide = tuple(range(context.shape(q)[-1]))
    found = []
    for ref, rows, columns in ((q, region[-2], wide), (k, span, wide), (v, span, region[-1])):
        lead = [
            (0,) if size == 1 else region[d + len(region) - len(context.shape(ref))]
            for d, size in enumerate(context.shape(ref)[:-2])
        ]
        found.append((ref, (*lead, rows, columns)))
    mask = argument(call, 3, "attn_mask")
    if mask is not None:
        shape = context.shape(mask)
        listed = (*region[:-2], region[-2], span)
        extra = len(listed) - len(shape)
        found.append((mask, tuple((0,) if size == 1 else listed[d + extra] for d, size in enumerate(shape))))
    if call.name in context.times:
        context.time_last.add(k.name)
    return found


def _mask(context: Context, call: Call, region: Region, lead: tuple[int, ...]) -> View | None:
    """What is added to the scores, [..., queries, keys], or None."""
    span = _span(context, call, region)
    shape = (*lead, len(region[-2]), len(span))
    given = argument(call, 3, "attn_mask")
    streaming = call.name in context.times
    added = None
    if given is not None:
        if not context.is_constant(given):
            return context.take(
                _pull(context, call, region)[3][0], _pull(context, call, region)[3][1]
            ).expand(shape)
        tensor = context.captured.constants[given.name]
        values = context.array(given)
        if str(tensor.dtype) == "torch.bool":
            values = np.where(values != 0, 0.0, -np.inf).astype(np.float32)
        part = values[np.ix_(*_pull(context, call, region)[3][1])]
        added = part if np.any(part) else None
    elif argument(call, 5, "is_causal", False) and not streaming:
        rows, columns = np.array(region[-2])[:, None], np.array(span)[None]
        part = np.where(columns <= rows, 0.0, -np.inf).astype(np.float32)
        added = part if np.any(part) else None
    found = None if added is None else context.const(added).expand(shape)
    if streaming and context.times.get(call.args[1].name) is not None:
        valid = context.validity(len(span)).expand(shape)
        if found is None:
            return valid

        return context.store(shape, binary("add", load(found), load(valid)))
    return found


def _lower(context: Context, call: Call, region: Region) -> View:
    q, k, v = (context.take(*item) for item in _pull(context, call, region)[:3])
    lead = tuple(len(listed) for listed in region[:-2])
    rows, span, width = q.shape[-2], k.shape[-2], q.shape[-1]
    if (
        k.shape[:-2] != lead
        and math.prod(k.shape[:-2]) != math.prod(lead)
        and argument(call, 7, "enable_gqa", False)
    ):
        times = lead[-1] // k.shape[-3]

        def repeat(view: View) -> View:
            opened = view.insert(len(view.shape) - 2)
            opened = opened.expand((*view.shape[:-2], times, *view.shape[-2:]))
            return context.reshape(opened, (*lead, *view.shape[-2:]))

        k, v = repeat(k), repeat(v)
    scale = argument(call, 6, "scale")
    scale = 1 / math.sqrt(width) if scale is None else float(scale)
    k, v, q = (view.expand((*lead, *view.shape[-2:])) for view in (k, v, q))
    turned = k.permute([*range(len(lead)), len(lead) + 1, len(lead)])
    scores = context.temp((*lead, rows, span))
    context.emit(MatMul(q, turned, scores, scale))
    weights = context.temp(scores.shape)
    context.emit(Softmax(scores, weights, _mask(context, call, region, lead)))
    # heads beside each other in memory, as the output projection reads them
    heads = lead[-1] if lead else 1
    outer = lead[:-1]
    natural = context.temp((*outer, rows, heads, v.shape[-1]))
    order = [*range(len(outer)), len(outer) + 1, len(outer), len(outer) + 2]
    out = natural.permute(order) if lead else natural.select(len(outer) + 1, 0)
    context.emit(MatMul(weights, v, out))
    return out


def _time(context: Context, call: Call) -> Time | None:
    time = context.time(call.args[0])
    if time is None or time.dim != len(call.shapes[0]) - 2:
        return None
    mask = argument(call, 3, "attn_mask")
    key = context.time(call.args[1])
    if mask is not None and (not context.is_constant(mask) or context.shape(mask)[-2] != 1):
        return Time(time.dim, time.shift, True) if context.is_constant(mask) else None
    # without a causal mask, or against keys that are no ring, older positions had seen other keys than now
    causal = bool(argument(call, 5, "is_causal", False)) and key is not None
    return Time(time.dim, time.shift, time.pinned or not causal)


register("scaled_dot_product_attention", Rule(_pull, _lower, _time))
