"""Epochs and seconds to 98 % on handwritten digits: one-cycle against a constant rate. CPU, one thread.

    python -m benchmarks.digits_to_accuracy [--quick] [--json FILE] [--seeds 10]

The 8 x 8 scans that ship with scikit-learn: 1,400 to train on, 397 to test on, the convolutional network of
examples/digits.py, SGD with Nesterov momentum and batches of 64. Each schedule has its own rate, chosen among five by
the mean accuracy on 300 of the training images after six epochs, which the test images have no part in.

A constant rate has reached 98 % with the first epoch after which the test accuracy is at least that; a one-cycle run
has a length fixed beforehand, and all of it is counted. Shown are the epochs after which nine seeds of ten are there.
Seconds are the process's CPU time of training alone; evaluation and the making of model and data are left out.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from examples.digits import make_model, read_digits
from torch.utils.data import DataLoader, Subset, TensorDataset

import hotloop
from benchmarks.harness import Figure, arguments, median_with_spread, report
from hotloop import optim

TARGET, BATCH = 0.98, 64
PEAKS = (0.003, 0.01, 0.03, 0.1, 0.3)


def train(
    data: TensorDataset, test: TensorDataset, rate: optim.Rate, epochs: int, seed: int
) -> tuple[list[float], list[float]]:
    """(accuracy, seconds of training so far) after each epoch."""
    loop = hotloop.Loop(device="cpu", record=False, seed=seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = loop.prepare(model, optimizer, loader)
    scheduler = loop.prepare(rate.scheduler(optimizer, per_step=1 / len(loader)))
    x_test, y_test = test[:] if isinstance(test, TensorDataset) else _whole(test)
    accuracies, seconds, spent = [], [], 0.0
    for _ in range(epochs):
        began = time.process_time()
        model.train()
        for x, y in loader:
            loop.backward(F.cross_entropy(model(x), y))
            loop.update(optimizer, scheduler)
        spent += time.process_time() - began
        model.eval()
        with torch.no_grad():
            accuracies.append((model(x_test).argmax(1) == y_test).float().mean().item())
        seconds.append(spent)
    loop.end_training()
    return accuracies, seconds


def _whole(data: Subset) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.stack(parts) for parts in zip(*data, strict=True))  # type: ignore[return-value]


def constant(peak: float, epochs: int) -> optim.Rate:
    return optim.constant(peak, unit="epochs")


def cycle(peak: float, epochs: int) -> optim.Rate:
    return optim.one_cycle(peak, epochs, unit="epochs")


def choose(make: object, data: TensorDataset, seeds: int) -> float:
    """The peak with the best mean accuracy on the last 300 training images."""
    fit, held = Subset(data, range(len(data) - 300)), Subset(data, range(len(data) - 300, len(data)))
    scores = {}
    for peak in PEAKS:
        found = [train(fit, held, make(peak, 6), 6, 100 + seed)[0][-1] for seed in range(seeds)]
        scores[peak] = sum(found) / len(found)
    print(f"{make.__name__}: accuracy on held-out training images by peak:", scores, flush=True)
    return max(scores, key=scores.__getitem__)


def main() -> None:
    args = arguments(__doc__, seeds=10)
    torch.set_num_threads(1)
    data, test = read_digits()
    seeds = 3 if args.quick else args.seeds
    peaks = {make: choose(make, data, 1 if args.quick else 3) for make in (constant, cycle)}
    most = 8 if args.quick else 12
    figures: list[Figure] = []

    runs = [train(data, test, constant(peaks[constant], most), most, seed) for seed in range(seeds)]
    reached = sorted(
        next((k for k, a in enumerate(accuracies) if a >= TARGET), most) for accuracies, _ in runs
    )
    k = reached[int(0.9 * (seeds - 1) + 0.5)]
    note = "" if k < most else f" (not within {most})"
    figures.append(Figure(f"constant {peaks[constant]}: epochs, 9 of 10 seeds{note}", min(k + 1, most), ""))
    figures.append(Figure("constant: epochs, median seed", reached[seeds // 2] + 1, ""))
    value, spread = median_with_spread([seconds[min(k, most - 1)] for _, seconds in runs])
    figures.append(Figure("constant: seconds of those epochs", value, "s", spread))
    base = value

    for length in (2, 3, 4, 5, 6, 8, 10):
        runs = [train(data, test, cycle(peaks[cycle], length), length, seed) for seed in range(seeds)]
        share = sum(accuracies[-1] >= TARGET for accuracies, _ in runs) / seeds
        mean = sum(accuracies[-1] for accuracies, _ in runs) / seeds
        print(
            f"one-cycle of {length} epochs: mean accuracy {mean:.4f}, {share:.0%} of seeds at 98 %",
            flush=True,
        )
        if share >= 0.9:
            break
    figures.append(Figure(f"one-cycle {peaks[cycle]}: epochs, 9 of 10 seeds", length, ""))
    value, spread = median_with_spread([seconds[-1] for _, seconds in runs])
    figures.append(Figure("one-cycle: seconds", value, "s", spread, "constant", base / value))
    report("handwritten digits to 98 %, SGD", figures, args.json)


if __name__ == "__main__":
    main()
