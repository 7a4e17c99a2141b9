"""How a run ends: everything logged is written, and the record says how, whichever way the script is left."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import hotloop
from hotloop.errors import CheckpointError


def build(record, **options):
    loop = hotloop.Loop(device="cpu", record=record, **options)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (loop, *loop.prepare(model, optimizer))


def train(loop, model, optimizer, n=3, bad=None):
    for i in loop.steps(n):
        loss = model(torch.ones(4, 2)).square().mean() * (float("nan") if i == bad else 1.0)
        loop.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        loop.log({"loss": loss}, rate=0.1)
        loop.log(step=100 + i, only=torch.tensor([[2.5]]))


def record_of(folder):
    return json.loads((folder / "run.json").read_text())


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_with_block_flushes_everything(tmp_path):
    folder = tmp_path / "run"
    loop, model, optimizer = build(folder)
    with loop as same:
        assert same is loop
        train(loop, model, optimizer)
        loop.save_state(tmp_path / "checkpoint")
    assert record_of(folder)["status"] == "finished"
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [1, 100, 2, 101, 3, 102]
    assert rows[0]["rate"] == 0.1
    assert rows[1]["only"] == 2.5
    again, _, _ = build(False)
    assert again.resume(tmp_path / "checkpoint")


@pytest.mark.parametrize("wait", [True, False])
def test_rows_of_what_a_checkpoint_holds_are_stored_before_it(tmp_path, monkeypatch, wait):
    # the thread that stores rows never comes to it
    monkeypatch.setattr("hotloop.metrics.log._PERIOD_S", 1e9)
    folder = tmp_path / "run"
    loop, model, optimizer = build(folder)
    train(loop, model, optimizer)
    loop.save_state(tmp_path / "checkpoint", wait=wait)
    loop._saver.wait()
    assert [row["step"] for row in rows_of(folder)] == [1, 100, 2, 101, 3, 102]
    loop.end_training()


@pytest.mark.parametrize(
    ("raised", "status"),
    [(KeyError("x"), "failed"), (KeyboardInterrupt(), "interrupted"), (SystemExit(3), "interrupted")],
)
def test_a_with_block_that_is_left_by_an_error(tmp_path, raised, status):
    loop, model, optimizer = build(tmp_path)
    with pytest.raises(type(raised)), loop:
        train(loop, model, optimizer)
        raise raised
    record = record_of(tmp_path)
    assert record["status"] == status
    assert type(raised).__name__ in record["error"]
    assert len(rows_of(tmp_path)) == 6


def test_a_fault_stops_the_run(tmp_path):
    loop, model, optimizer = build(tmp_path)
    with pytest.raises(hotloop.NonFiniteError), loop:
        train(loop, model, optimizer, bad=1)
    assert record_of(tmp_path)["status"] == "stopped"


def test_ending_twice_and_logging_afterwards_do_no_harm(tmp_path):
    loop, model, optimizer = build(tmp_path)
    train(loop, model, optimizer)
    loop.end_training()
    loop.end_training()
    loop.log(late=1.0)
    assert len(rows_of(tmp_path)) == 6
    assert record_of(tmp_path)["status"] == "finished"


def test_a_save_that_failed_is_raised_at_the_end(tmp_path, monkeypatch):
    from hotloop.loop.checkpoint import writer

    loop, model, optimizer = build(tmp_path / "run")
    train(loop, model, optimizer)

    def fail(*args):
        raise OSError("no more room")

    monkeypatch.setattr(writer, "write", fail)
    loop.save_state(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="no more room"):
        loop.end_training()
    # and what was logged is written all the same
    assert len(rows_of(tmp_path / "run")) == 6


def test_faults_of_a_device_are_found_before_a_save(make_loop, tmp_path):
    """What the host has not heard of yet must not become the newest checkpoint."""
    loop = make_loop("resident")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model, optimizer = loop.prepare(model, optimizer)
    loop.backward(model(torch.ones(4, 2)).mean() * float("nan"))
    optimizer.step()
    with pytest.raises(hotloop.NonFiniteError):
        loop.save_state(tmp_path, wait=True)
    assert not list(tmp_path.glob("step-*"))


def test_what_cannot_be_stopped_on_a_device_is_said_once(make_loop, capsys):
    loop = make_loop("resident", nonfinite="stop")
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    loop.prepare(models, [torch.optim.NAdam(m.parameters()) for m in models])
    said = capsys.readouterr().err
    assert said.count("NAdam cannot be stopped on the device: weights may be up to 8 updates past") == 1


# Imports once and forks for each case; what follows is the child's own script, from its top to its natural end.
SCRIPT = """
import json, os, sys
import hotloop, torch, torch._dynamo
torch.set_num_threads(1)
for name in ("nothing", "error", "fault", "exit", "function"):
    pid = os.fork()
    if pid == 0:
        break
    os.waitpid(pid, 0)
else:
    sys.exit()
sys.stderr = open(os.devnull, "w")

def run():
    loop = hotloop.Loop(device="cpu", record=name)
    model = torch.nn.Linear(2, 1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for i in loop.steps(3):
        loss = model(torch.ones(4, 2)).mean() * (float("nan") if name == "fault" and i == 2 else 1.0)
        loop.backward(loss)
        optimizer.step()
        loop.log(loss=loss)
    return loop

if name == "function":
    run()
    import gc, time
    for _ in range(300):  # the thread that takes logged values away lingers for two seconds
        gc.collect()
        status = json.load(open("function/run.json"))["status"]
        if status != "running":
            break
        time.sleep(0.1)
    with open("status", "w") as file:
        file.write(status)
else:
    loop = run()
if name == "error":
    raise ValueError("broken")
if name == "exit":
    sys.exit(0)
"""


def test_scripts_that_never_say_they_are_done(tmp_path):
    variables = {k: v for k, v in os.environ.items() if not k.startswith("HOTLOOP")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**variables, "HOTLOOP_PROGRESS": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    status = {
        path.parent.name: json.loads(path.read_text())["status"] for path in tmp_path.glob("*/run.json")
    }
    assert status == {
        "nothing": "finished",
        "error": "failed",
        "fault": "stopped",
        "exit": "finished",
        "function": "finished",
    }
    # a loop that was let go of is over then, not at the end of the program
    assert (tmp_path / "status").read_text() == "finished"
    rows = {name: len(rows_of(tmp_path / name)) for name in status}
    assert rows == {"nothing": 3, "error": 3, "fault": 2, "exit": 3, "function": 3}
