"""Values are written where a copy would have brought them: parts of a join, insides of a padding, outputs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotloop.native.emit.loops import collapse
from hotloop.native.graph import Graph, Loop, Map, Taps, View
from hotloop.native.passes.usage import Usage, rewrite_views

__all__ = ["place_copies"]

_Rows = tuple[npt.NDArray[np.int64], int]


def place_copies(graph: Graph) -> bool:
    """Remove copies whose source can live in their target; whether any was."""
    changed = False
    for node in list(graph.nodes):
        if isinstance(node, Map) and len(node.stores) == 1 and node.stores[0][1].op == "load":
            changed |= _place(graph, node)
    return changed


def _place(graph: Graph, node: Map) -> bool:
    target, expr = node.stores[0]
    source = expr.view
    assert source is not None
    buffer = source.buffer
    if (
        buffer.kind != "temp"
        or source.count != buffer.size
        or target.buffer.kind not in ("temp", "fixed", "output")
    ):
        return False
    usage = Usage(graph.nodes)
    writers = usage.writers[id(buffer)]
    if target.buffer is buffer or any(usage.place[id(w)] > usage.place[id(node)] for w in writers):
        return False
    touching = [
        n for n in graph.nodes if n is not node and any(v.buffer is buffer for v in (*n.reads(), *n.writes()))
    ]
    # whoever reads or writes both would see one through the other
    if any(v.buffer is target.buffer for n in touching for v in (*n.reads(), *n.writes())):
        return False
    first = min((usage.place[id(n)] for n in touching), default=0)
    if any(first <= usage.place[id(n)] < usage.place[id(node)] for n in usage.readers[id(target.buffer)]):
        return False
    order = sorted(range(len(source.shape)), key=lambda d: -source.strides[d] if source.shape[d] > 1 else 1)
    natural, wanted = source.permute(order), target.permute(order)
    if not natural.contiguous or natural.offset or natural.terms:
        return False
    sizes, strides = collapse(natural.shape, [natural, wanted])
    old, new = strides[id(natural)], strides[id(wanted)]
    moved: dict[int, _Rows] = {}
    for item in touching:
        if isinstance(item, Taps) and item.source.buffer is buffer:
            rows = _translate_rows(item, target, sizes, old, new)
            if rows is None:
                return False
            moved[id(item)] = rows
        views = [*item.reads(), *item.writes()]
        if isinstance(item, Loop) and any(
            isinstance(n, Taps) and n.source.buffer is buffer for n in item.body
        ):
            return False
        for view in views:
            if isinstance(item, Taps) and view is item.source:
                continue
            if view.buffer is buffer and _translate(view, target, sizes, old, new) is None:
                return False

    def change(view: View) -> View:
        found = _translate(view, target, sizes, old, new) if view.buffer is buffer else view
        # the source of a contraction is set below, with its rows
        return view if found is None else found

    for item in touching:
        rewrite_views(item, change)
        if isinstance(item, Taps) and id(item) in moved:
            item.source = View(target.buffer, (), (), 0, target.terms)
            item.rows, item.step = moved[id(item)]
    graph.nodes.remove(node)
    return True


def _translate_rows(
    node: Taps, target: View, sizes: list[int], old: list[int], new: list[int]
) -> _Rows | None:
    """Offsets and step of a contraction that reads the old buffer, in the target's."""
    if node.source.terms:
        return None
    rest = node.rows + node.source.offset
    rows = np.full_like(rest, target.offset)
    inner = node.weight.shape[1]
    step = 0 if inner > 1 else 1
    for size, a, b in zip(sizes, old, new, strict=True):
        index = np.minimum(rest // a, size - 1)
        rest = rest - index * a
        rows += index * b
        if not step and node.step % a == 0:
            if int(index.max()) + (inner - 1) * (node.step // a) >= size:
                return None
            step = node.step // a * b
    return (rows, step) if step and not rest.any() else None


def _translate(view: View, target: View, sizes: list[int], old: list[int], new: list[int]) -> View | None:
    """`view` of the old buffer as a view of the target's; None where one stride would have to become two."""
    offset, rest, start = target.offset, view.offset, []
    for size, a, b in zip(sizes, old, new, strict=True):
        index = min(rest // a, size - 1)
        rest -= index * a
        start.append(index)
        offset += index * b
    if rest:
        return None
    strides = []
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size == 1 or stride == 0:
            strides.append(0)
            continue
        for d, (n, a, b) in enumerate(zip(sizes, old, new, strict=True)):
            if stride > 0 and stride % a == 0 and start[d] + (size - 1) * (stride // a) < n:
                strides.append(stride // a * b)
                start[d] += (size - 1) * (stride // a)
                break
        else:
            return None
    terms = []
    for symbol, stride in view.terms:
        for a, b in zip(old, new, strict=True):
            if stride % a == 0:
                terms.append((symbol, stride // a * b))
                break
        else:
            return None
    if view.terms and len(sizes) > 1:
        return None
    return View(target.buffer, view.shape, tuple(strides), offset, (*target.terms, *terms))
