"""The band and its sequential test: false alarms by simulation, left at the step where a shift begins."""

from __future__ import annotations

import math

import numpy as np

from hotloop.tune.band import Cusum, block_means, make_band

BLOCKS = [(1 + 5 * i, 5 + 5 * i) for i in range(20)]


def runs(rng: np.random.Generator, count: int) -> list[dict[int, float]]:
    return [{s: 1.0 / s + float(rng.normal(0, 0.1)) for s in range(1, 101)} for _ in range(count)]


def test_means_of_blocks() -> None:
    means = block_means({1: 2.0, 2: 4.0, 9: 5.0}, [(1, 2), (3, 4), (5, 9)])
    assert means[0] == 3.0
    assert math.isnan(means[1])
    assert means[2] == 5.0


def test_another_seed_is_rejected_in_at_most_one_of_a_hundred() -> None:
    rng = np.random.default_rng(0)
    left = 0
    for _ in range(300):
        *reference, other = runs(rng, 5)
        test = Cusum(make_band(reference, BLOCKS, 1e-6))
        means = block_means(other, BLOCKS)
        left += any(test.add(i, float(m)) for i, m in enumerate(means))
    # 1 % are promised: 300 trials have more than 8 with a probability of 0.4 %
    assert left <= 8


def test_a_shift_is_seen_and_dated() -> None:
    rng = np.random.default_rng(1)
    reference = runs(rng, 4)
    late = {s: v + (0.6 if s > 60 else 0.0) for s, v in reference[0].items()}
    test = Cusum(make_band(reference, BLOCKS, 1e-6))
    for i, mean in enumerate(block_means(late, BLOCKS)):
        if test.add(i, float(mean)):
            break
    assert test.left_at == 61


def test_the_same_run_never_leaves_and_a_missing_value_does() -> None:
    reference = runs(np.random.default_rng(2), 3)
    band = make_band(reference, BLOCKS, 1e-6)
    test = Cusum(band)
    assert not any(test.add(i, float(m)) for i, m in enumerate(band.same))
    assert test.total == 0.0
    assert test.add(19, math.nan)
    assert test.left_at == 96


def test_grains_and_rounding_are_no_difference() -> None:
    # an accuracy of 100 samples that all seeds have alike but for one sample
    reference = [{1: 0.97, 2: 0.98}, {1: 0.97, 2: 0.98}]
    band = make_band(reference, [(1, 1), (2, 2)], 1e-6)
    assert band.unit.min() >= 0.0199
    constant = make_band([{1: 2.0}, {1: 2.0}], [(1, 1)], 1e-3)
    assert constant.unit[0] == 2e-3
    assert Cusum(constant, rounding=1e-2).unit[0] == 2e-2
