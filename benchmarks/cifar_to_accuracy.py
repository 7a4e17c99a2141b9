"""CIFAR-10 to 94 % test accuracy on one GPU: warm and cold seconds beside airbench and plain PyTorch.

    python -m benchmarks.cifar_to_accuracy --data FOLDER [--quick] [--json FILE] [--parts warm,cold] [--compiled]

FOLDER holds train.pt and test.pt as airbench writes them (lossless images). The settings of
`cifar_recipe.BEST` were searched for on 5,000 held-out training images (`benchmarks.cifar_sweep`). What parts of it are
worth: `benchmarks.cifar_ablation`.

Warm: from uint8 images and labels on the device, which is idle, to the number of right answers on the host. In it: new
weights, emptied optimizers, the order of the samples, whitening, casting, resizing, every update, evaluation with its
views. Left out: reading the files, recording the graphs (once for all runs), Triton's compilation. Runs of all variants
are interleaved in one process.
airbench's clock is its own, as it prints it: whitening, training and the last evaluation with its views. It leaves out
new weights, loading, casting and normalising of the data, and is synchronised around each epoch. (The package has no
network with Muon.) Plain PyTorch, the same network, sizes and recipe in an eager loop, is on our clock; `--compiled`
adds it with network and orthogonalisation under `torch.compile`, its compilation left out.

Cold: wall time from just before a new process is spawned to the same number, part by part, by another route through
the same recipe, somewhat longer: `benchmarks.cifar_cold`, whose docstring has the bounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.cifar_recipe import BEST, Outcome, Trainer, read_cifar
from benchmarks.harness import Figure, half_interval, report


def summary(
    name: str, outcomes: list[Outcome], peer: str | None = None, ratio: float | None = None
) -> list[Figure]:
    """Mean accuracy and seconds, each with half a 95 % interval of the mean."""
    found = []
    for what, unit, values in (
        ("mean accuracy", "%", [100 * o.accuracy for o in outcomes]),
        ("seconds", "s", [o.seconds for o in outcomes]),
    ):
        title = f"{name}: {what} (n={len(values)})"
        found.append(Figure(title, statistics.mean(values), unit, half_interval(values)))
    found[1].peer, found[1].ratio = peer, ratio
    return found


def distribution(name: str, outcomes: list[Outcome]) -> list[Figure]:
    """How far single runs lie apart."""
    accuracy, seconds = [100 * o.accuracy for o in outcomes], [o.seconds for o in outcomes]
    print(f"  {name}: accuracy {' '.join(f'{a:.2f}' for a in accuracy)}")
    print(f"  {name}: seconds {' '.join(f'{s:.3f}' for s in seconds)}", flush=True)
    if len(outcomes) < 2:
        return []
    deviation = statistics.stdev(accuracy)
    return [
        Figure("    standard deviation of accuracy", deviation, "points"),
        Figure("    standard error of its mean", deviation / len(accuracy) ** 0.5, "points"),
        Figure("    mean accuracy without views", statistics.mean(100 * o.plain for o in outcomes), "%"),
        Figure("    seconds, median", statistics.median(seconds), "s"),
        Figure("    seconds, least", min(seconds), "s"),
        Figure("    seconds, most", max(seconds), "s"),
    ]


def warm(
    folder: Path, data: tuple[torch.Tensor, ...], runs: int, peer_runs: int, compiled: bool
) -> list[Figure]:
    from benchmarks.cifar_peers import Airbench, PlainRun

    ours = Trainer(BEST, data)
    ours.prepare()
    ours.run(0)
    makers: dict[str, Callable[[], Callable[[int], Outcome]]] = {
        "airbench94": lambda: Airbench(folder).run,
        "plain PyTorch": lambda: PlainRun(BEST, data).run,
    }
    if compiled:
        makers["plain PyTorch, compiled"] = lambda: PlainRun(BEST, data, compiled=True).run
    variants: dict[str, Callable[[int], Outcome]] = {"hotloop": ours.run}
    for name, make in makers.items() if peer_runs else ():
        began = time.perf_counter()
        try:
            variants[name] = make()
            variants[name](0)
        except Exception:
            traceback.print_exc()
            variants.pop(name, None)
        print(f"  {name}: made and run once in {time.perf_counter() - began:.1f} s", flush=True)
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
        figures += distribution(name, found)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--parts", default="warm,cold")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--peer-runs", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="a peer that compiles, too: a minute more")
    parser.add_argument("--quick", action="store_true", help="few runs: a check that it runs, not a figure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.cifar_to_accuracy needs a CUDA device")
    torch.backends.cudnn.benchmark = True
    runs, peers = (4, 1) if args.quick else (args.runs, args.peer_runs)
    figures: list[Figure] = []
    data = tuple(t.cuda() for t in read_cifar(args.data))
    for part in args.parts.split(","):
        try:
            if part == "warm":
                found = warm(args.data, data, runs, peers, args.compiled)
            else:
                from benchmarks.cifar_cold import measure

                found = measure(args.data, quick=args.quick)
        except Exception:
            traceback.print_exc()
            continue
        figures += found
        report(part, found, None)
    report("CIFAR-10 to 94 %", figures, args.json)


if __name__ == "__main__":
    main()
