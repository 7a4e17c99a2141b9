"""Planted rungs: each bad one is rejected for its own reason, and honest ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.tune import Rung
from hotloop.tune.checks import check_repeat
from hotloop.tune.proof import Prover
from hotloop.tune.tolerance import tolerance_of
from hotloop.tune.trial import Nursery

PLANTS = Path(__file__).parent / "scripts" / "plants.py"


def planted(name: str, **settings: object) -> Rung:
    """A rung that calls a function of `scripts/plants.py` in the trial."""
    return Rung(name, settings, setup=f"{PLANTS}:{name}")


BAD = {
    "wrong_by_two_percent": ("arithmetic", 1),
    "wrong_after_recording": ("arithmetic", 5),
    "diverges_late": ("loss", None),
    "not_finite_late": ("loss", 70),
    "drops_a_sample": ("data", 8),
    "swaps_samples": ("data", 1),
    "evaluates_on_less": ("data", 80),
    "bigger_batches": ("data", 1),
    "fewer_steps": ("length", None),
    "skips_updates": ("updates", 10),
    "higher_rate": ("schedule", 1),
    "less_decay": ("constants", 1),
    "bigger_eps": ("constants", 1),
    "worse_metric": ("metric", 20),
    "leaks": ("memory", None),
    "random_each_time": ("repeatability", None),
    "crashes": ("crash", None),
    "out_of_memory": ("out of memory", None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_rung_is_rejected_for_its_own_reason(prover: Prover, name: str) -> None:
    kind, step = BAD[name]
    fault = prover.prove([planted(name)]).fault
    assert fault is not None
    assert fault.kind == kind, str(fault)
    assert step is None or fault.step == step, str(fault)


def test_a_late_divergence_is_dated_where_it_begins(prover: Prover) -> None:
    fault = prover.prove([planted("diverges_late")]).fault
    assert fault is not None
    assert 45 <= fault.step <= 60


HONEST = [
    Rung("precision=bf16", {"precision": "bf16"}),
    Rung("precision=bf16-true", {"precision": "bf16-true"}),
    Rung("fused=on", {"fused": True}),
    Rung("micro_batch=8", {"micro_batch": 8}),
    Rung("workers=1", {"workers": 1}),
    planted("adds_rounding_noise"),
    planted("rounds_like_bf16", precision="bf16"),
]


@pytest.mark.parametrize("rung", HONEST, ids=lambda rung: rung.name)
def test_an_honest_rung_holds(prover: Prover, rung: Rung) -> None:
    verdict = prover.prove([rung])
    assert verdict.holds, str(verdict.fault)
    assert verdict.run.finished
    assert verdict.run.steps == 80


def test_a_rung_that_hangs_is_killed_and_named(nursery: Nursery, prover: Prover) -> None:
    before, prover._limit_s = prover._limit_s, 4.0
    try:
        fault = prover.prove([planted("hangs")]).fault
    finally:
        prover._limit_s = before
    assert fault is not None
    assert fault.kind == "hang"
    assert not nursery._live


def test_the_same_settings_run_twice_log_the_same(prover: Prover) -> None:
    first = prover.prove([planted("adds_rounding_noise")]).run
    second = prover.prove([planted("adds_rounding_noise")]).run
    rows = [[step, {"loss": value}] for step, value in second.values["loss"].items()]
    assert check_repeat(rows, first, "loss", tolerance_of("fp32")) is None
    assert first.weights == second.weights


def test_exact_admits_what_is_bitwise_the_same_alone(nursery: Nursery) -> None:
    exact = Prover(nursery, seed=0, seeds=3, horizon=30, exact=True, limit_s=60)
    exact.prepare(threads=1, beside=1)
    assert exact.prove([Rung("workers=1", {"workers": 1})]).holds
    fault = exact.prove([planted("adds_rounding_noise")]).fault
    assert fault is not None
    assert fault.kind == "bits"


def test_the_reference_says_what_it_could_not_see(prover: Prover) -> None:
    assert prover.notes == []
    assert prover.loss == "loss"
    assert set(prover.bands) == {"loss", "val_accuracy"}
    assert prover.reference.finished
    assert not prover.reference.draws
