"""Notebooks, in a real kernel: progress shows, cells run again make no second run, an interrupt saves and lives on."""

import json
import os
import subprocess
import sys

import pytest

BUILD = """
import os, signal, torch
import torch.nn.functional as F
import hotloop
loop = hotloop.Loop(device="cpu", seed=0, config={"rate": RATE})
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
data = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(10)]
model, optimizer, loader = loop.prepare(model, optimizer, data)
"""

STEP = """
@loop.capture
def step(x, y):
    loss = F.mse_loss(model(x), y)
    loop.backward(loss)
    loop.update(optimizer)
    return loss
"""

TRAIN = """
for epoch in loop.epochs(3):
    for x, y in loader:
        if loop.updates == INTERRUPT:
            INTERRUPT = -1
            os.kill(os.getpid(), signal.SIGINT)
        loop.log(loss=step(x, y))
print("trained", loop.updates)
"""

TWO = """
pair = [hotloop.Loop(device="cpu", config={"number": i}) for i in range(2)]
"""

# In a process of its own: nbclient, zmq and their event loops leave warnings that are none of ours.
DRIVER = """
import json, sys, warnings
warnings.simplefilter("ignore")
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

cells = {name: nbformat.v4.new_code_cell(code) for name, code in json.load(open("cells.json")).items()}
order = list(cells)
notebook = nbformat.v4.new_notebook(cells=list(cells.values()))
client = NotebookClient(notebook, timeout=200, startup_timeout=200, kernel_name="python3")
shown = []
with client.setup_kernel():
    for name in json.load(open("sequence.json")):
        code, _, after = name.partition(" after ")
        if after:
            client.execute_cell(nbformat.v4.new_code_cell(after), 0)
        error = ""
        try:
            client.execute_cell(cells[code], order.index(code))
        except CellExecutionError as failure:
            error = failure.ename
        outputs = [dict(o) for o in cells[code].outputs]
        shown.append({"cell": code, "error": error, "outputs": outputs})
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """What each execution of a cell showed, and the folder in which all of it happened."""
    pytest.importorskip("nbclient")
    home = tmp_path_factory.mktemp("notebook")
    cells = {"build": BUILD, "step": STEP, "train": TRAIN, "two": TWO}
    sequence = [
        "build after RATE, INTERRUPT = 0.1, 13",
        "step",
        "train",  # interrupted in update 13
        "train",  # goes on
        "train",  # nothing is left
        "build after RATE, INTERRUPT = 0.05, -1",
        "step",
        "train",
        "two",
        "two",
    ]
    (home / "cells.json").write_text(json.dumps(cells))
    (home / "sequence.json").write_text(json.dumps(sequence))
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("HOTLOOP", "SLURM", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=home,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), home


def text_of(execution):
    return "".join(o.get("text", "") for o in execution["outputs"])


def progress_of(execution):
    return [o["data"]["text/plain"] for o in execution["outputs"] if o["output_type"] == "display_data"]


def test_progress_shows_and_reaches_the_end(session):
    shown, _ = session
    last = [e for e in shown if e["cell"] == "train"][-1]
    assert last["error"] == ""
    assert "trained 30" in text_of(last)
    (line,) = progress_of(last)
    assert line.startswith("30/30 100%") or "30/30" in line
    assert "loss" in line


def test_an_interrupt_saves_and_the_next_run_of_the_cell_goes_on(session):
    shown, _ = session
    interrupted, further, idle, _ = [e for e in shown if e["cell"] == "train"]
    assert interrupted["error"] == "KeyboardInterrupt"
    assert "SIGINT: saving and stopping" in text_of(interrupted)
    assert "saved update 14" in text_of(interrupted)
    assert further["error"] == ""
    assert "trained 30" in text_of(further)
    assert "epochs(3): 3 epochs are done already" in text_of(idle)
    assert "trained 30" in text_of(idle)


def test_cells_run_again_make_no_second_run(session):
    _, home = session
    runs = [json.loads(path.read_text()) for path in sorted((home / "runs").glob("*/run.json"))]
    # one of the first cell, and one for each of the two loops of the last
    assert len(runs) == 3
    trained = next(run for run in runs if "rate" in run["config"])
    assert trained["config"]["rate"] == 0.05
    assert len(trained["resumed"]) == 1
    assert trained["status"] == "finished"
    assert sorted(run["config"]["number"] for run in runs if "number" in run["config"]) == [0, 1]


def test_what_was_logged_after_the_interrupt_is_kept(session):
    _, home = session
    (metrics,) = [
        path for path in (home / "runs").glob("*/metrics.jsonl") if path.read_text().count("loss") > 1
    ]
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    # thirty steps of the first stretch, whole in spite of the interrupt, and thirty of the second
    assert steps == [*range(1, 31), *range(1, 31)]


def test_steps_defined_in_cells_work(session):
    shown, _ = session
    assert [e["error"] for e in shown if e["cell"] == "step"] == ["", ""]
