"""Epochs and seconds to 98 % on handwritten digits: one-cycle against a constant rate. CPU, one thread.

    python -m benchmarks.digits_to_accuracy [--quick] [--json FILE] [--seeds 10]

The 8 x 8 scans that ship with scikit-learn: 1,400 to train on, 397 to test on, the convolutional network of
examples/digits.py, SGD with Nesterov momentum and batches of 64. Each schedule has its own rate, chosen among five by
the mean accuracy on 300 of the training images after three epochs, which the test images have no part in.

A schedule is there after the fewest epochs at whose end nine runs of ten have 98 %; a one-cycle run of each length is a
run of its own, the constant one is the same run looked at. A constant rate also touches 98 % here and there and loses
it again: the last line counts that, which nobody can stop at without looking at the test images. Spreads are two
standard errors. Seconds are the process's CPU time of training; evaluation and the making of model and data are left
out.
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
PEAKS = (0.005, 0.01, 0.02, 0.04, 0.08)


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
    return optim.one_cycle(peak, epochs, warm=0.25, unit="epochs")


def choose(make: object, data: TensorDataset, seeds: int) -> float:
    """The peak with the best mean accuracy on the last 300 training images."""
    fit, held = Subset(data, range(len(data) - 300)), Subset(data, range(len(data) - 300, len(data)))
    scores = {}
    for peak in PEAKS:
        found = [train(fit, held, make(peak, 3), 3, 100 + seed)[0][-1] for seed in range(seeds)]
        scores[peak] = sum(found) / len(found)
    print(f"{make.__name__}: accuracy on held-out training images by peak:", scores, flush=True)
    return max(scores, key=scores.__getitem__)


def main() -> None:
    args = arguments(__doc__, seeds=20)
    torch.set_num_threads(1)
    data, test = read_digits()
    seeds = 3 if args.quick else args.seeds
    peaks = {make: choose(make, data, 1 if args.quick else 6) for make in (constant, cycle)}
    lengths = (2, 3, 4) if args.quick else (2, 3, 4, 5, 6)
    # accuracies and seconds at the end of runs of each length, seed by seed
    ends: dict[str, dict[int, list[tuple[float, float]]]] = {"constant": {}, "one-cycle": {}}
    runs = [train(data, test, constant(peaks[constant], 0), lengths[-1], seed) for seed in range(seeds)]
    for length in lengths:
        ends["constant"][length] = [(accuracies[length - 1], spent[length - 1]) for accuracies, spent in runs]
        cycles = [train(data, test, cycle(peaks[cycle], length), length, seed) for seed in range(seeds)]
        ends["one-cycle"][length] = [(accuracies[-1], spent[-1]) for accuracies, spent in cycles]
        for name, found in ends.items():
            scores = [accuracy for accuracy, _ in found[length]]
            share = sum(score >= TARGET for score in scores) / seeds
            print(f"{name}, {length} epochs: mean {sum(scores) / seeds:.4f}, {share:.0%} at 98 %", flush=True)
    figures: list[Figure] = []
    for name, found in ends.items():
        for length in lengths:
            scores = [accuracy for accuracy, _ in found[length]]
            mean = sum(scores) / seeds
            error = (sum((s - mean) ** 2 for s in scores) / max(seeds - 1, 1) / seeds) ** 0.5
            figures.append(Figure(f"{name}: accuracy after {length} epochs", 100 * mean, "%", 200 * error))
        there = [length for length in lengths if sum(a >= TARGET for a, _ in found[length]) >= 0.9 * seeds]
        if there:
            value, spread = median_with_spread([spent for _, spent in found[there[0]]])
            figures.append(Figure(f"{name}: epochs until 9 of 10 runs end at 98 %", there[0], ""))
            figures.append(Figure(f"{name}: their seconds", value, "s", spread))
    touched = sorted(next((k for k, a in enumerate(r[0], 1) if a >= TARGET), lengths[-1]) for r in runs)
    figures.append(
        Figure(
            "constant: epochs until 9 of 10 seeds have touched it", touched[int(0.9 * seeds + 0.5) - 1], ""
        )
    )
    report("handwritten digits to 98 %, SGD", figures, args.json)


if __name__ == "__main__":
    main()
