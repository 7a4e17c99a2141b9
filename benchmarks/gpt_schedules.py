"""What the course of the rate is worth to a character GPT: examples/gpt_chars_fast.py with other schedules.

    python -m benchmarks.gpt_schedules --text input.txt [--seconds 80] [--seeds 4] [--quick] [--json FILE]

Network, data, batches, optimizer and Muon's momentum stay; the rate's course over the run changes. At first each course
has the peaks of the recipe, which were tuned for "the recipe"; then two seeds with lower peaks where the course stays
high and higher ones where it does not; then, with the better peaks, a longer or shorter run. The loss is that over the
whole validation split at the end of the run, means over seeds with half a 95 % interval; all runs of a length take the
same time, for their updates are the same kernels. Seconds to 1.50 are a line between a length that misses it and one
that does not; what lies outside is not said. The constant rate has no end: one run of 600 updates with a look at every
tenth shows all its lengths.

Warm: from drawing the weights to the last update; recording in a run before is left out. Looks before the last update
are switched off.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpt_to_loss import SEEDS, TARGET
from benchmarks.harness import Figure, arguments, half_interval, report
from hotloop import optim
from hotloop.optim import Rate

SHORT, LONG, ENDLESS = 220, 300, 600

COURSES: dict[str, Callable[[int], Rate]] = {
    "the recipe: up 2 %, hold, a line down over 80 %": lambda n: optim.warmup_stable_decay(
        1.0, n, warm=0.02 * n, decay=0.8 * n
    ),
    "hold, a line down over the last 30 %": lambda n: optim.warmup_stable_decay(
        1.0, n, warm=0.02 * n, decay=0.3 * n
    ),
    "a line down": lambda n: optim.warmup_linear(1.0, n, warm=0.02 * n),
    "cosine after 2 % of warm-up": lambda n: optim.warmup_cosine(1.0, n, warm=0.02 * n),
    "one-cycle, 30 % rising": lambda n: optim.one_cycle(1.0, n, momentum=None),
    "constant": lambda n: optim.linear(0.0, 1.0, 0.02 * n).then(optim.constant(1.0)),
}

OTHER_PEAKS = (
    ("constant", 0.6), ("constant", 0.3), ("hold, a line down over the last 30 %", 0.6),
    ("a line down", 1.6), ("cosine after 2 % of warm-up", 1.6), ("one-cycle, 30 % rising", 1.6),
)  # fmt: skip
"""Lower peaks for courses that stay high, higher ones for those that do not."""


class Study:
    """Runs of the recipe, and what came of them.

    Attributes:
        found: losses at the end and seconds of the runs of (course, updates, factor of the peaks).
    """

    def __init__(self, text: str, seconds: float) -> None:
        self.text = text
        self.until = time.perf_counter() + seconds
        self.found: dict[tuple[str, int, float], list[tuple[float, float]]] = {}
        self.made: dict[tuple[str, int, float], Any] = {}

    def run(self, name: str, updates: int, factor: float, seeds: int) -> None:
        """Train with so many seeds in all, those that have run included; none of it once the time is up."""
        from examples import gpt_chars_fast

        key = (name, updates, factor)
        if time.perf_counter() > self.until:
            print(f"  {name}, {updates} updates, peaks x {factor:g}: not run, time is up", flush=True)
            return
        try:
            if key not in self.made:
                recipe = gpt_chars_fast.Recipe(
                    updates=updates, rate=COURSES[name], target=0.0, first_look=1.0
                )
                peaks = tuple(r * factor for r in recipe.rates)
                self.made[key] = gpt_chars_fast.make_run(self.text, replace(recipe, rates=peaks))
            rows = self.found.setdefault(key, [])
            for seed in range(SEEDS + len(rows), SEEDS + seeds):
                seconds, looks = self.made[key](seed)
                rows.append((looks[-1][1], seconds))
        except Exception:
            traceback.print_exc()
            return
        loss = [row[0] for row in rows]
        shown = " ".join(f"{value:.4f}" for value in loss)
        print(
            f"  {name:48} {updates} updates, peaks x {factor:<4g} loss {statistics.mean(loss):.4f} +- "
            f"{half(loss):.4f} ({shown}) {pace(rows):.3f} s",
            flush=True,
        )

    def best(self, name: str) -> float:
        """The factor of the peaks that ended lowest in the short runs."""
        tried = {f: rows for (n, u, f), rows in self.found.items() if n == name and u == SHORT}
        return min(tried, key=lambda f: statistics.mean(loss for loss, _ in tried[f])) if tried else 1.0

    def constant(self, factor: float, every: int) -> list[tuple[int, float, float]]:
        """(update, loss, seconds) at each look of one long run with a constant rate; its seconds are without looks."""
        from examples import gpt_chars_fast

        name = "constant"
        base = gpt_chars_fast.Recipe(
            updates=ENDLESS, rate=lambda _: COURSES[name](SHORT), target=0.0, first_look=0.1, look_every=every
        )
        recipe = replace(
            base,
            rates=tuple(r * factor for r in base.rates),
            stages=((0.5 * SHORT / ENDLESS, 128, 64), (1 - 0.5 * SHORT / ENDLESS, 256, 32)),
        )
        looks = gpt_chars_fast.make_run(self.text, recipe)(10)[1]
        each = pace(self.found.get((name, SHORT, factor)) or [(0.0, 0.0)]) / SHORT
        return [(k, loss, each * k) for k, loss in looks]


def pace(rows: list[tuple[float, float]]) -> float:
    """Mean seconds of the runs after the first, which records."""
    return statistics.mean(seconds for _, seconds in rows[1:] or rows)


def half(values: list[float]) -> float:
    """Half a 95 % interval of the mean; NaN for a single value."""
    found = half_interval(values)
    return float("nan") if found is None else found


def crossing(points: list[tuple[float, float]]) -> float | None:
    """Seconds at which a line between two neighbours of (seconds, loss) is at the target; None outside of them."""
    points = sorted(points)
    for (s0, a), (s1, b) in itertools.pairwise(points):
        if a > TARGET >= b:
            return s0 + (a - TARGET) / (a - b) * (s1 - s0)
    return None


def main() -> None:
    args = arguments(__doc__, text="input.txt", seconds=80.0, seeds=4)
    lengths = (SHORT, LONG, 180)
    if not torch.cuda.is_available() and not args.quick:
        raise SystemExit("benchmarks.gpt_schedules needs a CUDA device")
    if not Path(args.text).exists():
        raise SystemExit(f"there is no {args.text}")
    study = Study(args.text, args.seconds)
    seeds = 2 if args.quick else args.seeds
    for name in COURSES:
        study.run(name, SHORT, 1.0, seeds)
    for name, factor in OTHER_PEAKS:
        study.run(name, SHORT, factor, 2)
    figures: list[Figure] = []
    for name in COURSES:
        factor = study.best(name)
        if factor != 1.0:
            study.run(name, SHORT, factor, seeds)
    for length in lengths[1:]:
        for name in COURSES:
            factor = study.best(name)
            first = study.found.get((name, SHORT, factor), [])
            missed = bool(first) and statistics.mean(loss for loss, _ in first) > TARGET
            # only the length on the other side of the target tells when it is met
            if name != "constant" and missed == (length > SHORT):
                study.run(name, length, factor, seeds)
    for name in COURSES:
        factor = study.best(name)
        points = []
        for length in sorted(lengths):
            rows = study.found.get((name, length, factor))
            if rows:
                loss = [row[0] for row in rows]
                title = f"{name}, peaks x {factor:g}: loss after {length} (n={len(rows)})"
                figures.append(Figure(title, statistics.mean(loss), "nat", half(loss)))
                points.append((pace(rows), statistics.mean(loss)))
        met = crossing(points)
        if met is not None:
            figures.append(Figure(f"{name}: seconds to {TARGET}", met, "s"))
        else:
            print(f"  {name}: the lengths run do not enclose {TARGET}: {points}", flush=True)
    try:
        looks = study.constant(study.best("constant"), 10)
        k, loss, seconds = min(looks, key=lambda row: row[1])
        figures.append(
            Figure(f"constant: lowest loss of {ENDLESS} updates, at {k} ({seconds:.2f} s)", loss, "nat")
        )
        reached = next((row for row in looks if row[1] <= TARGET), None)
        print(
            f"  constant: {[(k, round(loss, 4)) for k, loss, _ in looks]}; first at the target: {reached}",
            flush=True,
        )
    except Exception:
        traceback.print_exc()
    report("a character GPT by schedule", figures, args.json)


if __name__ == "__main__":
    sys.exit(main())
