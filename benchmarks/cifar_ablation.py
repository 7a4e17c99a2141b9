"""What each part of the CIFAR-10 recipe is worth: seconds to 94 % with one thing changed at a time.

    python -m benchmarks.cifar_ablation --data FOLDER [--only NAME,...] [--seeds 5] [--lengths 3] [--json FILE]

FOLDER holds train.pt and test.pt as airbench writes them. NAMEs are variants, or the groups schedules, sizes,
precisions, routes and compiled; a wrong one lists them. The test set judges.

Where accuracy differs (schedules, sizes, precisions), a variant is run at the recipe's length and then longer or
shorter, until its means lie on both sides of 94 % or it has had three lengths; one that misses 94 % by more than half a
point is run at 1.6 times the length alone. Seconds to 94 % are then a line through mean seconds over mean accuracies,
with half a 95 % interval of a bootstrap over seeds; a variant whose means all lie on one side gets none. The recipe's
rates were found with its own course: other schedules are tried with other peaks too, three seeds each, and the best of
them counts. A peak times a factor is that of all rates, weight decay's coefficients stay. Full float32 is run at the
recipe's length alone.

Where arithmetic is the same but for rounding (routes, compiled), all are made at first and their runs interleaved at
the recipe's length: seconds, and accuracy as a check. On torch's kernels layers pad for themselves, as one writes it.

The clock is that of `benchmarks.cifar_to_accuracy`, warm: compiling and recording are left out, and shown apart.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cifar_recipe import BEST, Outcome, Recipe, Trainer, read_cifar
from benchmarks.cifar_to_accuracy import summary
from benchmarks.harness import Figure, report

TARGET = 94.0

Data = tuple[torch.Tensor, ...]


def peaks(factor: float, **more: Any) -> dict[str, Any]:
    """The recipe's rates times a factor."""
    rates = {name: getattr(BEST, name) * factor for name in ("filter_rate", "bias_rate", "head_rate")}
    return rates | more


def epochs() -> float:
    """Of the recipe."""
    return sum(e for e, _ in BEST.sizes)


GROUPS: dict[str, dict[str, list[dict[str, Any]]]] = {
    # each variant by the changes of which the best counts
    "schedules": {
        "the recipe": [{}],
        "one-cycle": [{"schedule": "one_cycle"}, peaks(1.5, schedule="one_cycle")],
        "step-down": [{"schedule": "step"}, peaks(0.6, schedule="step")],
        "constant": [
            peaks(0.3, schedule="constant"),
            {"schedule": "constant"},
            peaks(0.1, schedule="constant"),
        ],
    },
    "sizes": {"32 pixels throughout": [{"sizes": ((epochs(), 32),)}]},
    "precisions": {
        "bfloat16": [{"dtype": "bfloat16"}],
        "float32 in tf32": [{"dtype": "float32"}],
        "float32": [{"dtype": "float32"}],
    },
}

PLAIN: dict[str, Any] = {"kernels": False, "edges": False}
ROUTES: dict[str, dict[str, Any]] = {
    "eager on torch's kernels": PLAIN | {"capture": "eager", "beside": False},
    "graph on torch's kernels": PLAIN,
    "eager on Triton's kernels": {"capture": "eager", "beside": False},
    "graph on Triton's kernels": {},
}
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": PLAIN | {"capture": "compile", "beside": False},
    "compiled and graph": PLAIN | {"capture": "full"},
}
BESIDE_COMPILED = "graph on torch's kernels"


def stretched(recipe: Recipe, by: float) -> Recipe:
    return replace(recipe, sizes=tuple((e * by, s) for e, s in recipe.sizes))


class Bench:
    """Trainers on one data set; what differs in schedule or rates alone shares one, for its graphs read a table."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.made: dict[tuple[Recipe, bool], Trainer] = {}

    def trainer(self, recipe: Recipe) -> Trainer:
        """Recorded, run once, and set to the recipe's rates."""
        same = {name: getattr(BEST, name) for name in ("schedule", "filter_rate", "bias_rate", "head_rate")}
        shared = replace(recipe, **same)
        key = shared, torch.backends.cudnn.allow_tf32  # a recording keeps it
        trainer = self.made.get(key)
        if trainer is None:
            trainer = self.made[key] = Trainer(shared, self.data)
            trainer.prepare()
            trainer.run(0)
        trainer.recipe = recipe
        trainer.rates.copy_(trainer.table())
        return trainer


def mean_accuracy(outcomes: list[Outcome]) -> float:
    """Percent."""
    return 100 * statistics.mean(o.accuracy for o in outcomes)


def more_lengths(accuracy: float) -> tuple[float, ...]:
    """Factors of the epochs to run after the recipe's own gave this accuracy."""
    if accuracy >= TARGET:
        return (0.8, 0.65)
    return (1.25, 1.6) if TARGET - accuracy < 0.5 else (1.6,)


def seconds_to_target(points: list[list[Outcome]]) -> tuple[float, float] | None:
    """Seconds to the target by least squares over the means of each length, and half a 95 % interval.

    None where the means do not lie on both sides of the target.
    """

    def solve(lengths: list[list[Outcome]]) -> float | None:
        x = [mean_accuracy(outcomes) for outcomes in lengths]
        y = [statistics.mean(o.seconds for o in outcomes) for outcomes in lengths]
        if len(set(x)) < 2:
            return None
        slope, start = statistics.linear_regression(x, y)
        return start + slope * TARGET

    means = [mean_accuracy(outcomes) for outcomes in points]
    if not min(means) <= TARGET <= max(means):
        return None
    found = solve(points)
    assert found is not None
    rng = random.Random(0)
    draws = sorted(
        value
        for _ in range(1000)
        if (value := solve([rng.choices(outcomes, k=len(outcomes)) for outcomes in points])) is not None
    )
    return found, (draws[int(0.975 * len(draws))] - draws[int(0.025 * len(draws))]) / 2


def measure(
    name: str, changes: list[dict[str, Any]], bench: Bench, seeds: int, most: int, spent: Callable[[], bool]
) -> list[Figure]:
    """Figures of a variant: each length run, `most` of them, and seconds to the target where that lies between."""
    figures: list[Figure] = []

    def run(recipe: Recipe, title: str, chosen: range) -> list[Outcome]:
        began = time.perf_counter()
        trainer = bench.trainer(recipe)
        made = time.perf_counter() - began
        outcomes = [trainer.run(seed) for seed in chosen]
        found = summary(title, outcomes)
        print(
            f"  {title:44} {found[0].value:7.3f} +- {found[0].spread or float('nan'):.3f} %  "
            f"{found[1].value:.4f} +- {found[1].spread or float('nan'):.4f} s  n={len(outcomes)}, "
            f"made in {made:.1f} s",
            flush=True,
        )
        return outcomes

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name != "float32"
    # few seeds for the rates, the rest for the best of them
    tried = []
    few = range(1, (min(seeds, 3) if len(changes) > 1 else seeds) + 1)
    for change in changes:
        factor = change.get("filter_rate", BEST.filter_rate) / BEST.filter_rate
        said = f"{name}, peaks x {factor:g}" if len(changes) > 1 else name
        tried.append((change, said, run(replace(BEST, **change), said, few)))
    change, said, first = max(tried, key=lambda row: mean_accuracy(row[2]))
    recipe = replace(BEST, **change)
    if len(first) < seeds and not spent():
        first = first + run(recipe, f"{said}, more seeds", range(len(few) + 1, seeds + 1))
    lengths = {1.0: first}
    short = mean_accuracy(first) < TARGET
    for by in more_lengths(mean_accuracy(first))[: most - 1]:
        if spent():
            print(f"  {said}, epochs x {by:g}: not run, time is up", flush=True)
            break
        lengths[by] = run(stretched(recipe, by), f"{said}, epochs x {by:g}", range(1, seeds + 1))
        if (mean_accuracy(lengths[by]) < TARGET) != short:
            break
    for by, outcomes in sorted(lengths.items()):
        figures += summary(f"{said}, epochs x {by:g}", outcomes)
    found = seconds_to_target(list(lengths.values()))
    if found is None and len(lengths) > 1:
        best = max(map(mean_accuracy, lengths.values()))
        longest = max(statistics.mean(o.seconds for o in outcomes) for outcomes in lengths.values())
        what = (
            f"not reached: at most {best:.2f} % within {longest:.2f} s"
            if short
            else "reached by the shortest run"
        )
        print(f"  {said}: 94 % {what}", flush=True)
    elif found is not None:
        figures.append(Figure(f"{said}: seconds to 94 %", found[0], "s", found[1]))
        print(f"  {said}: 94 % after {found[0]:.3f} +- {found[1]:.3f} s", flush=True)
    return figures


def routes(names: list[str], data: Data, seeds: int, spent: Callable[[], bool]) -> list[Figure]:
    """Seconds and accuracy of each route: rounds of one run of each in random order."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    made: dict[str, Trainer] = {}
    figures: list[Figure] = []
    for name in names:
        began = time.perf_counter()
        try:
            trainer = Trainer(replace(BEST, **(ROUTES | COMPILED)[name]), data)
            if name in COMPILED:
                # each shape apart: what is compiled for any shape is slower
                trainer.forward = torch.compile(trainer.net, dynamic=False)
            trainer.prepare()
            trainer.run(0)
        except Exception:
            traceback.print_exc()
            continue
        made[name] = trainer
        took = time.perf_counter() - began
        figures.append(Figure(f"{name}: compiling, recording and one run", took, "s"))
        print(f"  {name}: compiled, recorded and run once in {took:.1f} s", flush=True)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in made}
    rng = random.Random(0)
    for seed in range(1, seeds + 1):
        # two of each at least: one run has no spread
        if seed > 2 and spent():
            print(f"  {seeds - seed + 1} rounds not run, time is up", flush=True)
            break
        for name in rng.sample(list(made), len(made)):
            outcomes[name].append(made[name].run(seed))
    for name, found in outcomes.items():
        figures += summary(name, found)
    for figure in figures:
        print(f"  {figure.name:56} {figure.value:8.4g} +- {figure.spread} {figure.unit}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default="schedules,sizes,precisions,routes,compiled")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lengths", type=int, default=3, help="of a variant, at most")
    parser.add_argument(
        "--seconds", type=float, default=600, help="no new length or round is begun after so many"
    )
    parser.add_argument("--quick", action="store_true", help="two seeds: a check that it runs, not a figure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began = time.perf_counter()
    variants = {name: changes for group in GROUPS.values() for name, changes in group.items()}
    groups = {name: list(group) for name, group in GROUPS.items()}
    groups |= {"routes": list(ROUTES), "compiled": [BESIDE_COMPILED, *COMPILED]}
    wanted = [name for given in args.only.split(",") for name in groups.get(given, [given])]
    unknown = [name for name in wanted if name not in (*variants, *ROUTES, *COMPILED)]
    if unknown:
        raise SystemExit(f"{unknown} are not known; there are {[*groups, *variants, *ROUTES, *COMPILED]}")
    torch.backends.cudnn.benchmark = True
    data = tuple(t.to(args.device) for t in read_cifar(args.data))
    bench = Bench(data)

    def spent() -> bool:
        return time.perf_counter() - began > args.seconds

    seeds = 2 if args.quick else args.seeds
    figures: list[Figure] = []
    for name in wanted:
        if name in variants:
            if spent():
                print(f"  {name}: not run, time is up", flush=True)
                continue
            try:
                # full float32 takes several times as long, and differs from tf32 by rounding
                few, most = (min(seeds, 2), 1) if name == "float32" else (seeds, args.lengths)
                figures += measure(name, variants[name], bench, few, most, spent)
            except Exception:
                traceback.print_exc()
    figures += routes(
        list(dict.fromkeys(name for name in wanted if name not in variants)), data, seeds, spent
    )
    report("CIFAR-10, one thing changed at a time", figures, args.json)


if __name__ == "__main__":
    main()
