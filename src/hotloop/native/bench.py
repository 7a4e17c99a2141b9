"""Latency honestly told: pinned, warmed, percentiles by block and in all, cold caches, after idling, a floor."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.native.library import open_library
from hotloop.native.timing import Samples, measure_calls, measure_core

__all__ = ["BenchResult", "Row", "bench", "format_result", "plot_histogram", "write_json"]


@dataclass(frozen=True)
class Row:
    """Nanoseconds of one way of calling: percentiles of the quietest block, of all calls, and the slowest call."""

    what: str
    p50: float
    p99: float
    p999: float
    all_p50: float
    all_p99: float
    all_p999: float
    highest: float
    calls: int


@dataclass
class BenchResult:
    """All rows of a library, the histogram of its warm calls (edges in ns), the timer's cost (part of each figure)."""

    path: str
    description: dict[str, Any]
    rows: list[Row]
    timer_ns: float
    weight_floor_ns: float
    load_average: float
    histogram: tuple[list[float], list[int]] = field(default_factory=lambda: ([], []))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _row(what: str, samples: Samples) -> Row:
    return Row(
        what,
        samples.percentile(50),
        samples.percentile(99),
        samples.percentile(99.9),
        samples.percentile(50, quietest=False),
        samples.percentile(99, quietest=False),
        samples.percentile(99.9, quietest=False),
        samples.highest(),
        sum(block.size for block in samples.blocks),
    )


def bench(
    path: str | os.PathLike[str], *, calls: int = 20_000, blocks: int = 10, quick: bool = False
) -> BenchResult:
    """Measure a library's latency from C on one pinned core, in real-time priority where that is allowed.

    The clock is the time-stamp counter around each call; its own cost is in every figure and stated. Inputs rotate
    through 16 random rows.

    Raises:
        LibraryError: the file is no library of hotloop's.
    """
    library = open_library(path)
    if quick:
        calls, blocks = min(calls, 2000), min(blocks, 3)
    warm = measure_calls(library, calls=calls, blocks=blocks)
    rows = [_row("warm", warm)]
    if library.description["streaming"]:
        rows = [
            _row("commit, after prep", measure_calls(library, calls=calls, blocks=blocks, prep=True)),
            _row("prep and commit", warm),
        ]
    few = max(20, calls // 400)
    prep = bool(library.description["streaming"])
    rows.append(_row("cold caches", measure_calls(library, calls=few, blocks=2, cold=True, prep=prep)))
    rows.append(
        _row("after 100 us idle", measure_calls(library, calls=few * 5, blocks=2, idle_us=100.0, prep=prep))
    )
    core = measure_core()
    weights = int(library.description["weight_bytes"])
    size = weights + int(library.description["arena_bytes"])
    rate = core.l1_rate if size <= core.l1_bytes else core.l2_rate if size <= core.l2_bytes else core.l3_rate
    pooled = np.concatenate(warm.blocks)
    edges = np.geomspace(max(pooled.min() * 0.9, 1.0), pooled.max() * 1.1, 61)
    counts, _ = np.histogram(pooled, edges)
    return BenchResult(
        str(Path(path).absolute()),
        library.description,
        rows,
        warm.timer_ns,
        weights / rate * 1e9,
        os.getloadavg()[0],
        ([float(edge) for edge in edges], [int(count) for count in counts]),
    )


def format_result(result: BenchResult) -> str:
    """The page that `hotloop native bench` prints; microseconds."""
    d = result.description
    lines = [
        f"{result.path}: {d['precision']}, {d['target']}, {d['weight_bytes'] / 1024:.0f} KiB of weights, "
        f"{d['arena_bytes'] / 1024:.0f} KiB of memory",
        f"timer {result.timer_ns:.0f} ns, in every figure; reading the weights once takes "
        f"{result.weight_floor_ns / 1e3:.3f} us; "
        f"load average {result.load_average:.1f}",
        "",
        f"{'us':20}{'quietest block':>27}{'all calls':>27}{'slowest':>10}",
        f"{'':20}{'p50':>9}{'p99':>9}{'p99.9':>9}{'p50':>9}{'p99':>9}{'p99.9':>9}{'':>10}{'calls':>9}",
    ]
    for row in result.rows:
        figures = (row.p50, row.p99, row.p999, row.all_p50, row.all_p99, row.all_p999)
        text = "".join(f"{value / 1e3:9.3f}" for value in figures)
        lines.append(f"{row.what:20}{text}{row.highest / 1e3:10.1f}{row.calls:9d}")
    lines += ["", "warm calls, by latency"]
    edges, counts = result.histogram
    top = max(counts) or 1
    for low, count in zip(edges, counts, strict=False):
        if count:
            bar = "#" * max(1, round(50 * np.log1p(count) / np.log1p(top)))
            lines.append(f"{low / 1e3:10.3f} us {count:9d} {bar}")
    return "\n".join(lines)


def plot_histogram(result: BenchResult, path: str | os.PathLike[str]) -> None:
    """The histogram as an SVG file: latency to the right and calls upwards, both logarithmic."""
    edges, counts = result.histogram
    top = np.log1p(max(counts) or 1)
    width, height, pad = 640, 240, 40
    step = (width - 2 * pad) / len(counts)
    bars = "".join(
        f'<rect x="{pad + i * step:.1f}" y="{height - pad - (height - 2 * pad) * np.log1p(c) / top:.1f}" '
        f'width="{step * 0.9:.1f}" height="{(height - 2 * pad) * np.log1p(c) / top:.1f}" fill="#36c"/>'
        for i, c in enumerate(counts)
        if c
    )
    ticks = "".join(
        f'<text x="{pad + i * step:.1f}" y="{height - pad + 16}" font-size="11" text-anchor="middle">'
        f"{edges[i] / 1e3:.2g}</text>"
        for i in range(0, len(edges), 10)
    )
    title = f"{Path(result.path).name}: calls by latency in us, both axes logarithmic"
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
        f'<text x="{pad}" y="20" font-size="13">{title}</text>{bars}{ticks}</svg>\n'
    )
    temporary = Path(f"{path}.partial")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(result: BenchResult, path: str | os.PathLike[str]) -> None:
    """The result as a JSON file."""
    temporary = Path(f"{path}.partial")
    temporary.write_text(json.dumps(result.as_dict(), indent=1) + "\n")
    os.replace(temporary, path)
