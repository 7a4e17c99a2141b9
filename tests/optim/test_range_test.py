"""The range test's judgement on losses whose answer is known, and its course."""

import json
import math

import numpy as np
import pytest

from hotloop.errors import SettingError
from hotloop.optim import Sweep, judge_range


def rates(n=100, low=1e-7, high=10.0):
    return [low * (high / low) ** (i / (n - 1)) for i in range(n)]


def losses(kind, n=100, noise=0.0, seed=0):
    """Loss at each rate: it falls from 2.3 to 0.5 around 1e-3 and explodes past 0.3."""
    rng = np.random.default_rng(seed)
    found = []
    for rate in rates(n):
        x = math.log10(rate)
        value = 2.3
        if kind == "usual":
            value = 0.5 + 1.8 / (1 + math.exp(4 * (x + 3))) + max(0.0, x + 0.5) ** 2 * 100
        found.append(value + noise * rng.standard_normal())
    return found


def run(sweep, loss_at):
    while not sweep.over:
        sweep.note(loss_at(sweep.next_rate()))
    return sweep.result()


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_fall_is_found(noise):
    found = judge_range(rates(), losses("usual", noise=noise))
    assert found.verdict == "found"
    # the fall is steepest at 1e-3; the running mean lags by about half a decade
    assert 1e-3 <= found.steepest <= 1e-2
    assert 1e-5 <= found.valley <= 1e-1
    assert found.suggestion == found.valley
    assert f"{found.steepest:.2g}" in found.words


def test_without_smoothing_the_steepest_is_where_the_formula_says():
    found = judge_range(rates(400), losses("usual", 400), smoothing=0.0)
    assert found.steepest == pytest.approx(1e-3, rel=0.1)
    assert found.smoothed == pytest.approx(found.losses)


def test_the_bias_of_the_running_mean_is_corrected():
    found = judge_range(rates(20), [3.0] * 20, smoothing=0.95)
    assert found.smoothed == pytest.approx([3.0] * 20)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.5])
def test_flat_losses_give_no_suggestion(noise):
    for seed in range(20):
        found = judge_range(rates(), losses("flat", noise=noise, seed=seed))
        assert found.verdict == "flat"
        assert found.steepest is None
        assert found.valley is None
        assert "no suggestion" in found.words


def test_diverging_at_once_gives_no_suggestion():
    for loss_at in (lambda r: 2.0 + r * 100, lambda r: 2.0 if r < 2 else math.inf):
        found = run(Sweep(low=1.0, high=100.0), loss_at)
        assert found.verdict == "diverged"
        assert found.suggestion is None
        assert "lower rate, such as 1e-03" in found.words
        assert found.diverged == found.rates[-1]
        assert len(found.rates) < 100


def test_a_first_loss_that_is_no_number_is_not_the_rates_fault():
    found = run(Sweep(low=1e-4, high=1.0), lambda r: math.nan)
    assert (found.verdict, found.suggestion) == ("diverged", None)
    assert "before any update, is nan" in found.words
    assert "lower rate" not in found.words


def test_the_sweep_grows_by_one_factor_and_stops_where_the_loss_explodes():
    sweep = Sweep(low=1e-4, high=1.0, steps=50)
    found = run(sweep, lambda r: 1.0 if r < 0.01 else 0.6 if r < 0.2 else 9.0)
    assert found.rates[0] == 1e-4
    factors = [b / a for a, b in zip(found.rates, found.rates[1:], strict=False)]
    assert factors == pytest.approx([1e4 ** (1 / 49)] * len(factors))
    assert sweep.diverged
    assert 0.2 < found.diverged < 0.6
    whole = run(Sweep(low=1e-4, high=1.0, steps=50), lambda r: 1.0)
    assert len(whole.rates) == 50
    assert whole.rates[-1] == 1.0
    assert whole.diverged is None


def test_losses_below_zero_do_not_count_as_exploded():
    found = run(Sweep(low=1e-4, high=1.0), lambda r: -3.0 - 5 * r)
    assert found.diverged is None
    assert found.verdict == "found"


def test_too_few_steps_are_told():
    assert judge_range(rates(5), [1.0] * 5).verdict == "short"
    assert judge_range([], []).verdict == "short"
    assert judge_range(rates(5), [1.0] * 5, ended="the script ended").words.endswith("the script ended")


def test_pages_and_json():
    found = judge_range(rates(), [*losses("usual")[:99], math.inf], diverged=True)
    text = str(found)
    assert "steepest" in text
    assert "valley" in text
    page = found.html()
    assert page.count("<svg") == 1
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    facts = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert facts["losses"][-1] is None
    assert facts["verdict"] == "found"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"low": 1.0, "high": 0.1}, "low=1.0"),
        ({"steps": 3}, "at least 10"),
        ({"smoothing": 1.0}, "share"),
        ({"stop": 0.5}, "above 1"),
    ],
)
def test_mistakes_are_told(options, text):
    with pytest.raises(SettingError, match=text):
        Sweep(**options)


@pytest.mark.parametrize("low", [1e-9, 1e-7, 1e-5])
def test_the_valley_does_not_depend_on_where_the_test_begins(low):
    """Descent on a quadratic with eigenvalues 0.1 to 1, one decade after the other: a rate of 2 is the limit."""
    curvature = [10 ** (-k / 9) for k in range(10)]
    errors = [1.0] * 10

    def loss_at(rate):
        value = sum(c * e * e for c, e in zip(curvature, errors, strict=True))
        errors[:] = [e * (1 - rate * c) for c, e in zip(curvature, errors, strict=True)]
        return value

    found = run(Sweep(low=low, high=10.0, steps=200), loss_at)
    assert 0.02 < found.valley < 1.0
    # thirty steps with it, of a loss that begins at 4.1
    left = [math.prod([1 - found.valley * c] * 30) for c in curvature]
    assert sum(c * e * e for c, e in zip(curvature, left, strict=True)) < 0.5
