"""Trials: contained whatever they do, measured in stretches, and leaving nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hotloop.errors import HotloopError
from hotloop.tune import Rung
from hotloop.tune.measure import Contender
from hotloop.tune.trial import Nursery, Script, TrialError

PLANTS = Path(__file__).parent / "scripts" / "plants.py"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_a_contender_runs_stretches_over_the_scripts_end(nursery: Nursery) -> None:
    contender = Contender(nursery, [], warm_up=22, seed=0)
    contender.start(60)
    # 80 steps in all: the second stretch needs a second run of the script
    assert all(contender.run(30, 60) > 0 for _ in range(3))
    facts = contender.facts
    assert (facts["epoch_steps"], facts["total_steps"], facts["batch_size"]) == (20, 80, 16)
    assert facts["optimizers"] == [{"type": "AdamW", "torch": True, "fused": False}]
    assert facts["backward"].endswith("small.py:34")
    rows = contender.rows()
    assert max(step for step, _ in rows) <= 80
    pid = nursery.pid_of(contender._trial.number)
    assert alive(pid)
    contender.stop()
    assert not alive(pid)


def test_rows_of_the_measured_run_are_those_of_the_seed(nursery: Nursery, prover) -> None:
    contender = Contender(nursery, [], warm_up=22, seed=0)
    contender.start(60)
    rows = [(step, v["loss"]) for step, v in contender.rows() if "loss" in v]
    contender.stop()
    assert len(rows) >= 20
    assert rows == [(step, prover.reference.values["loss"][step]) for step, _ in rows]


def test_settings_environment_and_setup_reach_the_trial(nursery: Nursery, tmp_path: Path) -> None:
    seen = tmp_path / "seen.txt"
    setup = tmp_path / "note.py"
    setup.write_text(
        "import os\ndef note():\n    open(os.environ['SEEN'], 'w').write(os.environ['HOTLOOP_OVERRIDE'])\n"
    )
    rung = Rung("r", {"threads": 1}, environment={"SEEN": str(seen)}, setup=f"{setup}:note")
    contender = Contender(nursery, [rung], warm_up=5, seed=3)
    contender.start(60)
    contender.stop()
    assert seen.read_text() == "threads=1,record=off,seed=3"
    assert contender.facts["values"]["seed"] == 3


@pytest.mark.parametrize(
    ("name", "kind", "limit_s"),
    [("crashes", "crash", 60), ("out_of_memory", "memory", 60), ("hangs", "hang", 4)],
)
def test_failures_are_told_apart(nursery: Nursery, name: str, kind: str, limit_s: float) -> None:
    contender = Contender(nursery, [Rung(name, setup=f"{PLANTS}:{name}")], warm_up=10, seed=0)
    with pytest.raises(TrialError) as caught:
        contender.start(limit_s)
    assert caught.value.kind == kind
    contender.stop()
    if name == "crashes":
        assert "planted: the kernel failed" in str(caught.value)
        assert any("planted" in line for line in caught.value.lines)


def test_a_trial_that_is_killed_is_told_as_the_system_does_it(nursery: Nursery, tmp_path: Path) -> None:
    setup = tmp_path / "die.py"
    setup.write_text("import os, signal\ndef die():\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    contender = Contender(nursery, [Rung("die", setup=f"{setup}:die")], warm_up=10, seed=0)
    with pytest.raises(TrialError, match="killed by the system") as caught:
        contender.start(60)
    assert caught.value.kind == "memory"


def test_nothing_of_the_script_is_written(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "saves.py"
    script.write_text(
        """
import torch, hotloop
loop = hotloop.Loop(config={"a": 1})
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = loop.prepare(model, optimizer)
for step in loop.steps(30):
    loop.backward(model(torch.ones(2, 1)).mean())
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), "model.pt")
    loop.save_state("checkpoint")
"""
    )
    before = sorted(os.listdir(tmp_path))
    plain, nursery.script = nursery.script, Script(str(script))
    try:
        contender = Contender(nursery, [], warm_up=10, seed=None)
        contender.start(60)
        contender.stop()
    finally:
        nursery.script = plain
    assert sorted(name for name in os.listdir(tmp_path) if name != "__pycache__") == before


def test_what_is_no_script_is_said() -> None:
    with pytest.raises(HotloopError, match="there is no script"):
        Script("nowhere.py")
    with pytest.raises(HotloopError, match="there is no module"):
        Script("no.such.module", module=True)


def test_installed_imports_are_loaded_before(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import numpy.linalg\nimport mine\nfrom torch import nn\nfrom . import other\n")
    assert Script(str(script)).imports() == ["numpy.linalg", "torch"]
