"""Folding scales and shifts of each output (batch norm, constants) into weights and bias, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotloop.native.graph import Expr, Graph, Taps
from hotloop.native.passes.usage import rewrite_expr

__all__ = ["fold_affine"]


def fold_affine(graph: Graph) -> None:
    """Fold what stands directly around the sum of every contraction."""
    for node in graph.all_nodes():
        if isinstance(node, Taps):
            while _fold_one(node):
                pass


def _fold_one(node: Taps) -> bool:
    if node.epilogue is None:
        return False
    if node.epilogue.op == "acc":
        node.epilogue = None
        return False
    found = _parents(node.epilogue)
    if len(found) != 1:
        return False
    parent = found[0]
    first = parent.args[0].op == "acc"
    if parent.op not in ("add", "sub", "mul") or len(parent.args) != 2 or (not first and parent.op == "sub"):
        return False
    vector = _vector(parent.args[1 if first else 0], node)
    if vector is None or not np.all(np.isfinite(vector)):
        return False
    bias = np.zeros(node.weight.shape[2]) if node.bias is None else node.bias.astype(np.float64)
    if parent.op == "mul":
        node.weight = np.ascontiguousarray((node.weight.astype(np.float64) * vector).astype(np.float32))
        if node.bias is not None:
            node.bias = (bias * vector).astype(np.float32)
    else:
        node.bias = (bias + (vector if parent.op == "add" else -vector)).astype(np.float32)
    acc = Expr("acc")
    node.epilogue = rewrite_expr(node.epilogue, lambda expr: acc if expr is parent else None)
    return True


def _parents(expr: Expr) -> list[Expr]:
    """Distinct expressions that use the sum itself; each use counts."""
    found: dict[int, Expr] = {}
    seen: set[int] = set()
    uses = 0

    def visit(item: Expr) -> None:
        nonlocal uses
        if id(item) in seen:
            return
        seen.add(id(item))
        for arg in item.args:
            if arg.op == "acc":
                found[id(item)] = item
                uses += 1
            visit(arg)

    visit(expr)
    return list(found.values()) if uses == 1 else [expr, expr]


def _vector(expr: Expr, node: Taps) -> npt.NDArray[np.float64] | None:
    """A value for each output that is known now and the same for all rows."""
    outputs = node.weight.shape[2]
    if expr.op == "const":
        return np.full(outputs, expr.value)
    view = expr.view
    if view is None or view.buffer.kind != "const" or view.terms or (view.strides[0] and view.shape[0] > 1):
        return None
    assert view.buffer.data is not None
    return view.buffer.data[view.offset + np.arange(outputs) * view.strides[1]].astype(np.float64)
