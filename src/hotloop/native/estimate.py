"""Predicting latency from the graph alone: operations, bytes by cache level, and how long dependent steps take.

A time for each node, summed: the largest of its multiply-adds over this core's rate, and the bytes of its weights over
the rate of the cache level that holds the whole model; plus what each node costs to start and finish (loads, partial
sums, a horizontal sum), and each activation function. The floor is the first part alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hotloop.native.build import Streaming, find_time
from hotloop.native.capture import Captured, capture_model
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
)
from hotloop.native.lowering import lower
from hotloop.native.passes import optimise
from hotloop.native.timing import Core, measure_core
from hotloop.native.work import count_multiply_adds, count_weight_bytes

__all__ = ["Estimate", "estimate", "estimate_graph"]

# Nanoseconds, chosen on the seven models of the latency benchmark: a call, a node, a row of softmax or norm.
_CALL_NS, _NODE_NS, _ROW_NS = 12.0, 9.0, 9.0
# An activation of 16 elements; a store and load of 16.
_FUNCTION_NS, _VECTOR_NS = 6.0, 0.7
_FUNCTIONS = {
    *("exp", "log", "log1p", "expm1", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh"),
    *("sin", "cos", "erf", "softplus", "pow", "div"),
}
# Of its peak rate a contraction of some rows reaches so much.
_EFFICIENCY = 0.75


@dataclass(frozen=True)
class Estimate:
    """A predicted latency. `floor_ns`: arithmetic and weights alone, at this core's measured rates."""

    p50_ns: float
    floor_ns: float
    prep_ns: float
    multiply_adds: int
    weight_bytes: int
    cache_level: str

    def __str__(self) -> str:
        return (
            f"about {self.p50_ns / 1e3:.2f} us (floor {self.floor_ns / 1e3:.2f} us): "
            f"{self.multiply_adds:,} multiply-adds, "
            f"{self.weight_bytes / 1024:.0f} KiB of weights in {self.cache_level}"
        )


def estimate(
    model: nn.Module, example: torch.Tensor | Sequence[torch.Tensor], *, streaming: Streaming = None
) -> Estimate:
    """Predict the median latency of `build(model, example, streaming=…)` on this core, nothing trained or compiled.

    Of a state machine `p50_ns` is the commit, `prep_ns` what is done before the event.

    Raises:
        UnsupportedOpError: an operation has no C form.
    """
    inputs = [example] if isinstance(example, torch.Tensor) else list(example)
    return estimate_graph(_graph(capture_model(model, inputs), streaming), measure_core())


def _graph(captured: Captured, streaming: Streaming) -> Graph:
    graph = lower(captured, "estimate", time=find_time(captured, streaming))
    optimise(graph)
    return graph


def estimate_graph(graph: Graph, core: Core) -> Estimate:
    """Predict from an optimised graph and a core's rates."""
    nodes = graph.all_nodes()
    weight_bytes = sum(count_weight_bytes(node) for node in nodes)
    working = weight_bytes + sum(view.count * 4 for node in nodes for view in node.writes())
    if working <= core.l1_bytes:
        level, rate = "L1", core.l1_rate
    elif working <= core.l2_bytes:
        level, rate = "L2", core.l2_rate
    else:
        level, rate = "L3", core.l3_rate
    prep = [_predict(node, core, rate) for node in graph.prep]
    commit = [_predict(node, core, rate) for node in graph.nodes]
    return Estimate(
        _CALL_NS + sum(total for total, _ in commit),
        sum(floor for _, floor in commit),
        sum(total for total, _ in prep),
        sum(count_multiply_adds(node) for node in nodes if not isinstance(node, Loop)),
        weight_bytes,
        level,
    )


def _functions(expr: Expr | None, seen: set[int]) -> int:
    if expr is None or id(expr) in seen:
        return 0
    seen.add(id(expr))
    return (expr.op in _FUNCTIONS) + sum(_functions(arg, seen) for arg in expr.args)


def _predict(node: Node, core: Core, rate: float) -> tuple[float, float]:
    """Nanoseconds of one node, and of its floor."""
    if isinstance(node, Loop):
        parts = [_predict(item, core, rate) for item in node.body]
        return node.count * sum(t for t, _ in parts), node.count * sum(f for _, f in parts)
    work = count_multiply_adds(node)
    speed = core.multiply_rate * (3.5 if isinstance(node, Taps) and node.scale is not None else 1.0)
    floor = max(work / speed, count_weight_bytes(node) / rate) * 1e9
    if isinstance(node, Taps):
        vectors = node.rows.shape[0] * -(-node.weight.shape[2] // 16)
        # outputs that do not fill a vector are computed all the same
        padded = (
            work / node.weight.shape[2] * (-(-node.weight.shape[2] // 16) * 16)
            if node.weight.shape[2] > 5
            else work
        )
        busy = max(padded / speed / _EFFICIENCY, count_weight_bytes(node) / rate / 0.9) * 1e9
        functions = _functions(node.epilogue, set())
        return _NODE_NS + busy + vectors * (_VECTOR_NS + functions * _FUNCTION_NS), floor
    if isinstance(node, MatMul):
        lanes = min(16, node.out.shape[-1])
        # columns apart in memory: dot products where rows are whole, else gathered
        apart = node.b.strides[-1] != 1
        gathered = (2.5 if node.b.strides[-2] == 1 else 10.0) if apart else 1.0
        return _NODE_NS + floor * 16 / lanes * gathered / _EFFICIENCY, floor
    if isinstance(node, (Softmax, Norm)):
        rows = node.source.count // node.source.shape[-1]
        vectors = rows * -(-node.source.shape[-1] // 16)
        per_vector = _FUNCTION_NS if isinstance(node, Softmax) else 2 * _VECTOR_NS
        return _NODE_NS + rows * _ROW_NS + vectors * per_vector, 0.0
    if isinstance(node, Map):
        vectors = max(1.0, node.stores[0][0].count / 16)
        seen: set[int] = set()
        functions = sum(_functions(expr, seen) for _, expr in node.stores)
        return _NODE_NS / 2 + vectors * (
            _VECTOR_NS * (1 + len(node.reads()) / 2) + functions * _FUNCTION_NS
        ), 0.0
    if isinstance(node, (Reduce, Push, Lookup)):
        vectors = sum(view.count for view in node.reads()[-1:]) / 16
        return _NODE_NS / 2 + vectors * _VECTOR_NS, 0.0
    return _NODE_NS, 0.0
