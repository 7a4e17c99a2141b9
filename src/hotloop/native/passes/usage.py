"""Who reads and who writes each buffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from hotloop.native.graph import (
    Expr,
    Graph,
    Lookup,
    Loop,
    Map,
    MatMul,
    Node,
    Norm,
    Push,
    Reduce,
    Softmax,
    Taps,
    View,
)

__all__ = ["Usage", "find_usage", "rewrite_expr", "rewrite_views"]


class Usage:
    """Nodes at the top level by the buffer they touch; a loop stands for all in it."""

    def __init__(self, nodes: list[Node]) -> None:
        self.readers: dict[int, list[Node]] = defaultdict(list)
        self.writers: dict[int, list[Node]] = defaultdict(list)
        self.place = {id(node): index for index, node in enumerate(nodes)}
        for node in nodes:
            for key in {id(view.buffer) for view in node.reads()}:
                self.readers[key].append(node)
            for key in {id(view.buffer) for view in node.writes()}:
                self.writers[key].append(node)

    def written_between(self, node: Node, later: Node) -> bool:
        """Whether something that `node` reads is written after it and before `later`."""
        start, stop = self.place[id(node)], self.place[id(later)]
        return any(
            start < self.place[id(writer)] < stop
            for view in node.reads()
            for writer in self.writers[id(view.buffer)]
        )


def find_usage(graph: Graph) -> Usage:
    """Usage over prep and nodes."""
    return Usage([*graph.prep, *graph.nodes])


def rewrite_expr(
    expr: Expr, change: Callable[[Expr], Expr | None], done: dict[int, Expr] | None = None
) -> Expr:
    """The expression with `change` applied to every part that it answers for; sharing is kept."""
    done = {} if done is None else done
    if id(expr) in done:
        return done[id(expr)]
    new = change(expr)
    if new is None:
        args = tuple(rewrite_expr(arg, change, done) for arg in expr.args)
        same = all(a is b for a, b in zip(args, expr.args, strict=True))
        new = expr if same else replace(expr, args=args)
    done[id(expr)] = new
    return new


def rewrite_views(node: Node, change: Callable[[View], View]) -> None:
    """Replace every view that a node reads or writes."""

    def through(expr: Expr) -> Expr | None:
        return replace(expr, view=change(expr.view)) if expr.view is not None else None

    done: dict[int, Expr] = {}
    if isinstance(node, Map):
        node.stores = [(change(view), rewrite_expr(expr, through, done)) for view, expr in node.stores]
    elif isinstance(node, Taps):
        node.source, node.out = change(node.source), change(node.out)
        if node.epilogue is not None:
            node.epilogue = rewrite_expr(node.epilogue, through, done)
    elif isinstance(node, MatMul):
        node.a, node.b, node.out = change(node.a), change(node.b), change(node.out)
    elif isinstance(node, Softmax):
        node.source, node.out = change(node.source), change(node.out)
        node.mask = None if node.mask is None else change(node.mask)
    elif isinstance(node, (Norm, Reduce)):
        node.source, node.out = change(node.source), change(node.out)
    elif isinstance(node, Lookup):
        node.table, node.index, node.out = change(node.table), change(node.index), change(node.out)
    elif isinstance(node, Push):
        node.source, node.ring = change(node.source), change(node.ring)
    elif isinstance(node, Loop):
        for item in node.body:
            rewrite_views(item, change)
