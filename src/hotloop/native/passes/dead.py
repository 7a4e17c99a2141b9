"""Dropping what nobody reads."""

from __future__ import annotations

from hotloop.native.graph import Graph

__all__ = ["drop_dead"]


def drop_dead(graph: Graph) -> None:
    """Remove nodes whose results are never read and are neither outputs nor state."""
    while True:
        read = {id(view.buffer) for node in (*graph.prep, *graph.nodes) for view in node.reads()}
        before = len(graph.nodes)
        graph.nodes = [
            node
            for node in graph.nodes
            if any(
                view.buffer.kind in ("output", "state") or id(view.buffer) in read for view in node.writes()
            )
        ]
        if len(graph.nodes) == before:
            return
