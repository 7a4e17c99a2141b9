"""Contractions as C: outputs across a vector, inputs broadcast, several rows or partial sums in registers at once.

With one row the sum is split over partial sums, so that additions do not wait for each other; with several rows
each weight that is loaded serves all rows of a tile. Few outputs are instead dot products along the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotloop.native.emit.expressions import emit_expression, number
from hotloop.native.emit.loops import open_loops, read_vector, write_vector
from hotloop.native.emit.writer import Writer
from hotloop.native.graph import Array, Expr, MatMul, Taps, View

__all__ = ["RowPlan", "emit_matmul", "emit_taps", "find_rows", "finish"]

# Fewer outputs than this are dot products, if the inputs lie beside each other.
_DOT_OUTPUTS = 6


@dataclass(frozen=True)
class RowPlan:
    """How the offset of (row, tap) is written in C: start + row * row_stride + tap * tap_stride, or a table."""

    start: int
    row_stride: int
    tap_stride: int
    taps: int
    table: str = ""

    def offset(self, row: str, tap: str) -> str:
        """The C expression."""
        if self.table:
            return f"{self.table}[({row}) * {self.taps} + {tap}]"
        parts = [str(self.start)]
        for symbol, stride in ((row, self.row_stride), (tap, self.tap_stride)):
            if stride and symbol != "0":
                parts.append(f"({symbol}) * {stride}")
        return " + ".join(parts)


def find_rows(writer: Writer, rows: npt.NDArray[np.int64]) -> RowPlan:
    """The even form of a table of offsets, or the table itself."""
    count, taps = rows.shape
    start = int(rows[0, 0])
    row_stride = int(rows[1, 0] - start) if count > 1 else 0
    tap_stride = int(rows[0, 1] - start) if taps > 1 else 0
    even = start + np.arange(count)[:, None] * row_stride + np.arange(taps)[None] * tap_stride
    if np.array_equal(even, rows):
        return RowPlan(start, row_stride, tap_stride, taps)
    return RowPlan(0, 0, 0, taps, writer.table(rows))


def finish(
    writer: Writer, out: View, epilogue: Expr | None, acc: str, row: str, column: str, count: int
) -> None:
    """Apply the epilogue to `count` sums at (row, column) and store them."""

    def read(view: View) -> str:
        address = writer.address(view, [(row, view.strides[0]), (column, view.strides[1])])
        return read_vector(address, view.strides[1], count)

    value = acc if epilogue is None else emit_expression(writer, epilogue, read, {}, acc)
    place = writer.address(out, [(row, out.strides[0]), (column, out.strides[1])])
    writer.line(write_vector(place, out.strides[1], value, count))


def emit_taps(writer: Writer, node: Taps) -> None:
    """A contraction with weights."""
    outputs = node.weight.shape[2]
    if 0 in node.rows.shape or not outputs:
        return
    if writer.observe is not None:
        _emit_observer(writer, node)
    if outputs < _DOT_OUTPUTS and node.step == 1 and node.weight.shape[1] >= 4:
        _emit_dots(writer, node)
    else:
        _emit_panels(writer, node)


def _emit_observer(writer: Writer, node: Taps) -> None:
    """For calibration: the largest magnitude read so far, and the rows read last, into the arena."""
    assert writer.observe is not None
    slot = writer.observe.get(id(node))
    if slot is None:
        return
    taps, inner, _ = node.weight.shape
    plan, base = find_rows(writer, node.rows), writer.address(node.source)
    with writer.block(f"for (long r = 0; r < {node.rows.shape[0]}; r++) for (long t = 0; t < {taps}; t++)"):
        writer.line(f"const F *s = {base} + {plan.offset('r', 't')};")
        with writer.block(f"for (long c = 0; c < {inner}; c++)"):
            writer.line(f"float x = s[c * {node.step}], b = __builtin_fabsf(x);")
            writer.line(f"if (b > A[{slot}]) A[{slot}] = b;")
            writer.line(f"A[{slot + 1} + (r * {taps} + t) * {inner} + c] = x;")


def _tile(writer: Writer, rows: int, vectors: int) -> tuple[int, int]:
    """Rows and vectors of one register tile: the fewest loads for each multiplication."""
    limit = writer.target.accumulators
    best, cost = (1, 1), 9.9
    for wide in range(1, min(vectors, limit) + 1):
        high = min(rows, max(1, limit // wide), 14)
        groups = -(-vectors // wide) * wide / vectors
        padded = -(-rows // high) * high / rows if high > 1 else 1.0
        loads = (1 / high + 1 / wide) * groups * padded
        if loads < cost - 1e-9:
            best, cost = (high, wide), loads
    return best


def _emit_panels(writer: Writer, node: Taps) -> None:
    taps, inner, outputs = node.weight.shape
    count = node.rows.shape[0]
    vectors = -(-outputs // 16)
    high, wide = _tile(writer, count, vectors)
    if count == 1:
        wide = min(vectors, writer.target.accumulators)
        # panels of one size rather than a small last one
        wide = -(-vectors // -(-vectors // wide))
    plan = find_rows(writer, node.rows)
    base = writer.address(node.source)
    for first in range(0, vectors, wide):
        panel = min(wide, vectors - first)
        columns = slice(first * 16, min(outputs, (first + panel) * 16))
        packed = np.zeros((taps, inner, panel * 16), np.float32)
        packed[:, :, : columns.stop - columns.start] = node.weight[:, :, columns]
        weights = writer.pack(packed)
        bias = None
        if node.bias is not None:
            padded = np.zeros(panel * 16, np.float32)
            padded[: columns.stop - columns.start] = node.bias[columns]
            bias = writer.pack(padded)
        panel_of = _Panel(node, plan, base, weights, bias, first, panel, outputs)
        full, rest = divmod(count, high)
        if full > 1:
            row = writer.name("r")
            with writer.block(f"for (long {row} = 0; {row} < {full * high}; {row} += {high})"):
                _emit_tile(writer, panel_of, row, high)
        elif full:
            with writer.block():
                _emit_tile(writer, panel_of, "0", high)
        if rest:
            with writer.block():
                _emit_tile(writer, panel_of, str(full * high), rest)


@dataclass(frozen=True)
class _Panel:
    node: Taps
    plan: RowPlan
    base: str
    weights: str
    bias: str | None
    first: int
    vectors: int
    outputs: int


def _row(row: str, r: int) -> str:
    if row.isdigit():
        return str(int(row) + r)
    return row if r == 0 else f"{row} + {r}"


def _emit_tile(writer: Writer, panel: _Panel, row: str, high: int) -> None:
    node, wide = panel.node, panel.vectors
    taps, inner, _ = node.weight.shape
    split = 1
    if high == 1:
        # enough sums that additions need not wait for each other: latency 4, two a cycle
        while split * wide < 8 and split * 2 <= inner:
            split *= 2
    sums = [[[writer.name("a") for _ in range(wide)] for _ in range(high)] for _ in range(split)]
    for s in range(split):
        for r in range(high):
            for v in range(wide):
                start = f"ld({panel.bias} + {v * 16})" if s == 0 and panel.bias else "bc(0.0f)"
                writer.line(f"V {sums[s][r][v]} = {start};")
    tap = "0"
    if taps > 1:
        tap = writer.name("t")
        writer.line(f"for (long {tap} = 0; {tap} < {taps}; {tap}++) {{")
        writer.depth += 1
    sources = [writer.name("s") for _ in range(high)]
    for r, source in enumerate(sources):
        writer.line(f"const F *{source} = {panel.base} + {panel.plan.offset(_row(row, r), tap)};")
    weights = writer.name("w")
    writer.line(
        f"const F *{weights} = {panel.weights}" + (f" + {tap} * {inner * wide * 16};" if taps > 1 else ";")
    )
    full = inner // split * split

    def steps(at: str, ways: int) -> None:
        for s in range(ways):
            index = at if s == 0 else f"({at} + {s})"
            loaded = []
            for v in range(wide):
                text = f"ld({weights} + {index} * {wide * 16} + {v * 16})"
                if high > 1:
                    loaded.append(writer.name("v"))
                    writer.line(f"V {loaded[-1]} = {text};")
                else:
                    loaded.append(text)
            for r in range(high):
                x = writer.name("x")
                writer.line(f"V {x} = bc({sources[r]}[{index} * {node.step}]);")
                for v in range(wide):
                    writer.line(f"{sums[s][r][v]} += {x} * {loaded[v]};")

    if full:
        at = writer.name("c")
        if full // split <= 1:
            steps("0", split)
        else:
            unroll = max(1, min(8, 32 // (split * wide * high)))
            writer.line(f"#pragma GCC unroll {unroll}")
            with writer.block(f"for (long {at} = 0; {at} < {full}; {at} += {split})"):
                steps(at, split)
    for c in range(full, inner):
        steps(str(c), 1)
    if taps > 1:
        writer.depth -= 1
        writer.line("}")
    _join(writer, sums)
    for r in range(high):
        for v in range(wide):
            column = (panel.first + v) * 16
            count = min(16, panel.outputs - column)
            finish(writer, node.out, node.epilogue, sums[0][r][v], _row(row, r), str(column), count)


def _join(writer: Writer, sums: list[list[list[str]]]) -> None:
    """Add partial sums pairwise into the first."""
    step = 1
    while step < len(sums):
        for s in range(0, len(sums) - step, 2 * step):
            for a, b in zip(sums[s], sums[s + step], strict=True):
                for x, y in zip(a, b, strict=True):
                    writer.line(f"{x} += {y};")
        step *= 2


def _emit_dots(writer: Writer, node: Taps) -> None:
    taps, inner, outputs = node.weight.shape
    width = -(-inner // 16) * 16
    packed = np.zeros((outputs, taps, width), np.float32)
    packed[:, :, :inner] = node.weight.transpose(2, 0, 1)
    weights = writer.pack(packed)
    plan = find_rows(writer, node.rows)
    base = writer.address(node.source)
    vectors, rest = divmod(inner, 16)
    row = "0"
    if node.rows.shape[0] > 1:
        row = open_loops(writer, [node.rows.shape[0]], "r")[0]
    split = max(1, min(4 // outputs, vectors * taps))
    sums = [[[writer.name("a") for _ in range(outputs)]] for _ in range(split)]
    for names in sums:
        for name in names[0]:
            writer.line(f"V {name} = bc(0.0f);")
    turn = 0
    loop = taps * vectors > 32
    for t in range(1 if loop else taps):
        tap = writer.name("t") if loop else str(t)
        source = writer.name("s")
        if loop:
            writer.line(f"for (long {tap} = 0; {tap} < {taps}; {tap}++) {{")
            writer.depth += 1
        writer.line(f"const F *{source} = {base} + {plan.offset(row, tap)};")

        def part(at: str, count: int, tap: str, source: str, turn: int) -> None:
            x = writer.name("x")
            writer.line(f"V {x} = {read_vector(f'{source} + {at}', 1, count)};")
            for n in range(outputs):
                place = f"{weights} + {n * taps * width} + {tap} * {width} + {at}"
                writer.line(f"{sums[turn % split][0][n]} += {x} * ld({place});")

        if loop:
            at = writer.name("c")
            writer.line(
                f"for (long {at} = 0; {at} < {vectors // split * split * 16}; {at} += {split * 16}) {{"
            )
            writer.depth += 1
            for s in range(split):
                part(f"({at} + {s * 16})", 16, tap, source, s)
            writer.depth -= 1
            writer.line("}")
            for v in range(vectors // split * split, vectors):
                part(str(v * 16), 16, tap, source, v)
            if rest:
                part(str(vectors * 16), rest, tap, source, 0)
            writer.depth -= 1
            writer.line("}")
        else:
            for v in range(vectors):
                part(str(v * 16), 16, tap, source, turn)
                turn += 1
            if rest:
                part(str(vectors * 16), rest, tap, source, turn)
                turn += 1
    _join(writer, sums)
    result = writer.name("y")
    parts = [f"hsum({name})" + (_literal(node.bias, n)) for n, name in enumerate(sums[0][0])]
    writer.line(f"V {result} = {{{', '.join(parts)}}};")
    finish(writer, node.out, node.epilogue, result, row, "0", outputs)
    if row != "0":
        writer.depth -= 1
        writer.line("}")


def _literal(bias: Array | None, index: int) -> str:

    return "" if bias is None else f" + {number(float(bias[index]))}"


# ---- two computed values


def emit_matmul(writer: Writer, node: MatMul) -> None:
    """A product of two computed values, for each of the leading dimensions."""
    batch = list(node.out.shape[:-2])
    m, n = node.out.shape[-2:]
    k = node.a.shape[-1]
    if 0 in (*node.out.shape, k):
        return
    counters = open_loops(writer, batch, "b")

    def at(view: View) -> list[tuple[str, int]]:
        return list(zip(counters, view.strides[:-2], strict=True))

    a, b, out = (writer.name(stem) for stem in "pqo")
    writer.line(f"const F *{a} = {writer.address(node.a, at(node.a))};")
    writer.line(f"const F *{b} = {writer.address(node.b, at(node.b))};")
    writer.line(f"F *{out} = {writer.address(node.out, at(node.out))};")
    vectors = -(-n // 16)
    high, wide = _tile(writer, m, vectors)
    full, rest = divmod(m, high)
    if (
        node.b.strides[-2] == node.a.strides[-1] == 1
        and node.b.strides[-1] != 1
        and m <= 4
        and n > 1
        and k >= 4
    ):
        # both lie along what is summed over: sixteen at a time, where columns would have to be gathered
        _emit_dot_product(writer, node, (a, b, out), k)
        vectors = 0
    for first in range(0, vectors, wide):
        panel = range(first, min(first + wide, vectors))
        if full > 1:
            row = writer.name("r")
            with writer.block(f"for (long {row} = 0; {row} < {full * high}; {row} += {high})"):
                _emit_product(writer, node, (a, b, out), row, high, panel, k)
        elif full:
            with writer.block():
                _emit_product(writer, node, (a, b, out), "0", high, panel, k)
        if rest:
            with writer.block():
                _emit_product(writer, node, (a, b, out), str(full * high), rest, panel, k)
    for _ in counters:
        writer.depth -= 1
        writer.line("}")


def _emit_dot_product(writer: Writer, node: MatMul, names: tuple[str, str, str], k: int) -> None:
    a, b, out = names
    m, n = node.out.shape[-2:]
    (am, _), (_, bn), (om, on) = (view.strides[-2:] for view in (node.a, node.b, node.out))
    parts = [(at, min(16, k - at)) for at in range(0, k, 16)]
    for r in range(m):
        column = writer.name("c")
        with writer.block():
            kept = len(parts) <= 8
            if kept:
                for at, count in parts:
                    writer.line(f"V {a}_{at} = {read_vector(f'{a} + {r * am + at}', 1, count)};")
            writer.line("#pragma GCC unroll 4")
            with writer.block(f"for (long {column} = 0; {column} < {n}; {column}++)"):
                writer.line(f"const F *s = {b} + {column} * {bn};")
                writer.line("V t = bc(0.0f);")
                for at, count in parts:
                    x = f"{a}_{at}" if kept else read_vector(f"{a} + {r * am + at}", 1, count)
                    writer.line(f"t += {x} * {read_vector(f's + {at}', 1, count)};")
                writer.line(f"{out}[{r * om} + {column} * {on}] = hsum(t) * {number(node.alpha)};")


def _emit_product(
    writer: Writer, node: MatMul, names: tuple[str, str, str], row: str, high: int, panel: range, k: int
) -> None:

    a, b, out = names
    n = node.out.shape[-1]
    (am, ak), (bk, bn), (om, on) = (view.strides[-2:] for view in (node.a, node.b, node.out))
    bn = bn if n > 1 else 1
    split = 1
    while split * high * len(panel) < 8 and split * 2 <= k:
        split *= 2
    sums = [[[writer.name("a") for _ in panel] for _ in range(high)] for _ in range(split)]
    for group in sums:
        for names_of_row in group:
            for name in names_of_row:
                writer.line(f"V {name} = bc(0.0f);")
    index = writer.name("k")

    def step(at: str, s: int) -> None:
        loaded = []
        for v in panel:
            loaded.append(writer.name("v"))
            address = f"{b} + ({at}) * {bk} + {v * 16 * bn}"
            writer.line(f"V {loaded[-1]} = {read_vector(address, bn, min(16, n - v * 16))};")
        for r in range(high):
            x = writer.name("x")
            writer.line(f"V {x} = bc({a}[({_row(row, r)}) * {am} + ({at}) * {ak}]);")
            for place in range(len(panel)):
                writer.line(f"{sums[s][r][place]} += {x} * {loaded[place]};")

    full = k // split * split
    with writer.block(f"for (long {index} = 0; {index} < {full}; {index} += {split})"):
        for s in range(split):
            step(index if s == 0 else f"{index} + {s}", s)
    for c in range(full, k):
        step(str(c), 0)
    _join(writer, sums)
    for r in range(high):
        for place, v in enumerate(panel):
            value = sums[0][r][place] + ("" if node.alpha == 1.0 else f" * {number(node.alpha)}")
            address = f"{out} + ({_row(row, r)}) * {om} + {v * 16 * (on if n > 1 else 1)}"
            writer.line(write_vector(address, on if n > 1 else 1, value, min(16, n - v * 16)))
