"""Prep and commit: what does not depend on the newest event is computed before it comes."""

from __future__ import annotations

from hotloop.native.graph import Graph, Node

__all__ = ["split_prep"]


def split_prep(graph: Graph) -> None:
    """Move every node that neither reads an input nor anything made from one in this step to `graph.prep`."""
    tainted = {id(view.buffer) for _, view in graph.inputs}
    prep: list[Node] = []
    commit: list[Node] = []
    # a buffer that commit reads must not be overwritten by prep of the same step, nor the other way round
    read_in_commit: set[int] = set()
    for node in graph.nodes:
        reads = {id(view.buffer) for view in node.reads()}
        writes = {id(view.buffer) for view in node.writes()}
        outside = any(view.buffer.kind == "output" for view in node.writes())
        if reads & tainted or writes & (tainted | read_in_commit) or outside:
            tainted |= writes
            read_in_commit |= reads
            commit.append(node)
        else:
            prep.append(node)
    graph.prep, graph.nodes = prep, commit
