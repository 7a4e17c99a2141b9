"""What every benchmark shares: interleaved timing, medians with an interval, the table, the JSON file."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hotloop.hardware.machine import describe_machine


@dataclass
class Figure:
    """One measured value. `spread` is half the width of a 95 % interval, in the same unit."""

    name: str
    value: float
    unit: str
    spread: float | None = None
    peer: str | None = None
    ratio: float | None = None
    limit: float | None = None


def arguments(doc: str | None, **extra: Any) -> argparse.Namespace:
    """The flags that all benchmarks have, and each benchmark's own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats: a check that it runs, not a figure"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    for name, default in extra.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def interleave(
    variants: dict[str, Callable[[], None]],
    *,
    repeats: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
    finish: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds per step of each variant, `repeats` times, in a new random order each round.

    `finish` is called inside the timed region, before the clock is read: a device's work counts.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    shuffle = random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            step = variants[name]
            start = clock()
            for _ in range(steps):
                step()
            finish()
            times[name].append((clock() - start) / steps)
    return times


def median_with_spread(values: Sequence[float], *, draws: int = 2000) -> tuple[float, float]:
    """Median and half the width of its 95 % bootstrap interval (Efron 1979)."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    low, high = medians[int(draws * 0.025)], medians[int(draws * 0.975)]
    return statistics.median(values), (high - low) / 2


def half_interval(values: Sequence[float]) -> float | None:
    """Half a 95 % interval of the mean of independent runs, as if normally distributed; None for a single one."""
    return 1.96 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def paired_ratio(mine: Sequence[float], peer: Sequence[float]) -> tuple[float, float]:
    """Median over rounds of peer's time over mine (how many times faster), and its spread."""
    return median_with_spread([p / m for m, p in zip(mine, peer, strict=True)])


def report(title: str, figures: list[Figure], path: Path | None) -> None:
    """Print a table and write the JSON file."""
    print(f"\n{title}")
    for f in figures:
        spread = f" ± {f.spread:.2g}" if f.spread is not None else ""
        ratio = f"   {f.ratio:.2f}x {f.peer}" if f.ratio is not None else ""
        limit = f"   (limit {f.limit:.4g})" if f.limit is not None else ""
        print(f"  {f.name:44} {f.value:>10.4g}{spread} {f.unit}{ratio}{limit}")
    if path is not None:
        machine = describe_machine() | {"torch": torch.__version__}
        content = {"machine": machine, "figures": [asdict(f) for f in figures]}
        path.write_text(json.dumps(content, indent=1, default=str) + "\n")
