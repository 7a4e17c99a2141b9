"""The CIFAR-10 example on colours instead of photographs: it learns, at two sizes, repeats itself, and trains as the
benchmark's own recipe does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benchmarks.cifar_recipe import BEST, Trainer
from examples import cifar10
from torch import nn

from hotloop.data.resident import permutation


def draw_sets(train, test):
    """uint8 images of ten noisy colours, and which: of the training and the test set."""
    g = torch.Generator().manual_seed(0)
    colours = torch.randint(0, 200, (10, 1, 1, 3), generator=g)
    sets = []
    for n in (train, test):
        labels = torch.arange(n) % 10
        images = colours[labels] + torch.randint(0, 50, (n, 32, 32, 3), generator=g)
        sets += [images.to(torch.uint8), labels]
    return sets


def write_sets(sets, folder):
    for name, images, labels in (("train", *sets[:2]), ("test", *sets[2:])):
        torch.save({"images": images, "labels": labels}, folder / f"{name}.pt")
    return str(folder)


def test_its_settings_are_the_benchmarks():
    mine, theirs = cifar10.Recipe(), BEST
    assert mine.rates == (theirs.filter_rate, theirs.bias_rate, theirs.head_rate)
    assert mine.momenta == (theirs.filter_momentum, theirs.momentum)
    assert (mine.norms, mine.unsure) == (theirs.norm_momentum, theirs.tta_share)
    assert abs(mine.decay / (theirs.decay * theirs.batch) - 1) < 1e-3
    for name in ("sizes", "batch", "power", "smoothing", "widths"):
        assert getattr(mine, name) == getattr(theirs, name), name
    for name in ("translate", "brightness", "contrast"):
        assert getattr(cifar10.LIVELY, name) == getattr(theirs, name), name
    # what the example has no names for
    assert (theirs.schedule, theirs.final, theirs.features, theirs.ns_steps) == ("linear", 0, 32, 3)


def test_it_learns_and_repeats_itself(tmp_path, monkeypatch):
    clock = iter((10.0, 17.5, 20.0, 20.25))
    monkeypatch.setattr(cifar10, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    recipe = cifar10.Recipe(sizes=((4, 16), (3, 32)), batch=40, widths=(8, 8, 16), dtype=torch.float32)
    run = cifar10.make_run(write_sets(draw_sets(240, 60), tmp_path), recipe)
    accuracy, seconds = run(0)
    assert accuracy > 0.6
    assert seconds == 7.5
    assert run(0) == (accuracy, 0.25)


@pytest.mark.parametrize("seed", [3, 4])
def test_it_trains_as_the_benchmark_does(tmp_path, monkeypatch, seed):
    n, batch, widths, sizes = 120, 40, (8, 16, 16), ((1, 24), (1, 32))
    sets = draw_sets(n, 400)
    shared = {"sizes": sizes, "batch": batch, "widths": widths}
    theirs = replace(
        BEST, **shared, power=1.3, decay=1.6e-3 / batch, dtype="float32", kernels=False, capture="eager"
    )
    trainer = Trainer(theirs, tuple(sets), seed=seed)
    trainer.reset(seed)
    for k in range(2):
        places = slice(n * k, n * k + n)
        trainer.order[places] = permutation(n, seed, k, torch.device("cpu"))
        trainer.epochs[places] = k
    filters, head = [p.detach().clone() for p in trainer.net.filters], trainer.net.head.detach().clone()
    made = []

    class Watched(cifar10.Net):
        def __init__(self, recipe):
            super().__init__(recipe)
            made.append(self)

        @torch.no_grad()
        def reset(self):
            super().reset()
            convolutions = [m for m in self if isinstance(m, nn.Conv2d)]
            # it draws from the same distributions in another order
            for mine, value in zip(convolutions, filters, strict=True):
                assert torch.equal(mine.weight[:, :, 1, 1].diagonal(), value[:, :, 1, 1].diagonal())
                assert abs(float(mine.weight.std() / value.std()) - 1) < 0.1
                mine.weight.copy_(value)
            assert abs(float(self[-1].weight.std() / head.std()) - 1) < 1e-5
            self[-1].weight.copy_(head)

    monkeypatch.setattr(cifar10, "Net", Watched)
    run = cifar10.make_run(
        write_sets(sets, tmp_path), cifar10.Recipe(**shared, power=1.3, dtype=torch.float32)
    )
    accuracy, _ = run(seed)
    trainer.net.train()
    for phase in trainer.phases:
        trainer.train(phase)
    trainer.net.eval()
    trainer.evaluate()
    (net,) = made
    mine = [m.weight for m in net if isinstance(m, nn.Conv2d)]
    mine += [m.bias for m in net if hasattr(m, "running_mean")]
    wanted = [*trainer.net.filters, *trainer.net.biases]
    before = [*filters, *(torch.zeros_like(b) for b in trainer.net.biases), head]
    for a, b, start in zip((*mine, net[-1].weight), (*wanted, trainer.net.head), before, strict=True):
        # six updates amplify the rounding of float32
        assert (a - b).norm() < 0.01 * (b - start).norm()
    assert round(accuracy * 400) == int(trainer.right)
