"""A run whose disk fails it: training goes on or stops with the fault named, and the last whole checkpoint loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hotloop
from hotloop.errors import CheckpointError


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLOOP_PROGRESS", "0")
    torch.set_num_threads(1)


def build(record: Any = False) -> tuple[hotloop.Loop, Any, Any]:
    loop = hotloop.Loop(device="cpu", record=record)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (loop, *loop.prepare(model, optimizer))


def step(loop: hotloop.Loop, model: Any, optimizer: Any) -> None:
    loss = model(torch.ones(2, 3)).square().mean()
    loop.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    loop.log(loss=loss)


FULL = """
import json, os, resource, sys
import torch
import hotloop
from hotloop.errors import CheckpointError
torch.set_num_threads(1)
loop = hotloop.Loop(device="cpu", record="run")
model = torch.nn.Linear(3000, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = loop.prepare(model, optimizer)
for _ in loop.steps(3):
    loop.backward(model(torch.ones(2, 3000)).mean())
    optimizer.step()
    optimizer.zero_grad()
loop.save_state("checkpoint", wait=True)
before = model.weight.detach().clone()
loop.record_folder.joinpath("filler").touch()
loop._session.record.wait()

# no file may grow past 20 kB from here on; every write beyond fails as on a full disk
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
told = []
for _ in loop.steps(400):
    loop.backward(model(torch.ones(2, 3000)).mean())
    optimizer.step()
    optimizer.zero_grad()
    loop.log(a=loop.updates, b=0.123456789, c="x" * 50)
    if loop.updates in (200, 300):
        try:
            loop.save_state("checkpoint", keep=1)
        except CheckpointError as error:
            told.append(str(error))
assert loop.updates == 400
assert not torch.equal(model.weight, before)
try:
    loop.end_training()
except CheckpointError as error:
    told.append(str(error))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
loop._session.record.finish("finished")
print(json.dumps(told))

again = hotloop.Loop(device="cpu", record=False)
model = torch.nn.Linear(3000, 10)
again.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
assert again.resume("checkpoint")
assert again.updates == 3
assert torch.equal(model.weight, before)
"""


def test_a_full_disk_costs_rows_and_checkpoints_but_not_the_run(tmp_path: Path) -> None:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("HOTLOOP")}
    done = subprocess.run(
        [sys.executable, "-c", FULL],
        cwd=tmp_path,
        env={**variables, "HOTLOOP_PROGRESS": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told
    assert all("checkpoint" in text and "File too large" in text for text in told)
    assert done.stderr.count("metrics.jsonl failed, training goes on") == 1
    assert "logged rows were lost" in done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "finished"
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all("step" in json.loads(row) for row in rows)
    assert record["rows_lost"] == 397 - len(rows)
    assert record["rows_dropped"] == 0


def test_a_record_that_cannot_be_made_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    loop, model, optimizer = build(tmp_path / "file" / "run")
    for _ in loop.steps(3):
        step(loop, model, optimizer)
    loop.end_training()
    said = capfd.readouterr().err
    assert said.count("training goes on") == 1
    assert "not recorded" in said
    assert loop.updates == 3
    assert loop.record_folder is None


def test_metrics_that_cannot_be_opened_are_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    loop, model, optimizer = build(tmp_path / "run")
    for _ in loop.steps(3):
        step(loop, model, optimizer)
    loop.end_training()
    said = capfd.readouterr().err
    assert said.count("training goes on") == 1
    assert "metrics.jsonl" in said
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "finished"
    assert any("metrics.jsonl" in note["text"] for note in record["notes"])


def test_a_checkpoint_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    loop, model, optimizer = build()
    step(loop, model, optimizer)
    with pytest.raises(CheckpointError, match="file"):
        loop.save_state(tmp_path / "file" / "checkpoint")
    # and the run is as it was
    step(loop, model, optimizer)
    assert loop.save_state(tmp_path / "elsewhere", wait=True)


def damage(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    path.write_bytes(path.read_bytes()[:-10])
    return path


def test_a_truncated_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loop, model, optimizer = build()
    weights = []
    for _ in range(2):
        step(loop, model, optimizer)
        loop.save_state(tmp_path, keep=2, wait=True)
        weights.append(model.weight.detach().clone())
    hurt = damage(tmp_path / "step-0000000002", "*.safetensors")
    again, twin, _ = build()
    assert again.resume(tmp_path)
    assert again.updates == 1
    assert torch.equal(twin.weight, weights[0])
    assert str(hurt.name) in capfd.readouterr().err

    second = damage(tmp_path / "step-0000000001", "*.safetensors")
    last, model, _ = build()
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=second.name):
        last.resume(tmp_path)
    assert torch.equal(model.weight, before)
    assert last.updates == 0


def test_something_else_at_the_path_is_an_error(tmp_path: Path) -> None:
    loop, _, _ = build()
    (tmp_path / "weights.pt").write_bytes(b"not a folder")
    with pytest.raises(CheckpointError, match=r"weights\.pt"):
        loop.resume(tmp_path / "weights.pt")
