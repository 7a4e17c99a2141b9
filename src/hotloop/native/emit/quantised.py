"""Contractions in int8 as C, on AVX-512 VNNI: four products of bytes added to each of 16 sums by one instruction.

Inputs are rounded to q in -127 … 127 and stored as q + 128, for the instruction wants one unsigned operand; the
128 times the sum of the weights is taken off again. A value that is not a number poisons its row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotloop.native.emit.contraction import find_rows, finish
from hotloop.native.emit.expressions import number
from hotloop.native.emit.loops import read_vector
from hotloop.native.emit.writer import Writer
from hotloop.native.graph import Array, Taps

__all__ = ["emit_quantised", "quantise_weight"]


def quantise_weight(weight: Array) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float64]]:
    """Weights [taps, C, N] as int8, and the value of one step for each output."""
    largest = np.abs(weight.astype(np.float64)).max(axis=(0, 1))
    step = np.where(largest > 0, largest / 127.0, 1.0)
    return np.clip(np.rint(weight / step), -127, 127).astype(np.int8), step


def emit_quantised(writer: Writer, node: Taps) -> None:
    """A contraction with weights in int8."""
    assert node.scale is not None
    taps, inner, outputs = node.weight.shape
    count = node.rows.shape[0]
    padded = -(-inner // 4) * 4
    depth = -(-taps * padded // 64) * 64
    plan = find_rows(writer, node.rows)
    base = writer.address(node.source)
    whole, step = quantise_weight(node.weight)
    vectors = -(-outputs // 16)
    high = min(count, 4)
    wide = max(1, min(vectors, writer.target.accumulators // high))
    wide = -(-vectors // -(-vectors // wide))
    bytes_name = writer.name("q")
    writer.line(f"uint8_t {bytes_name}[{high * depth}] __attribute__((aligned(64)));")
    full, rest = divmod(count, high)

    def tile(row: str, rows: int) -> None:
        poisons = []
        for r in range(rows):
            at = str(int(row) + r) if row.isdigit() else f"{row} + {r}"
            poison = writer.name("n")
            writer.line(f"__mmask16 {poison} = 0;")
            poisons.append(poison)
            tap = writer.name("t")
            with writer.block(f"for (long {tap} = 0; {tap} < {taps}; {tap}++)"):
                source = writer.name("s")
                writer.line(f"const F *{source} = {base} + {plan.offset(at, tap)};")
                target = f"{bytes_name} + {r * depth} + {tap} * {padded}"
                _emit_bytes(writer, source, target, inner, padded, node.step, node.scale or 1.0, poison)
        for first in range(0, vectors, wide):
            with writer.block():
                panel(row, rows, poisons, first, min(wide, vectors - first))

    def panel(row: str, rows: int, poisons: list[str], first: int, span: int) -> None:
        weights, factors, shifts = packed[first]
        split = 1
        while split * rows * span < 8 and split * 8 <= taps * padded:
            split *= 2
        sums = [[[writer.name("a") for _ in range(span)] for _ in range(rows)] for _ in range(split)]
        for group in sums:
            for names in group:
                for name in names:
                    writer.line(f"__m512i {name} = _mm512_setzero_si512();")
        fours = taps * padded // 4
        k = writer.name("k")

        def products(at: str, s: int) -> None:
            loaded = []
            for v in range(span):
                loaded.append(writer.name("v"))
                writer.line(
                    f"__m512i {loaded[-1]} = _mm512_load_si512({weights} + ({at}) * {span * 16} + {v * 16});"
                )
            for r in range(rows):
                x = writer.name("x")
                writer.line(
                    f"__m512i {x} = _mm512_set1_epi32(*(const I32 *)({bytes_name} + {r * depth} + ({at}) * 4));"
                )
                for v in range(span):
                    name = sums[s][r][v]
                    writer.line(f"{name} = _mm512_dpbusd_epi32({name}, {x}, {loaded[v]});")

        even = fours // split * split
        writer.line("#pragma GCC unroll 2")
        with writer.block(f"for (long {k} = 0; {k} < {even}; {k} += {split})"):
            for s in range(split):
                products(k if s == 0 else f"{k} + {s}", s)
        for c in range(even, fours):
            products(str(c), 0)
        for s in range(1, split):
            for r in range(rows):
                for v in range(span):
                    writer.line(f"{sums[0][r][v]} = _mm512_add_epi32({sums[0][r][v]}, {sums[s][r][v]});")
        for r in range(rows):
            at = str(int(row) + r) if row.isdigit() else f"{row} + {r}"
            for v in range(span):
                column = (first + v) * 16
                value = writer.name("y")
                writer.line(
                    f"V {value} = (V)_mm512_cvtepi32_ps({sums[0][r][v]}) * ld({factors} + {v * 16}) "
                    f'+ ld({shifts} + {v * 16}) + ({poisons[r]} ? __builtin_nanf("") : 0.0f);'
                )
                finish(writer, node.out, node.epilogue, value, at, str(column), min(16, outputs - column))

    packed = {
        first: _pack_panel(writer, node, whole, step, first, min(wide, vectors - first), padded)
        for first in range(0, vectors, wide)
    }
    if full > 1:
        row = writer.name("r")
        with writer.block(f"for (long {row} = 0; {row} < {full * high}; {row} += {high})"):
            tile(row, high)
    elif full:
        with writer.block():
            tile("0", high)
    if rest:
        with writer.block():
            tile(str(full * high), rest)


def _emit_bytes(
    writer: Writer, source: str, target: str, inner: int, padded: int, step: int, scale: float, poison: str
) -> None:
    """Round one row to bytes; what pads it to a multiple of four has weights of 0."""
    inverse = number(1.0 / scale)
    for start in range(0, inner, 16):
        here = min(16, inner - start)
        x = writer.name("x")
        writer.line(f"V {x} = {read_vector(f'{source} + {start * step}', step, here)};")
        writer.line(f"{poison} |= _mm512_cmp_ps_mask((__m512){x}, (__m512){x}, _CMP_UNORD_Q);")
        writer.line(f"{x} = min2(bc(127.0f), max2(bc(-127.0f), {x} * {inverse})) + 128.0f;")
        size = min(16, padded - start)
        mask = f"(__mmask16){(1 << size) - 1}"
        writer.line(
            f"_mm512_mask_cvtusepi32_storeu_epi8({target} + {start}, {mask}, _mm512_cvtps_epi32((__m512){x}));"
        )


def _pack_panel(
    writer: Writer,
    node: Taps,
    whole: npt.NDArray[np.int8],
    step: npt.NDArray[np.float64],
    first: int,
    span: int,
    padded: int,
) -> tuple[str, str, str]:
    """Weights of a panel as [fours][outputs][4]; the factor of each sum; what is added to it."""
    assert node.scale is not None
    taps, inner, outputs = whole.shape
    columns = slice(first * 16, min(outputs, (first + span) * 16))
    width = columns.stop - columns.start
    block = np.zeros((taps, padded, span * 16), np.int8)
    block[:, :inner, :width] = whole[:, :, columns]
    fours = block.reshape(taps * padded // 4, 4, span * 16).transpose(0, 2, 1)
    factors, shifts = np.zeros(span * 16), np.zeros(span * 16)
    factors[:width] = step[columns] * node.scale
    shifts[:width] = -128.0 * block.astype(np.int64).sum(axis=(0, 1))[:width] * factors[:width]
    if node.bias is not None:
        shifts[:width] += node.bias[columns]
    return (
        writer.pack(np.ascontiguousarray(fours)),
        writer.pack(factors.astype(np.float32)),
        writer.pack(shifts.astype(np.float32)),
    )
