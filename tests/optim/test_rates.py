"""Rates: torch's own schedulers and closed forms, composing, units, plots."""

import math
import pickle

import pytest
import torch
from torch.optim import lr_scheduler

from hotloop.errors import SettingError
from hotloop.optim import courses, curves, rates

BASE = 0.3


def torchs(build, n, **options):
    """The learning rates of torch's own scheduler at its first n steps, and momenta."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE, momentum=0.9, **options)
    scheduler = build(optimizer)
    found, momenta = [], []
    for _ in range(n):
        found.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        scheduler.step()
    return found, momenta


EQUAL = {
    "linear": (
        lambda o: lr_scheduler.LinearLR(o, 0.1, 0.7, total_iters=9),
        rates.linear(BASE * 0.1, BASE * 0.7, 9),
        20,
    ),
    "cosine": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, 15, eta_min=0.01),
        rates.cosine(BASE, 0.01, 15),
        16,
    ),
    "exponential": (lambda o: lr_scheduler.ExponentialLR(o, 0.8), rates.exponential(BASE, 0.8), 30),
    "constant then 1": (
        lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
        rates.constant(BASE / 2, 4).then(rates.constant(BASE)),
        10,
    ),
    "steps": (
        lambda o: lr_scheduler.MultiStepLR(o, [4, 9], 0.1),
        rates.piecewise([(0, BASE), (4, BASE * 0.1), (9, BASE * 0.01)], shape="constant"),
        14,
    ),
    "sequential": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
        ),
        rates.linear(BASE * 0.1, BASE, 4).then(rates.exponential(BASE, 0.9)),
        18,
    ),
    "sequential, cut": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.CosineAnnealingLR(o, 8)], [5]
        ),
        rates.exponential(BASE, 0.9).then(rates.cosine(BASE, 0.0, 8), after=5),
        13,
    ),
    "polynomial": (
        lambda o: lr_scheduler.PolynomialLR(o, 11),
        rates.linear(BASE, 0.0, 11),
        15,
    ),
    "chained": (
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, 0.5, 100), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
        rates.exponential(BASE, 0.9).scaled(0.5),
        12,
    ),
}


@pytest.mark.parametrize("name", sorted(EQUAL))
def test_values_are_those_of_torchs_schedulers(name):
    build, rate, n = EQUAL[name]
    assert rate.values(n) == pytest.approx(torchs(build, n)[0], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("n", [20, 101])
def test_one_cycle_is_torchs_in_rate_and_momentum(shape, n):
    found, momenta = torchs(
        lambda o: lr_scheduler.OneCycleLR(
            o, 0.8, total_steps=n, anneal_strategy={"cosine": "cos"}.get(shape, shape)
        ),
        n - 1,
    )
    ours = courses.one_cycle(0.8, n - 1, warm=(0.3 * n - 1) / (n - 1), shape=shape)
    assert ours.values(n - 1) == pytest.approx(found, rel=1e-9)
    assert ours.momentum.values(n - 1) == pytest.approx(momenta, rel=1e-9)
    assert ours(n - 1) == pytest.approx(0.8 / 25 / 1e4)


def test_closed_forms():
    rate = courses.warmup_inverse_sqrt(0.2, warm=40)
    for t in range(400):
        # Vaswani et al.: min(t^-1/2, t * warm^-3/2), scaled so that the top is the peak
        wanted = 0.2 * math.sqrt(40) * min(t**-0.5, t * 40**-1.5) if t else 0.0
        assert rate(t) == pytest.approx(wanted)
    rate = courses.warmup_stable_decay(1.0, 100, warm=10, decay=20, shape="1-sqrt", final=0.1)
    for t in range(130):
        down = 0.1 + 0.9 * (1 - math.sqrt(min(max(t - 80, 0) / 20, 1)))
        assert rate(t) == pytest.approx(t / 10 if t < 10 else down)
    rate = courses.warmup_cosine(2.0, 50, warm=5, final=0.5)
    assert rate.values(60) == pytest.approx(
        [
            2.0 * t / 5 if t < 5 else 0.5 + 0.75 * (1 + math.cos(math.pi * min((t - 5) / 45, 1.0)))
            for t in range(60)
        ]
    )
    rate = courses.warmup_linear(2.0, 50, warm=5)
    assert rate.values(60) == pytest.approx([min(2 * t / 5, 2 * max(50 - t, 0) / 45) for t in range(60)])


def test_a_rise_and_a_fall_may_fill_a_run_of_any_length():
    """0.2 * 3 + 0.8 * 3 is above 3 by rounding."""
    for n in range(1, 1000):
        for share in (0.02, 0.1, 0.2, 0.3, 0.4):
            rate = courses.warmup_stable_decay(1.0, n, warm=share * n, decay=(1 - share) * n)
            assert len(rate.pieces) == 2
            assert rate(share * n) == 1.0
            assert rate(n) == 0.0
    with pytest.raises(SettingError, match="must fit"):
        courses.warmup_stable_decay(1.0, 10, warm=5, decay=5.001)


def test_ends_are_reached_exactly_and_kept():
    for shape in ("linear", "cosine", "1-sqrt", "exponential"):
        rate = rates.piecewise([(0, 0.7), (3, 0.1), (10, 0.3)], shape=shape)
        assert (rate(0), rate(3), rate(10), rate(1e9)) == (0.7, 0.1, 0.3, 0.3)
    assert rates.exponential(1.0, 0.5)(math.inf) == 0.0
    assert rates.inverse_sqrt(1.0, 10)(math.inf) == 0.0
    assert rates.constant(0.4)(math.inf) == 0.4
    assert rates.linear(0, 1, 5)(-3) == 0.0


def test_composing_keeps_momentum_and_units():
    cycle = courses.one_cycle(1.0, 10)
    tail = cycle.then(rates.linear(cycle(10), 0.0, 5))
    assert tail.length == 15
    assert tail.momentum(12) == pytest.approx(0.95)
    late = rates.constant(0.1, 4).then(cycle)
    assert late.momentum.values(5) == pytest.approx([0.95] * 5)
    assert late.momentum(4 + 3) == pytest.approx(0.85)
    assert late.scaled(3.0)(7) == pytest.approx(3.0)
    assert late.scaled(3.0).momentum == late.momentum
    epochs = courses.one_cycle(1.0, 30, unit="epochs")
    steps = epochs.counted_in("steps", per=98)
    assert steps.values(2941) == pytest.approx(epochs.values(2941, every=1 / 98))
    assert steps.momentum(900) == pytest.approx(epochs.momentum(900 / 98))
    assert steps.with_momentum(0.8).momentum(77) == 0.8
    assert steps.with_weight_decay(rates.linear(0.1, 0.0, 10)).until(5).weight_decay(5) == 0.05
    cut = rates.cosine(1.0, 0.0, 10).until(4)
    assert cut.values(6) == pytest.approx([*rates.cosine(1.0, 0.0, 10).values(5), cut(4)])
    assert rates.linear(1.0, 0.0, 3).until(8).length == 8


def test_rates_are_values():
    a, b = courses.warmup_cosine(1e-3, 100, warm=10), courses.warmup_cosine(1e-3, 100, warm=10)
    assert a == b
    assert hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a
    assert a != a.scaled(2.0)
    with pytest.raises(AttributeError):
        a.unit = "epochs"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: rates.linear(0, 1, 0), "longer than 0"),
        (lambda: rates.linear(0, math.nan, 3), "not finite"),
        (lambda: rates.linear(0, 1, 5, unit="hours"), "steps, epochs, samples, tokens"),
        (lambda: rates.constant(1.0).then(rates.linear(1, 0, 5)), "after="),
        (lambda: rates.linear(0, 1, 5).then(rates.linear(1, 0, 5, unit="epochs")), "counted_in"),
        (lambda: rates.exponential(1.0, 1.5), "needs a length"),
        (lambda: rates.exponential(1.0, 0.0), "exponential"),
        (lambda: rates.piecewise([(1, 0.1), (3, 0.2)]), "grow from 0"),
        (lambda: rates.piecewise([(0, 0.1), (3, 0.2), (3, 0.1)]), "grow from 0"),
        (lambda: rates.piecewise([(0, 0.1), (3, 0.2)], shape="sine"), "valid values are: constant, linear"),
        (lambda: courses.warmup_stable_decay(1.0, 10, warm=6, decay=6), "must fit"),
        (lambda: courses.warmup_cosine(1.0, 10, warm=10), "between 0 and"),
        (lambda: courses.one_cycle(1.0, 10, warm=1.0), "between 0 and 1"),
        (lambda: rates.linear(0, 1, 5).until(0), "longer than 0"),
        (lambda: rates.linear(0, 1, 5).counted_in("steps", 0), "above 0"),
        (lambda: rates.linear(0, 1, 5).with_momentum(rates.constant(1, unit="epochs")), "momentum in epochs"),
    ],
)
def test_mistakes_are_told(make, text):
    with pytest.raises(SettingError, match=text):
        make()


def test_plots_show_the_curve():
    picture = rates.linear(0.0, 1.0, 100).plot(width=40, height=5).splitlines()
    assert len(picture) == 6
    assert picture[0].startswith("  1")
    assert picture[4].strip().startswith("0")
    # the line goes from the lower left to the upper right
    ends = [(len(row) - len(row[3:].lstrip()), len(row)) for row in picture[:5]]
    assert [end for _, end in ends] == sorted((end for _, end in ends), reverse=True)
    assert picture[5].split() == ["0", "100"]
    svg = courses.one_cycle(0.1, 10).svg(title="a < b")
    assert svg.count("<polyline") == 2
    assert "a &lt; b" in svg
    assert courses.warmup_inverse_sqrt(1.0, warm=4).plot()
    page = courses.one_cycle(0.1, 10).html("one <cycle>")
    assert page.count("<svg") == 1
    assert "<title>one &lt;cycle&gt;</title>" in page


def test_a_curve_leaves_out_what_is_not_finite():
    curve = curves.Curve("x", (1.0, 2.0, 3.0), (1.0, math.nan, math.inf))
    assert curve.points() == [(1.0, 1.0)]
    assert curves.draw_text([curves.Curve("x", (1.0,), (math.nan,))]) == "nothing finite to draw"
    assert "nothing finite" in curves.draw_svg([curves.Curve("x", (1.0,), (math.nan,))])
    picture = curves.draw_text([curve], marks=[curves.Mark("here", 1.0)], log_x=True)
    assert "here: 1" in picture
