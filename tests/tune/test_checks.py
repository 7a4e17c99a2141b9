"""Each check against runs made by hand: what it names, and that equal runs pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotloop.tune.checks import (
    check_constants,
    check_data,
    check_early,
    check_growth,
    check_length,
    check_rates,
    check_repeat,
    check_updates,
)
from hotloop.tune.run import Run, find_loss
from hotloop.tune.tolerance import tolerance_of


def make_run(**changes: Any) -> Run:
    run = Run(
        values={"loss": {s: 1.0 / s for s in range(1, 21)}},
        updates=[(16, f"h{i}") for i in range(20)],
        marks=[f"m{i}" for i in range(20)],
        rates=[0.1] * 20,
        memory=[(s, 500 * 2**20) for s in range(1, 21)],
        steps=20,
        finished=True,
        evaluated=[100, "e"],
        gradient=np.arange(1, 101, dtype=np.float32),
    )
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def test_equal_runs_pass_every_check() -> None:
    a, b = make_run(), make_run()
    for check in (check_data, check_length, check_updates, check_rates, check_growth):
        assert check(a, b) is None
    assert check_early(a, b, "loss", tolerance_of("fp32"), "fp32") is None


def test_data_that_differ_are_named() -> None:
    short = make_run(updates=[(16, f"h{i}") if i != 7 else (15, "x") for i in range(20)])
    fault = check_data(short, make_run())
    assert fault is not None
    assert (fault.kind, fault.step) == ("data", 8)
    assert "15 samples, the reference 16" in fault.text
    mixed = make_run(updates=[(16, "x")] * 20)
    assert "another order" in str(check_data(mixed, make_run()))
    assert "evaluation saw 50 samples" in str(check_data(make_run(evaluated=[50, "f"]), make_run()))


def test_other_lengths_updates_and_rates_are_named() -> None:
    assert "made 20 updates, the reference 21" in str(check_length(make_run(), make_run(steps=21))) or (
        "the reference went on" in str(check_length(make_run(), make_run(steps=21)))
    )
    assert check_length(make_run(steps=30, finished=False), make_run()) is not None
    still = make_run(marks=[f"m{i}" if i != 9 else "m8" for i in range(20)])
    fault = check_updates(still, make_run())
    assert fault is not None
    assert (fault.kind, fault.step) == ("updates", 10)
    # fp16 finds its scale by skipping a few
    assert check_updates(make_run(marks=still.marks, precision="fp16"), make_run()) is None
    rates = make_run(rates=[0.1] * 10 + [0.2] * 10)
    fault = check_rates(rates, make_run())
    assert fault is not None
    assert (fault.kind, fault.step) == ("schedule", 11)


@pytest.mark.parametrize(("precision", "error", "holds"), [
    ("fp32", 1e-6, True), ("fp32", 1e-2, False), ("bf16", 1e-2, True), ("bf16", 0.5, False),
])  # fmt: skip
def test_first_gradients_agree_as_far_as_the_format_rounds(precision: str, error: float, holds: bool) -> None:
    rng = np.random.default_rng(0)
    reference = make_run(gradient=rng.normal(size=10_000).astype(np.float32))
    noise = rng.normal(size=10_000).astype(np.float32) * error
    mine = make_run(gradient=reference.gradient + noise)
    assert (check_early(mine, reference, None, tolerance_of(precision), precision) is None) is holds


def test_a_wrong_factor_is_seen_though_it_is_as_small_as_rounding() -> None:
    reference = make_run()
    mine = make_run(gradient=reference.gradient * np.float32(1.05))
    assert check_early(mine, reference, None, tolerance_of("bf16"), "bf16") is not None


def test_a_loss_that_goes_wrong_in_the_first_steps_is_dated() -> None:
    values = {"loss": {s: 1.0 / s * (1.1 if s >= 5 else 1.0) for s in range(1, 21)}}
    fault = check_early(make_run(values=values), make_run(), "loss", tolerance_of("fp32"), "fp32")
    assert fault is not None
    assert (fault.kind, fault.step) == ("arithmetic", 5)


def test_a_second_run_must_agree() -> None:
    rows = [[s, {"loss": 1.0 / s}] for s in range(1, 21)]
    assert check_repeat(rows, make_run(), "loss", tolerance_of("fp32")) is None
    rows[2][1] = {"loss": 0.4}
    fault = check_repeat(rows, make_run(), "loss", tolerance_of("fp32"))
    assert fault is not None
    assert (fault.kind, fault.step) == ("repeatability", 3)


def test_memory_that_climbs_is_seen_and_noise_is_not() -> None:
    steady = make_run()
    climbing = make_run(memory=[(s, (500 + 2 * s) * 2**20) for s in range(1, 21)])
    fault = check_growth(climbing, steady)
    assert fault is not None
    assert "200 MB every 100 steps" in fault.text
    assert check_growth(climbing, climbing) is None
    rng = np.random.default_rng(0)
    noisy = [(s, int((500 + rng.normal(0, 5)) * 2**20)) for s in range(1, 21)]
    assert check_growth(make_run(memory=noisy), steady) is None
    stepped = [(s, (500 if s < 4 else 700) * 2**20) for s in range(1, 21)]
    assert check_growth(make_run(memory=stepped), steady) is None


def test_the_loss_is_found_by_name() -> None:
    assert find_loss(make_run()) == "loss"
    assert find_loss(make_run(values={"train_loss": {1: 1.0}, "val_loss": {1: 1.0, 2: 1.0}})) == "train_loss"
    assert find_loss(make_run(values={"accuracy": {1: 1.0}})) is None


def test_constants_that_differ_are_named_at_their_step() -> None:
    mine = make_run(constants={1: {"weight_decay": 0.1, "p of 2": 0.5}, 8: {"weight_decay": 0.05}})
    theirs = make_run(constants={1: {"weight_decay": 0.1, "p of 2": 0.5, "eps of 3": 1e-5}})
    assert check_constants(theirs, theirs) is None
    fault = check_constants(mine, theirs)
    assert fault is not None
    assert (fault.kind, fault.step, fault.text) == (
        "constants", 8, "weight_decay is 0.05, the reference's 0.1"
    )  # fmt: skip
    second = make_run(constants={1: {"lr of group 2": 0.2}})
    fault = check_constants(second, make_run(constants={1: {"lr of group 2": 0.1}}))
    assert fault is not None
    assert fault.kind == "schedule"
