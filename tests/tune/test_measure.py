"""Which of two is faster: the statistics against closed forms and simulation, not the clock."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from hotloop.tune.measure import LOOKS, compare, interval, is_hopeless, judge
from hotloop.tune.student import t_quantile, t_tail


@pytest.mark.parametrize(
    ("probability", "freedom", "known"),
    [
        (0.975, 1, 12.7062),
        (0.975, 3, 3.18245),
        (0.995, 5, 4.03214),
        (0.95, 10, 1.81246),
        (0.975, 1000, 1.96234),
    ],
)
def test_quantiles_are_those_of_the_tables(probability: float, freedom: int, known: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(known, rel=1e-4)


def test_tails_have_closed_forms_for_one_and_two_degrees() -> None:
    for t in (0.0, 0.5, 2.0, 30.0):
        assert t_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, abs=1e-9)
        assert t_tail(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), abs=1e-9)
    assert t_tail(-2.0, 2) == pytest.approx(1 - t_tail(2.0, 2))


def test_the_interval_is_students() -> None:
    logs = [0.1, 0.2, 0.3, 0.4]
    low, high = interval(logs, 0.05)
    half = 3.18245 * statistics.stdev(logs) / 2
    assert (low, high) == pytest.approx((0.25 - half, 0.25 + half), rel=1e-4)


class Clock:
    """A contender whose stretches take what a list says."""

    def __init__(self, times: list[float]) -> None:
        self.times = list(times)

    def run(self, steps: int, limit_s: float) -> float:
        return self.times.pop(0)


def noisy(rng: random.Random, mean: float, noise: float) -> list[float]:
    return [mean * math.exp(rng.gauss(0, noise)) for _ in range(LOOKS[-1])]


def test_a_clear_gain_is_seen_after_three_rounds_and_a_loss_too() -> None:
    rng = random.Random(0)
    faster = compare(Clock(noisy(rng, 1.0, 0.01)), Clock(noisy(rng, 0.5, 0.01)), 5, limit_s=1)
    assert (faster.verdict, faster.rounds) == ("faster", 3)
    assert faster.low < 2.0 < faster.high
    slower = compare(Clock(noisy(rng, 0.5, 0.01)), Clock(noisy(rng, 1.0, 0.01)), 5, limit_s=1)
    assert slower.verdict == "not faster"


def test_rungs_without_effect_are_seldom_kept() -> None:
    rng = random.Random(1)
    kept = sum(
        compare(Clock(noisy(rng, 1.0, 0.05)), Clock(noisy(rng, 1.0, 0.05)), 5, limit_s=1).verdict == "faster"
        for _ in range(300)
    )
    # at most 2.5 % are promised; 300 trials of that have more than 15 with a probability of 0.4 %
    assert kept <= 15


def test_noise_that_nothing_decides_is_given_up_early() -> None:
    assert is_hopeless([0.9, -1.0, 1.2, -0.8], 12)
    assert not is_hopeless([0.5, 0.52, 0.48, 0.51], 12)
    rng = random.Random(2)
    gain = compare(Clock(noisy(rng, 1.0, 1.0)), Clock(noisy(rng, 1.0, 1.0)), 5, limit_s=1)
    assert gain.verdict == "undecided"
    assert gain.rounds < LOOKS[-1]


def test_judge_waits_where_the_interval_holds_the_least_gain() -> None:
    assert judge([0.0, 0.05, -0.05]) is None
    assert judge([0.3, 0.31, 0.29]) == "faster"
    assert judge([-0.3, -0.31, -0.29]) == "not faster"
