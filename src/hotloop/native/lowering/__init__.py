"""From captured calls to nodes: one module for each family of operations."""

from __future__ import annotations

from hotloop.native.capture import Captured
from hotloop.native.decompose import decompose
from hotloop.native.graph import Graph
from hotloop.native.lowering import (  # noqa: F401  each registers its rules
    attention,
    contraction,
    layout,
    lookup,
    normal,
    pointwise,
    recurrent,
    reduction,
)
from hotloop.native.lowering import context as _context
from hotloop.native.normalise import handled, normalise

__all__ = ["list_operations", "lower"]


def list_operations() -> list[str]:
    """Names of all operations that have a C form."""
    return sorted(_context.RULES)


def _known() -> set[str]:
    """Operations that need not be taken apart."""
    written_in_place = {
        f"{name.partition('.')[0]}_{name[len(name.partition('.')[0]) :]}" for name in _context.RULES
    }
    return set(_context.RULES) | written_in_place | handled()


def lower(captured: Captured, name: str, *, time: dict[str, int] | None = None) -> Graph:
    """Lower a captured model; `time` gives the time dimension of each input of a state machine.

    Raises:
        UnsupportedOpError: an operation has no C form.
    """
    graph = Graph(name, [], [])
    context = _context.Context(normalise(decompose(captured, _known())), graph)
    if time:
        windows = {captured.input_shapes[key][dim] for key, dim in time.items()}
        context.window = graph.window = windows.pop()
        context.times = {key: _context.Time(dim, 0) for key, dim in time.items()}
        graph.streaming = True
        graph.time_inputs = dict(time)
    context.run()
    return graph
