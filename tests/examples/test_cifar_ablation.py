"""The CIFAR-10 ablation: trainers that are shared train as their own would, and seconds to the target are a line's."""

from dataclasses import replace

import pytest
import torch
from benchmarks import cifar_ablation
from benchmarks.cifar_net import BEST
from benchmarks.cifar_recipe import Outcome, Trainer

SMALL = replace(
    BEST,
    batch=8,
    sizes=((1.0, 16), (1.0, 18)),
    dtype="float32",
    widths=(8, 8, 8),
    capture="eager",
    kernels=False,
)


@pytest.fixture
def bench(data, monkeypatch):
    monkeypatch.setattr(cifar_ablation, "BEST", SMALL)
    return cifar_ablation.Bench(data)


@pytest.mark.parametrize("schedule", ["one_cycle", "step", "constant"])
def test_a_shared_trainer_trains_as_one_of_its_own(bench, data, schedule):
    bench.trainer(SMALL)
    recipe = replace(SMALL, schedule=schedule)
    shared, own = bench.trainer(recipe), Trainer(recipe, data)
    assert shared is bench.trainer(SMALL)  # whose rates are back
    assert torch.equal(shared.rates, Trainer(SMALL, data).rates)
    bench.trainer(recipe).run(2)
    own.run(2)
    for a, b in zip(shared.net.parameters(), own.net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_peaks_times_a_factor_are_rates_times_it(bench):
    before = bench.trainer(SMALL).rates.clone()
    found = bench.trainer(replace(SMALL, **cifar_ablation.peaks(1.5))).rates
    assert torch.allclose(found, 1.5 * before)
    assert torch.allclose(before[0], torch.tensor([SMALL.filter_rate, SMALL.bias_rate, SMALL.head_rate]))


def test_what_a_recording_keeps_is_not_shared(bench, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    one = bench.trainer(SMALL)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert bench.trainer(SMALL) is not one
    assert bench.trainer(replace(SMALL, sizes=((1.0, 18),))) is not one


def outcomes(*pairs):
    return [Outcome(accuracy / 100, accuracy / 100, seconds) for accuracy, seconds in pairs]


def test_seconds_to_the_target_are_where_a_line_meets_it():
    lengths = [outcomes((93.4, 0.5), (93.6, 0.5)), outcomes((94.4, 0.7), (94.6, 0.7))]
    value, half = cifar_ablation.seconds_to_target(lengths)
    assert value == pytest.approx(0.6)
    assert 0 < half < 0.1
    # three: least squares of seconds over accuracy, by the normal equations
    found, _ = cifar_ablation.seconds_to_target([*lengths, outcomes((94.1, 0.6))])
    x, y = torch.tensor([93.5, 94.5, 94.1]).double(), torch.tensor([0.5, 0.7, 0.6]).double()
    a = torch.stack((torch.ones_like(x), x - 94), 1)
    assert found == pytest.approx(float(torch.linalg.solve(a.T @ a, a.T @ y)[0]))


def test_means_on_one_side_give_no_seconds():
    assert cifar_ablation.seconds_to_target([outcomes((93.4, 0.5)), outcomes((93.9, 0.7))]) is None
    assert cifar_ablation.seconds_to_target([outcomes((94.4, 0.5)), outcomes((94.9, 0.7))]) is None


def test_what_is_far_from_the_target_is_run_once_more_alone():
    assert cifar_ablation.more_lengths(94.0) == (0.8, 0.65)
    assert cifar_ablation.more_lengths(93.7) == (1.25, 1.6)
    assert cifar_ablation.more_lengths(92.0) == (1.6,)


def test_each_variant_is_a_recipe_that_differs():
    groups = [changes for group in cifar_ablation.GROUPS.values() for changes in group.values()]
    recipes = [replace(BEST, **change) for changes in groups for change in changes]
    recipes += [
        replace(BEST, **change) for change in (cifar_ablation.ROUTES | cifar_ablation.COMPILED).values()
    ]
    same = [recipe for recipe in recipes if recipe == BEST]
    assert len(same) == 2  # the recipe, and its own route
