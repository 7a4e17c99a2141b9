"""Elementwise loops, ring pushes, lookups and reductions as C."""

from __future__ import annotations

from hotloop.native.emit.expressions import emit_expression, number
from hotloop.native.emit.writer import Writer
from hotloop.native.graph import Lookup, Map, Push, Reduce, View

__all__ = [
    "collapse",
    "emit_lookup",
    "emit_map",
    "emit_push",
    "emit_reduce",
    "open_loops",
    "read_vector",
    "write_vector",
]

# Up to so many vectors the loop is written out.
_UNROLL = 4


def collapse(shape: tuple[int, ...], views: list[View]) -> tuple[list[int], dict[int, list[int]]]:
    """Merge dimensions that every view walks evenly; drop those of size 1. Returns sizes and strides by id(view)."""
    # one view may stand for both a load and a store
    views = list({id(view): view for view in views}.values())
    sizes: list[int] = []
    strides: dict[int, list[int]] = {id(view): [] for view in views}
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(strides[id(v)][-1] == v.strides[dim] * size for v in views):
            sizes[-1] *= size
            for v in views:
                strides[id(v)][-1] = v.strides[dim]
            continue
        sizes.append(size)
        for v in views:
            strides[id(v)].append(v.strides[dim])
    return sizes, strides


def open_loops(writer: Writer, sizes: list[int], stem: str = "i") -> list[str]:
    """Open one loop for each size; returns the counters. The caller closes them with `close_loops`."""
    names = []
    for size in sizes:
        name = writer.name(stem)
        writer.line(f"for (long {name} = 0; {name} < {size}; {name}++) {{")
        writer.depth += 1
        names.append(name)
    return names


def _close_loops(writer: Writer, count: int) -> None:
    for _ in range(count):
        writer.depth -= 1
        writer.line("}")


def read_vector(address: str, stride: int, count: int, fill: str = "0.0f") -> str:
    """C text that loads `count` elements `stride` apart."""
    if stride == 0:
        return f"bc(*({address}))"
    if stride == 1:
        if count == 16:
            return f"ld({address})"
        return f"ldn({address}, {count})" if fill == "0.0f" else f"ldf({address}, {count}, {fill})"
    return f"gat({address}, {stride})" if count == 16 else f"gatn({address}, {stride}, {count}, {fill})"


def write_vector(address: str, stride: int, value: str, count: int) -> str:
    """C text that stores `count` elements `stride` apart."""
    if stride == 1:
        return f"st({address}, {value});" if count == 16 else f"stn({address}, {value}, {count});"
    return f"scat({address}, {stride}, {value}, {count});"


def emit_map(writer: Writer, node: Map) -> None:
    """An elementwise node."""
    if 0 in node.shape:
        return
    views = [*node.reads(), *node.writes()]
    sizes, strides = collapse(node.shape, views)
    if not sizes:
        sizes = [1]
        strides = {id(v): [1] for v in views}
    stores = [view for view, _ in node.stores]

    def score(dim: int) -> tuple[int, int, int]:
        good = sum(strides[id(v)][dim] in (0, 1) for v in views)
        return sum(strides[id(v)][dim] == 1 for v in stores), good, min(sizes[dim], 16)

    inner = max(range(len(sizes)), key=score)
    # a longer loop is worth a gather where the best one is very short
    if sizes[inner] < 4:
        inner = max(range(len(sizes)), key=lambda d: (min(sizes[d], 16), *score(d)))
    outer = [d for d in range(len(sizes)) if d != inner]
    counters = open_loops(writer, [sizes[d] for d in outer])

    def position(view: View, index: str) -> str:
        pairs = [(name, strides[id(view)][d]) for name, d in zip(counters, outer, strict=True)]
        return writer.address(view, [*pairs, (index, strides[id(view)][inner])])

    def body(index: str, count: int) -> None:
        known: dict[int, str] = {}

        def read(view: View) -> str:
            return read_vector(position(view, index), strides[id(view)][inner], count)

        values = [emit_expression(writer, expr, read, known) for _, expr in node.stores]
        for (view, _), value in zip(node.stores, values, strict=True):
            writer.line(write_vector(position(view, index), strides[id(view)][inner], value, count))

    full, rest = divmod(sizes[inner], 16)
    _run_vectors(writer, full, rest, body)
    _close_loops(writer, len(outer))


def _run_vectors(writer: Writer, full: int, rest: int, body: object) -> None:
    assert callable(body)
    if full > _UNROLL:
        index = writer.name("j")
        with writer.block(f"for (long {index} = 0; {index} < {full * 16}; {index} += 16)"):
            body(index, 16)
    else:
        for k in range(full):
            with writer.block():
                body(str(k * 16), 16)
    if rest:
        with writer.block():
            body(str(full * 16), rest)


def emit_push(writer: Writer, node: Push) -> None:
    """The newest row of a ring, written twice, `length` rows apart."""
    size = node.source.shape[0]
    inner = node.ring.strides[0]

    def body(index: str, count: int) -> None:
        value = writer.name("e")
        stride = node.source.strides[0] if size > 1 else 1
        writer.line(
            f"V {value} = {read_vector(writer.address(node.source, [(index, stride)]), stride, count)};"
        )
        for copy in (0, node.length * node.stride):
            place = writer.address(node.ring, [(index, inner)]) + f" + {copy}"
            writer.line(write_vector(place, inner if size > 1 else 1, value, count))

    _run_vectors(writer, size // 16, size % 16, body)


def emit_lookup(writer: Writer, node: Lookup) -> None:
    """Rows of a table; the index is clamped, so no input reads outside."""
    rows, width = node.table.shape
    counters = open_loops(writer, [node.index.shape[0]])
    at = counters[0]
    k, source = writer.name("k"), writer.name("p")
    writer.line(f"long {k} = (long)*({writer.address(node.index, [(at, node.index.strides[0])])});")
    writer.line(f"{k} = {k} < 0 ? 0 : {k} > {rows - 1} ? {rows - 1} : {k};")
    writer.line(f"const F *{source} = {writer.address(node.table)} + {k} * {node.table.strides[0]};")
    stride = node.table.strides[1] if width > 1 else 1

    def body(index: str, count: int) -> None:
        value = read_vector(f"{source} + {index} * {stride}", stride, count)
        place = writer.address(node.out, [(at, node.out.strides[0]), (index, node.out.strides[1])])
        writer.line(write_vector(place, node.out.strides[1] if width > 1 else 1, value, count))

    _run_vectors(writer, width // 16, width % 16, body)
    _close_loops(writer, 1)


_START = {"sum": "0.0f", "max": "-__builtin_inff()", "min": "__builtin_inff()"}
_JOIN = {"sum": "{0} + {1}", "max": "vmax({0}, {1})", "min": "vmin({0}, {1})"}


def emit_reduce(writer: Writer, node: Reduce) -> None:
    """A reduction over the last dimension: along it, or, where that is not contiguous, beside it."""
    length, step = node.source.shape[-1], node.source.strides[-1]
    lead = View(
        node.source.buffer,
        node.source.shape[:-1],
        node.source.strides[:-1],
        node.source.offset,
        node.source.terms,
    )
    sizes, strides = collapse(lead.shape, [lead, node.out])
    beside = bool(sizes) and step != 1 and strides[id(lead)][-1] == 1 and strides[id(node.out)][-1] == 1
    outer = sizes[:-1] if beside else sizes
    counters = open_loops(writer, outer)

    def at(view: View) -> list[tuple[str, int]]:
        return [(name, strides[id(view)][d]) for d, name in enumerate(counters)]

    start, join = _START[node.kind], _JOIN[node.kind]
    if beside:

        def body(index: str, count: int) -> None:
            total, j = writer.name("s"), writer.name("j")
            writer.line(f"V {total} = bc({start});")
            with writer.block(f"for (long {j} = 0; {j} < {length}; {j}++)"):
                value = read_vector(writer.address(lead, [*at(lead), (index, 1), (j, step)]), 1, count)
                writer.line(f"{total} = {join.format(total, value)};")
            result = total if node.scale == 1.0 else f"{total} * {number(node.scale)}"
            writer.line(write_vector(writer.address(node.out, [*at(node.out), (index, 1)]), 1, result, count))

        _run_vectors(writer, sizes[-1] // 16, sizes[-1] % 16, body)
    else:
        total = writer.name("s")
        writer.line(f"V {total} = bc({start});")

        def add(index: str, count: int) -> None:
            address = writer.address(lead, [*at(lead), (index, step)])
            value = read_vector(address, step if length > 1 else 1, count, start)
            writer.line(f"{total} = {join.format(total, value)};")

        _run_vectors(writer, length // 16, length % 16, add)
        fold = {"sum": "hsum", "max": "hmax", "min": "hmin"}[node.kind]
        value = f"{fold}({total})"
        if node.kind != "sum":
            # not a number wins, as in torch.amax
            value = f"hkeep({total}, {value})"
        writer.line(f"*({writer.address(node.out, at(node.out))}) = {value} * {number(node.scale)};")
    _close_loops(writer, len(outer))
