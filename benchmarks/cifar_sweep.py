"""Search over CIFAR-10 recipes on 5,000 held-out training images; never on the test set.

    python -m benchmarks.cifar_sweep --data FOLDER --plan FILE [--seconds 100]

FILE is Python that defines `plan`: a list of (name, dict of Recipe's fields, seeds). Each variant's buffers and graphs
are made once, then it is trained from new weights with each seed; printed are mean accuracy with its standard error,
seconds a run, and what making took. With `--test` accuracy is that on the test set: for a finished recipe only.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.cifar_recipe import Recipe, Trainer, read_cifar

HELD_OUT = 5000


def split(data: tuple[torch.Tensor, ...], test: bool) -> tuple[torch.Tensor, ...]:
    """Train and judge: the two sets as they are, or the training set less its last 5,000, and those."""
    x, y, *_ = data
    if test:
        return data
    return (
        x[:-HELD_OUT].contiguous(),
        y[:-HELD_OUT].contiguous(),
        x[-HELD_OUT:].contiguous(),
        y[-HELD_OUT:].contiguous(),
    )


def measure(name: str, fields: dict[str, Any], seeds: int, data: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    trainer = Trainer(Recipe(**fields), data)
    trainer.prepare()
    outcomes = [trainer.run(seed) for seed in range(1, seeds + 1)]
    accuracy = [100 * o.accuracy for o in outcomes]
    error = statistics.stdev(accuracy) / len(accuracy) ** 0.5 if len(accuracy) > 1 else float("nan")
    return {
        "name": name,
        "accuracy": statistics.mean(accuracy),
        "error": error,
        "plain": statistics.mean(100 * o.plain for o in outcomes),
        "seconds": statistics.median(o.seconds for o in outcomes),
        "made_s": trainer.made_s,
        "seeds": seeds,
        "recipe": asdict(trainer.recipe),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    scope: dict[str, Any] = {}
    exec(compile(args.plan.read_text(), str(args.plan), "exec"), scope)
    data = split(tuple(t.to(args.device) for t in read_cifar(args.data)), args.test)
    print(f"{'variant':44} {'accuracy':>9} {'+-':>6} {'plain':>7} {'seconds':>8} {'made':>6}  n", flush=True)
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
            f"{row['made_s']:6.2f}  {seeds}",
            flush=True,
        )
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
