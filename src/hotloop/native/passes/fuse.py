"""Elementwise work joins the loop that makes its operand: maps into maps, maps into contractions."""

from __future__ import annotations

from dataclasses import replace

from hotloop.native.graph import Expr, Graph, Map, Taps, View
from hotloop.native.passes.usage import Usage, rewrite_expr

__all__ = ["fuse"]

# An expression of more operands than this would run out of registers.
_MOST_LOADS = 24


def fuse(graph: Graph) -> bool:
    """Fuse until nothing changes; whether anything did."""
    changed = False
    while _fuse_once(graph):
        changed = True
    return changed


def _fuse_once(graph: Graph) -> bool:
    """One sweep over the nodes. What it has changed waits for the next, as who reads and writes it is counted anew
    only then: counting after each change would take a long unrolled loop minutes."""
    usage = Usage(graph.nodes)
    changed: set[int] = set()
    for node in list(graph.nodes):
        if not isinstance(node, Map) or id(node) in changed:
            continue
        for view in node.reads():
            buffer = view.buffer
            if (
                buffer.kind != "temp"
                or len(usage.readers[id(buffer)]) != 1
                or len(usage.writers[id(buffer)]) != 1
            ):
                continue
            maker = usage.writers[id(buffer)][0]
            if maker is node or id(maker) in changed or usage.written_between(maker, node):
                continue
            mine = [v for v in node.reads() if v.buffer is buffer]
            if any(v != mine[0] for v in mine):
                continue
            joined = (isinstance(maker, Map) and _join_maps(graph, maker, node, view)) or (
                isinstance(maker, Taps) and _join_taps(graph, maker, node, view)
            )
            if joined:
                changed |= {id(node), id(maker)}
                break
    return bool(changed)


def _order(view: View) -> list[int]:
    """Dimensions by falling stride; those of size 1 or stride 0 first, in their order."""
    dims = range(len(view.shape))
    return sorted(
        dims, key=lambda d: -(view.strides[d] if view.shape[d] > 1 and view.strides[d] else 1 << 40)
    )


def _moves(source: View, target: View) -> tuple[list[int], tuple[int, ...]] | None:
    """How views of source's shape become views of target's: permute, then reshape; None if target is no such form."""
    if source.count != target.count or source.offset != target.offset or source.terms != target.terms:
        return None
    if any(
        t == 0 and s > 1
        for s, t in zip((*target.shape, *source.shape), (*target.strides, *source.strides), strict=True)
    ):
        return None
    order = _order(target)
    sorted_target = target.permute(order)
    mine = _order(source)
    found = source.permute(mine).reshape(sorted_target.shape)
    if found is None or not _same(found, sorted_target):
        return None
    return mine, sorted_target.shape


def _same(a: View, b: View) -> bool:
    return a.shape == b.shape and all(
        x == y or size == 1 for x, y, size in zip(a.strides, b.strides, a.shape, strict=True)
    )


def _join_maps(graph: Graph, maker: Map, node: Map, view: View) -> bool:
    if len(maker.stores) != 1 or len(list(node.reads())) + len(maker.reads()) > _MOST_LOADS:
        return False
    stored, expr = maker.stores[0]
    moves = _moves(stored, view)
    if moves is None:
        return False
    permutation, shape = moves
    order = _order(view)
    back = [order.index(d) for d in range(len(order))]

    def convert(item: View) -> View | None:
        found = item.permute(permutation).reshape(shape)
        return None if found is None else found.permute(back)

    converted = {id(item): convert(item) for item in expr.loads()}
    if any(item is None for item in converted.values()):
        return False

    def through(item: Expr) -> Expr | None:
        if item.view is None:
            return None
        return replace(item, view=converted[id(item.view)])

    inlined = rewrite_expr(expr, through)
    done: dict[int, Expr] = {}
    node.stores = [
        (target, rewrite_expr(e, lambda x: inlined if x.view is not None and x.view == view else None, done))
        for target, e in node.stores
    ]
    graph.nodes.remove(maker)
    return True


def _join_taps(graph: Graph, maker: Taps, node: Map, view: View) -> bool:
    if len(node.stores) != 1 or len(node.reads()) > _MOST_LOADS:
        return False
    out = maker.out
    # read once for each of many elements (a gate over a picture), it is no epilogue of what makes it
    if view.count != out.count or any(
        t == 0 and s > 1 for s, t in zip(view.shape, view.strides, strict=True)
    ):
        return False
    order = _order(view)
    if out.strides != (out.shape[1], 1) and out.count != out.shape[1]:
        return False
    flat = view.permute(order).reshape(out.shape)
    if flat is None or not _same(flat, out) or flat.offset != out.offset:
        return False
    stored, expr = node.stores[0]

    def convert(item: View) -> View | None:
        return item.permute(order).reshape(out.shape)

    converted = {id(item): convert(item) for item in (stored, *expr.loads())}
    if any(item is None for item in converted.values()):
        return False
    inner = maker.epilogue if maker.epilogue is not None else Expr("acc")

    def through(item: Expr) -> Expr | None:
        if item.view is None:
            return None
        return inner if item.view == view else replace(item, view=converted[id(item.view)])

    maker.epilogue = rewrite_expr(expr, through)
    target = converted[id(stored)]
    assert target is not None
    maker.out = target
    # where the map stood, its other operands are there
    graph.nodes.remove(maker)
    graph.nodes[graph.nodes.index(node)] = maker
    return True
