"""Tuning on a GPU: settings of the loader act there, planted mistakes are seen, honest rungs hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.hardware import machine_kind
from hotloop.tune import Rung
from hotloop.tune.measure import Contender
from hotloop.tune.proof import Prover
from hotloop.tune.trial import Nursery, Script

pytestmark = pytest.mark.gpu

SCRIPTS = Path(__file__).parents[1] / "tune" / "scripts"


@pytest.mark.parametrize("settings", [{"pin_memory": False}, {"prefetch": 4}, {"workers": 1, "prefetch": 3}])
def test_loader_settings_bring_the_same_batches(settings: dict[str, object]) -> None:
    loop = hotloop.Loop(record=False, device="cuda", seed=0, settings=settings)
    loader = loop.prepare(DataLoader(TensorDataset(torch.arange(40.0)), batch_size=8))
    batches = [x for (x,) in loader]
    assert all(x.device.type == "cuda" for x in batches)
    assert torch.equal(torch.cat(batches).cpu(), torch.arange(40.0))
    loop.end_training()


def test_the_kind_of_machine_names_the_gpu() -> None:
    assert machine_kind()["name"] == torch.cuda.get_device_name()


def test_rungs_are_proven_and_measured_on_the_device() -> None:
    with Nursery(Script(str(SCRIPTS / "small.py"), ["--epochs", "4"])) as nursery:
        prover = Prover(nursery, seed=0, seeds=2, horizon=80, exact=False, limit_s=120, whole=True)
        prover.prepare(threads=1, beside=2)
        assert prover.prove([Rung("bf16", {"precision": "bf16"})]).holds
        wrong = prover.prove([Rung("wrong", setup=f"{SCRIPTS / 'plants.py'}:wrong_by_two_percent")])
        assert wrong.fault is not None
        assert wrong.fault.kind == "arithmetic"
        contender = Contender(nursery, [], warm_up=22, seed=0)
        contender.start(120)
        assert contender.facts["device"] == "cuda"
        assert contender.run(20, 60) > 0
        contender.stop()
