"""Rewriting the nodes, one idea each; `optimise` runs them in order."""

from __future__ import annotations

from hotloop.native.graph import Graph
from hotloop.native.passes.arena import Arena, plan_arena
from hotloop.native.passes.dead import drop_dead
from hotloop.native.passes.fold import fold_affine
from hotloop.native.passes.fuse import fuse
from hotloop.native.passes.place import place_copies
from hotloop.native.passes.split import split_prep

__all__ = [
    "Arena",
    "drop_dead",
    "fold_affine",
    "fuse",
    "optimise",
    "place_copies",
    "plan_arena",
    "split_prep",
]


def optimise(graph: Graph) -> None:
    """Fuse, fold, place and drop until nothing changes, then split off what can be done before the event."""
    for _ in range(8):
        changed = fuse(graph)
        fold_affine(graph)
        changed |= place_copies(graph)
        drop_dead(graph)
        if not changed:
            break
    if graph.streaming:
        split_prep(graph)
