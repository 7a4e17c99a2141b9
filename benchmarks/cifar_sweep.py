"""Search over CIFAR-10 recipes on held-out training images; never on the test set.

    python -m benchmarks.cifar_sweep --data FOLDER --plan FILE [--seconds 100] [--held-out 5000]

FILE is Python that defines `plan`: a list of (name, dict of Recipe's fields, seeds). Each variant's buffers and graphs
are made once, then it is trained from new weights with each seed; printed are mean accuracy with its standard error,
seconds a run, seconds that it would take on the whole sets, what making took, and where the time goes. A field
`target` scales a variant's epochs to so many seconds on the whole sets. With `--test` accuracy is that on the test set:
for a finished recipe only.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cifar_recipe import Recipe, Trainer, read_cifar

HELD_OUT = 5000


def split(data: tuple[torch.Tensor, ...], test: bool, held_out: int = HELD_OUT) -> tuple[torch.Tensor, ...]:
    """Train and judge: the two sets as they are, or the training set less its last images, and those."""
    x, y, *_ = data
    if test:
        return data
    return (
        x[:-held_out].contiguous(),
        y[:-held_out].contiguous(),
        x[-held_out:].contiguous(),
        y[-held_out:].contiguous(),
    )


FULL, TEST = 50_000, 10_000


def fitted(recipe: Recipe, data: tuple[torch.Tensor, ...], target: float) -> Recipe:
    """The recipe with all its epochs scaled, so that on the whole sets it would take `target` seconds."""
    short = Trainer(replace(recipe, sizes=tuple((e * 0.25, s) for e, s in recipe.sizes)), data)
    short.prepare()
    short.parts(0)
    reset, phases, evaluation = short.parts(1)
    evaluation *= short.looks(TEST) / short.looks(len(data[2]))
    epoch = 4 * sum(phases) * FULL / len(data[0])  # of all epochs
    factor = (1000 * target - reset - evaluation) / epoch
    return replace(recipe, sizes=tuple((e * factor, s) for e, s in recipe.sizes))


def measure(name: str, fields: dict[str, Any], seeds: int, data: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    began = time.perf_counter()
    own = dict(fields)
    target = own.pop("target", None)
    recipe = Recipe(**own)
    if target is not None:
        recipe = fitted(recipe, data, target)
    trainer = Trainer(recipe, data)
    trainer.prepare()
    if data[0].is_cuda:
        trainer.parts(0)
    made = time.perf_counter() - began
    outcomes = [trainer.run(seed) for seed in range(1, seeds + 1)]
    accuracy = [100 * o.accuracy for o in outcomes]
    error = statistics.stdev(accuracy) / len(accuracy) ** 0.5 if len(accuracy) > 1 else float("nan")
    row: dict[str, Any] = {
        "name": name,
        "accuracy": statistics.mean(accuracy),
        "error": error,
        "plain": statistics.mean(100 * o.plain for o in outcomes),
        "seconds": statistics.median(o.seconds for o in outcomes),
        "whole": float("nan"),  # what it would take on the whole sets
        "made_s": made,
        "seeds": seeds,
        "where": "",
        "recipe": asdict(trainer.recipe),
    }
    if data[0].is_cuda:
        reset, phases, evaluation = trainer.parts(1)
        scale = FULL / len(data[0])
        looks = trainer.looks(TEST) / trainer.looks(len(data[2]))
        row["whole"] = row["seconds"] + ((scale - 1) * sum(phases) + (looks - 1) * evaluation) / 1000
        steps = " ".join(
            f"{p.size}px:{took / p.steps:.3f}x{p.steps * scale:.0f}"
            for p, took in zip(trainer.phases, phases, strict=True)
        )
        row["where"] = f"reset {reset:.1f} {steps} evaluation {evaluation * looks:.1f} ms"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="more tell a difference in fewer runs")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    scope: dict[str, Any] = {}
    exec(compile(args.plan.read_text(), str(args.plan), "exec"), scope)
    data = split(tuple(t.to(args.device) for t in read_cifar(args.data)), args.test, args.held_out)
    print(
        f"{'variant':44} {'accuracy':>9} {'+-':>6} {'plain':>7} {'seconds':>8} {'whole':>7} {'made':>6}  n",
        flush=True,
    )
    rows = []
    for name, fields, seeds in scope["plan"]:
        if time.perf_counter() - began > args.seconds:
            print(f"{name:44} not run: out of time")
            continue
        try:
            row = measure(name, fields, seeds, data)
        except Exception:
            traceback.print_exc()
            continue
        rows.append(row)
        print(
            f"{name:44} {row['accuracy']:9.3f} {row['error']:6.3f} {row['plain']:7.3f} {row['seconds']:8.4f} "
            f"{row['whole']:7.4f} {row['made_s']:6.2f}  {seeds}  {row['where']}",
            flush=True,
        )
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
