"""What `hotloop native bench` shows: a page of text, an SVG picture, a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from hotloop.native.bench import BenchResult, Comparison, Row

__all__ = ["draw_svg", "format_result", "write_json"]

# More than rounding, by precision: the model given is not the one that the library was built from.
_SAME = {"fp32": 1e-3, "int8": 0.3}


def format_result(result: BenchResult) -> str:
    """The page; microseconds."""
    d = result.description
    lines = [
        f"{result.path}: {d['precision']}, {d['target']}, {d['weight_bytes'] / 1024:.0f} KiB of weights, "
        f"{d['arena_bytes'] / 1024:.0f} KiB of memory; load average {result.load_average:.1f}",
        f"from C, the timer's {result.timer_ns:.0f} ns in every figure",
        "",
        *_table(result.rows),
        "",
        *_floor_lines(result),
    ]
    if result.comparison is not None:
        lines += ["", *_comparison_lines(result.comparison, _SAME[d["precision"]])]
    what = "prep and commit" if d["streaming"] else "warm calls"
    lines += ["", f"{what} by latency, bars logarithmic"]
    edges, counts = result.histogram
    top = max(counts) or 1
    for low, count in zip(edges, counts, strict=False):
        if count:
            bar = "#" * max(1, round(50 * np.log1p(count) / np.log1p(top)))
            lines.append(f"{low / 1e3:10.3f} us {count:9d} {bar}")
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        f"{'us':20}{'quietest block':>27}{'all calls':>27}{'slowest':>10}",
        f"{'':20}{'p50':>9}{'p99':>9}{'p99.9':>9}{'p50':>9}{'p99':>9}{'p99.9':>9}{'':>10}{'calls':>9}",
    ]
    for row in rows:
        figures = (row.p50, row.p99, row.p999, row.all_p50, row.all_p99, row.all_p999)
        text = "".join(f"{value / 1e3:9.3f}" for value in figures)
        lines.append(f"{row.what:20}{text}{row.highest / 1e3:10.1f}{row.calls:9d}")
    return lines


def _floor_lines(result: BenchResult) -> list[str]:
    if not result.floors:
        return ["floor: not known, the library was built before hotloop counted its work; build it again"]
    lines = [
        f"{'floor, us':20}{'FLOPs':>12}{'weights read':>15}{'arithmetic':>12}"
        f"{'from L1':>9}{'L2':>9}{'L3':>9}{'floor':>9}"
    ]
    for f in result.floors:
        flops = 2 * (f.work.multiply_adds + f.work.int8_multiply_adds)
        figures = "".join(f"{value / 1e3:9.3f}" for value in (f.l1_ns, f.l2_ns, f.l3_ns, f.ns))
        lines.append(
            f"{f.what:20}{flops:12,d}{f.work.weight_bytes:13,d} B{f.arithmetic_ns / 1e3:12.3f}{figures}  ({f.level})"
        )
    return lines


def _comparison_lines(comparison: Comparison, same: float) -> list[str]:
    lines = ["from Python, each with its cheapest call on one thread, in turns, the clock's cost taken off"]
    lines += comparison.notes
    error = comparison.relative_error
    if error is None or not error < same:
        told = "not comparable" if error is None else f"relative error {error:.1e}"
        lines.append(
            f"the model given is not the one that the library was built from ({told}): compare times only"
        )
    lines += _table(comparison.rows)
    lines += [f"{name:20}not measured: {why}" for name, why in comparison.failed.items()]
    ours = comparison.rows[0]
    lines += [
        f"{row.what:20}takes {row.p50 / ours.p50:.1f} times as long at p50, {row.p99 / ours.p99:.1f} at p99"
        for row in comparison.rows[1:]
        if ours.p50 > 0 and ours.p99 > 0
    ]
    return lines


def draw_svg(result: BenchResult, path: str | os.PathLike[str]) -> None:
    """A picture: above, warm calls by latency; below, p50 to p99.9 of every way of calling and of the peers, on the
    same axis of microseconds. Latency and counts are logarithmic; dashed: the floor of a call."""
    edges, counts = result.histogram
    rows = [*result.rows, *(result.comparison.rows if result.comparison else [])]
    floor = result.floors[0].ns if result.floors else 0.0
    shown = [edges[0], edges[-1], *(v for row in rows for v in (row.p50, row.p999)), floor]
    low, high = (np.log10(pick(v for v in shown if v > 0)) for pick in (min, max))
    left, width, top, tall = 170, 560, 40, 180
    bottom = top + tall + 30 + 20 * len(rows)

    def x(ns: float) -> float:
        return float(left + width * (np.log10(max(ns, 10**low)) - low) / max(high - low, 1e-9))

    most = np.log1p(max(counts) or 1)
    grid: list[str] = []
    parts: list[str] = []
    for start, stop, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if count:
            up = tall * float(np.log1p(count) / most)
            parts.append(
                f'<rect x="{x(start):.1f}" y="{top + tall - up:.1f}" width="{max(x(stop) - x(start) - 0.5, 0.5):.1f}" '
                f'height="{up:.1f}" fill="#36c"><title>{start / 1e3:.3f} us: {count}</title></rect>'
            )
    for index, row in enumerate(rows):
        y = top + tall + 30 + 20 * index
        peer = index >= len(result.rows)
        colour = "#c63" if peer else "#36c"
        name = f"{row.what}, from Python" if peer else row.what
        parts.append(
            f'<g><text x="{left - 8}" y="{y + 4}" font-size="11" text-anchor="end">{escape(name)}</text>'
            f'<line x1="{x(row.p50):.1f}" x2="{x(row.p999):.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
            f'<circle cx="{x(row.p50):.1f}" cy="{y}" r="4" fill="{colour}"/>'
            + "".join(
                f'<line x1="{x(v):.1f}" x2="{x(v):.1f}" y1="{y - 5}" y2="{y + 5}" stroke="{colour}"/>'
                for v in (row.p99, row.p999)
            )
            + f"<title>{escape(name)}: p50 {row.p50 / 1e3:.3f}, p99 {row.p99 / 1e3:.3f}, "
            f"p99.9 {row.p999 / 1e3:.3f} us</title></g>"
        )
    for power in range(int(np.floor(low)), int(np.ceil(high)) + 1):
        for digit in (1, 2, 5):
            ns = digit * 10.0**power
            if low <= np.log10(ns) <= high:
                grid.append(
                    f'<line x1="{x(ns):.1f}" x2="{x(ns):.1f}" y1="{top}" y2="{bottom - 8}" stroke="#ddd"/>'
                    f'<text x="{x(ns):.1f}" y="{bottom + 8}" font-size="11" text-anchor="middle">{ns / 1e3:g}</text>'
                )
    if floor:
        parts.append(
            f'<line x1="{x(floor):.1f}" x2="{x(floor):.1f}" y1="{top}" y2="{bottom - 8}" stroke="#393" '
            f'stroke-dasharray="4 3"><title>floor {floor / 1e3:.3f} us</title></line>'
        )
    title = f"{Path(result.path).name}, us. Above: calls by latency; below: p50 (dot), p99, p99.9; dashed: the floor"
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 30}" height="{bottom + 20}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="20" y="22" font-size="13">{escape(title)}</text>{"".join(grid + parts)}</svg>\n'
    )
    _write(Path(path), text)


def write_json(result: BenchResult, path: str | os.PathLike[str]) -> None:
    """The result as a JSON file."""
    _write(Path(path), json.dumps(result.as_dict(), indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
