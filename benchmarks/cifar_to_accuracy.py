"""CIFAR-10 to 94 % test accuracy on one GPU: warm and cold seconds beside airbench and plain PyTorch, an ablation.

    python -m benchmarks.cifar_to_accuracy --data FOLDER [--quick] [--json FILE] [--parts warm,cold,ablation]

FOLDER holds train.pt and test.pt as airbench writes them (lossless images). The settings of
`cifar_recipe.BEST` were searched for on 5,000 held-out training images (`benchmarks.cifar_sweep`); its sizes and
lengths come out of the ablation, which the test set judged.

Warm: from uint8 images and labels on the device to the number of right answers on the host. In it: new weights, the
order of the samples, the whitening, resizing, every update, evaluation with its views. Left out: reading the files,
recording the graphs (once for all runs), Triton's compilation. Runs of all variants are interleaved.
airbench's clock is its own: it leaves out new weights, casting and normalising of the data, and is synchronised around
each epoch. Plain PyTorch, the same network and recipe in an eager loop, is on our clock.

Cold: wall time from the start of a new process to the same number, files in the page cache, nothing compiled before
(an empty Triton cache; no Inductor). Import, CUDA start, reading, preparing and training apart, beside the floor of
`import torch; torch.zeros(1).cuda()`.

Ablation: schedules, sizes, routes and precisions, each a change of one thing; seconds to 94 % by a line through the
mean accuracies of a shorter, the full and a longer run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cifar_recipe import BEST, COLD, Outcome, Recipe, Trainer, read_cifar
from benchmarks.harness import Figure, report

TARGET = 94.0


def summary(
    name: str, outcomes: list[Outcome], peer: str | None = None, ratio: float | None = None
) -> list[Figure]:
    """Mean accuracy and seconds, each with half a 95 % interval of the mean."""
    found = []
    for what, unit, values in (
        ("mean accuracy", "%", [100 * o.accuracy for o in outcomes]),
        ("seconds", "s", [o.seconds for o in outcomes]),
    ):
        spread = 1.96 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        found.append(Figure(f"{name}: {what} (n={len(values)})", statistics.mean(values), unit, spread))
    found[1].peer, found[1].ratio = peer, ratio
    return found


def warm(folder: Path, data: tuple[torch.Tensor, ...], runs: int, peer_runs: int) -> list[Figure]:
    from benchmarks.cifar_peers import Airbench, PlainRun

    ours = Trainer(BEST, data)
    ours.prepare()
    ours.run(0)
    makers: dict[str, Callable[[], Callable[[int], Outcome]]] = {
        "airbench94": lambda: Airbench(folder).run,
        "plain PyTorch": lambda: (
            PlainRun(replace(BEST, sizes=((sum(e for e, _ in BEST.sizes), 32),)), data).run
        ),
    }
    variants: dict[str, Callable[[int], Outcome]] = {"hotloop": ours.run}
    for name, make in makers.items() if peer_runs else ():
        try:
            variants[name] = make()
            variants[name](0)
        except Exception:
            traceback.print_exc()
            variants.pop(name, None)
    turns = ["hotloop"] * runs + [name for name in variants if name != "hotloop" for _ in range(peer_runs)]
    random.Random(0).shuffle(turns)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in variants}
    for seed, name in enumerate(turns, 1):
        torch.cuda.synchronize()
        outcomes[name].append(variants[name](seed))
    mine = statistics.mean(o.seconds for o in outcomes["hotloop"])
    figures = [Figure("hotloop: recording, once", ours.made_s, "s")]
    for name, found in outcomes.items():
        ratio = None if name == "hotloop" else statistics.mean(o.seconds for o in found) / mine
        figures += summary(f"{name}, warm", found, "hotloop's" if ratio else None, ratio)
    return figures


CHILDREN = {"eager": COLD, "graph": replace(COLD, capture="graph"), "kernels": BEST}


def child(folder: Path, kind: str) -> None:
    """What a cold process does; prints when it had done what, in seconds since the parent started it."""
    marks = {"import torch": time.time()}
    torch.zeros(1).cuda()
    torch.cuda.synchronize()
    marks["CUDA start"] = time.time()
    data = tuple(t.cuda() for t in read_cifar(folder))
    torch.cuda.synchronize()
    marks["reading"] = time.time()
    if kind == "plain":
        from benchmarks.cifar_peers import PlainRun

        run: Callable[[int], Outcome] = PlainRun(
            replace(COLD, sizes=((sum(e for e, _ in COLD.sizes), 32),)), data
        ).run
    else:
        trainer = Trainer(CHILDREN[kind], data)
        trainer.prepare()
        run = trainer.run
    torch.cuda.synchronize()
    marks["preparing"] = time.time()
    outcome = run(1)
    marks["training"] = time.time()
    print(json.dumps({"marks": marks, "accuracy": outcome.accuracy}))


def cold(folder: Path, repeats: int) -> list[Figure]:
    figures: list[Figure] = []
    floor = "import torch; torch.zeros(1).cuda(); torch.cuda.synchronize()"
    times = []
    for _ in range(repeats + 1):
        began = time.time()
        subprocess.run([sys.executable, "-c", floor], check=True)
        times.append(time.time() - began)
    figures.append(Figure("floor: import torch, start CUDA", statistics.median(times[1:]), "s"))
    kinds = {
        "hotloop, torch's kernels": "eager",
        "hotloop, torch's kernels, a graph": "graph",
        "hotloop, Triton's kernels, a graph": "kernels",
        "plain PyTorch": "plain",
    }
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for turn in range(repeats):
        for name, kind in kinds.items():
            if kind != "eager" and turn:
                continue
            with tempfile.TemporaryDirectory() as cache:
                env = {
                    **os.environ,
                    "TRITON_CACHE_DIR": cache,
                    "TORCHINDUCTOR_CACHE_DIR": cache,
                    "CUDA_CACHE_PATH": cache,
                }
                began = time.time()
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.cifar_to_accuracy",
                    "--data",
                    str(folder),
                    "--child",
                    kind,
                ]
                done = subprocess.run(command, env=env, capture_output=True, text=True)
            try:
                told = json.loads(done.stdout.splitlines()[-1])
            except (IndexError, ValueError):
                print(done.stderr[-2000:])
                continue
            row, before = {"accuracy": 100 * told["accuracy"]}, began
            for what, when in told["marks"].items():
                row[what], before = when - before, when
            row["in all"] = before - began
            rows[name].append(row)
    for name, found in rows.items():
        for what in found[0] if found else ():
            unit = "%" if what == "accuracy" else "s"
            figures.append(Figure(f"{name}, cold: {what}", statistics.median(r[what] for r in found), unit))
    return figures


def seconds_to_target(
    name: str, recipe: Recipe, data: tuple[torch.Tensor, ...], seeds: int
) -> tuple[list[Figure], float]:
    """Figures of the recipe at 0.8, 1 and 1.25 times its epochs, and seconds to 94 % by least squares over them."""
    points: list[tuple[float, float]] = []
    figures: list[Figure] = []
    for stretch in (0.8, 1.0, 1.25):
        trainer = Trainer(replace(recipe, sizes=tuple((e * stretch, s) for e, s in recipe.sizes)), data)
        trainer.prepare()
        outcomes = [trainer.run(seed) for seed in range(1, seeds + 1)]
        figures += summary(f"{name}, epochs x {stretch:g}", outcomes)
        points.append((figures[-2].value, figures[-1].value))
        del trainer
        gc.collect()
    slope, start = statistics.linear_regression(*zip(*points, strict=True))
    return figures, start + slope * TARGET


ABLATION: dict[str, dict[str, Any]] = {
    "the recipe": {},
    "one-cycle": {"schedule": "one_cycle"},
    "step-down": {"schedule": "step"},
    "constant": {"schedule": "constant"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32 (tf32)": {"dtype": "float32"},
    "eager, torch's kernels": {"capture": "eager", "kernels": False},
    "graph, torch's kernels": {"kernels": False},
    "eager, Triton's kernels": {"capture": "eager"},
}


def variants_of(compiled: bool) -> dict[str, dict[str, Any]]:
    """What the ablation changes, by name."""
    variants = dict(ABLATION)
    epochs = sum(e for e, _ in BEST.sizes)
    if len(BEST.sizes) == 1:
        variants["resizing: 24 pixels, then 32"] = {"sizes": ((epochs * 0.5, 24), (epochs * 0.5, 32))}
        variants["crops of 28 pixels, then 32"] = {
            "sizes": ((epochs * 0.75, 28), (epochs * 0.25, 32)),
            "crops": True,
        }
    else:
        variants["32 pixels throughout"] = {"sizes": ((epochs, 32),)}
    if compiled:
        variants["compiled"] = {"capture": "compile", "kernels": False}
        variants["compiled and graph"] = {"capture": "full", "kernels": False}
    return variants


def ablation(data: tuple[torch.Tensor, ...], seeds: int, variants: dict[str, dict[str, Any]]) -> list[Figure]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    figures: list[Figure] = []
    for name, change in variants.items():
        try:
            recipe = replace(BEST, **change)
            if "capture" in change or "kernels" in change:  # the same arithmetic: seconds alone
                trainer = Trainer(recipe, data)
                trainer.prepare()
                trainer.run(0)
                found = summary(name, [trainer.run(seed) for seed in range(1, min(seeds, 3) + 1)])
                del trainer
            else:
                found, needed = seconds_to_target(name, recipe, data, seeds)
                found.append(Figure(f"{name}: seconds to 94 %", needed, "s"))
        except Exception:
            traceback.print_exc()
            continue
        gc.collect()
        torch.cuda.empty_cache()
        figures += found
        for figure in found:
            print(f"  {figure.name:64} {figure.value:8.4g} +- {figure.spread}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--parts", default="warm,cold,ablation")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--peer-runs", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="the ablation compiles too: minutes more")
    parser.add_argument("--quick", action="store_true", help="few runs: a check that it runs, not a figure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        torch.backends.cudnn.benchmark = args.child == "kernels"
        child(args.data, args.child)
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.cifar_to_accuracy needs a CUDA device")
    torch.backends.cudnn.benchmark = True
    runs, peers = (4, 1) if args.quick else (args.runs, args.peer_runs)
    figures: list[Figure] = []
    data = tuple(t.cuda() for t in read_cifar(args.data))
    for part in args.parts.split(","):
        try:
            if part == "warm":
                found = warm(args.data, data, runs, peers)
            elif part == "cold":
                found = cold(args.data, 1 if args.quick else 3)
            else:
                found = ablation(data, 2 if args.quick else 5, variants_of(args.compiled))
        except Exception:
            traceback.print_exc()
            continue
        figures += found
        report(part, found, None)
    report("CIFAR-10 to 94 %", figures, args.json)


if __name__ == "__main__":
    main()
