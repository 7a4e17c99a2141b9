"""Where each value lies in the arena: state first, then what is filled once, then values that share memory in turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotloop.native.graph import Buffer, Graph, Loop, Node

__all__ = ["Arena", "plan_arena"]

_ALIGN = 16
# Loads of whole vectors may reach so far beyond a value.
_SLACK = 16


@dataclass
class Arena:
    """Offsets in elements by id of the buffer; `state` elements come first, then `fixed`."""

    offsets: dict[int, int] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    state: int = 0
    fixed: int = 0
    size: int = 0


def _round(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def plan_arena(graph: Graph) -> Arena:
    """Give every buffer but inputs, outputs and constants a place."""
    arena = Arena()
    order: list[Node] = [*graph.prep, *graph.nodes]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    known: dict[int, Buffer] = {}
    for place, node in enumerate(order):
        for view in _touched(node):
            key = id(view)
            known[key] = view
            first.setdefault(key, place)
            last[key] = place
    cursor = 0
    for kind in ("state", "fixed"):
        for key, buffer in known.items():
            if buffer.kind == kind:
                arena.offsets[key] = cursor
                arena.buffers.append(buffer)
                cursor += _round(buffer.size)
        if kind == "state":
            arena.state = cursor
    arena.fixed = cursor - arena.state
    placed: list[tuple[int, int, int, int]] = []
    temps = [key for key, buffer in known.items() if buffer.kind == "temp"]
    for key in sorted(temps, key=lambda k: (-known[k].size, first[k])):
        size = _round(known[key].size)
        taken = sorted(
            (start, stop) for start, stop, begin, end in placed if begin <= last[key] and first[key] <= end
        )
        offset = cursor
        for start, stop in taken:
            if start - offset >= size:
                break
            offset = max(offset, stop)
        placed.append((offset, offset + size, first[key], last[key]))
        arena.offsets[key] = offset
        arena.buffers.append(known[key])
    arena.size = max([cursor, *(stop for _, stop, _, _ in placed)]) + _SLACK
    return arena


def _touched(node: Node) -> list[Buffer]:
    if isinstance(node, Loop):
        return [buffer for item in node.body for buffer in _touched(item)]
    return [
        view.buffer
        for view in (*node.reads(), *node.writes())
        if view.buffer.kind in ("state", "fixed", "temp")
    ]
