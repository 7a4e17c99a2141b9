"""Signals that end a run: one save between two steps, the exit code of the signal, and a resume that shows no seam."""

import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

import hotloop


def train(folder, *, send=(), at=5, where="step", record=False, save=True, epochs=3, sink=None):
    """A run of 12 updates that sends itself signals in update `at`; appends each loss to the file `sink`."""
    import os
    import signal
    import time

    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loop = hotloop.Loop(device="cpu", record=record, seed=3, accumulation=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(32, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True)
    held_out = DataLoader(TensorDataset(x[:8]), 4)
    model, optimizer, loader, held_out = loop.prepare(model, optimizer, loader, held_out)

    waiting = list(send)

    def fire(here):
        if here == where and loop.updates == at:
            while waiting:
                os.kill(os.getpid(), getattr(signal, waiting.pop(0)))
                time.sleep(0.01)  # Python runs handlers between bytecodes

    if save:
        loop.resume(folder)
    if where == "before":
        at = loop.updates
        fire("before")
    losses = []
    for _ in loop.epochs(epochs):
        for a, b in loader:
            loss = F.mse_loss(model(a), b)
            fire("forward")
            loop.backward(loss)
            optimizer.step()
            fire("step")
            optimizer.zero_grad()
            losses.append(loss.item())
            if sink is not None:
                with open(sink, "a") as file:
                    file.write(loss.item().hex() + "\n")
        with torch.no_grad():
            for (a,) in held_out:
                model(a)
                if loop.updates == at:
                    fire("evaluation")
        if loop.updates == at:
            fire("epoch end")
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    assert handlers == [signal.SIG_DFL, signal.default_int_handler]
    at = loop.updates
    fire("after")
    loop.end_training()
    return losses


# Imports once and forks for each case; what follows is the child's own script, from its top to its natural end.
NURSERY = """
import json, os, sys
import hotloop, torch.utils.data, torch._dynamo  # the last one is imported by the first step of any optimizer
for case in json.load(open(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        os.chdir(case["home"])
        os.environ.update(case["environment"])
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(os.path.join(case["home"], "code"), "w") as file:
        file.write(str(code))
else:
    sys.exit()
train("checkpoint", sink="losses", record="run", **case["options"])
"""

SLURM = {"SLURM_JOB_ID": "17"}
CASES = {
    "term": {"send": ["SIGTERM"], "at": 5, "where": "step"},
    "slurm": {"send": ["SIGUSR1"], "at": 5, "where": "forward"},
    "ctrl-c": {"send": ["SIGINT"], "at": 5, "where": "forward"},
    "epoch end": {"send": ["SIGTERM"], "at": 4, "where": "epoch end"},
    "evaluation": {"send": ["SIGTERM"], "at": 8, "where": "evaluation"},
    "ctrl-c twice": {"send": ["SIGINT", "SIGINT"], "at": 3, "where": "forward"},
    "term twice": {"send": ["SIGTERM", "SIGTERM"], "at": 2},
    "no path": {"send": ["SIGTERM"], "at": 2, "save": False},
    "before": {"send": ["SIGTERM"], "where": "before"},
    "after": {"send": ["SIGTERM"], "where": "after"},
    "no slurm": {"send": ["SIGUSR1"], "at": 2},
}


class Ended:
    """A child that has ended."""

    def __init__(self, home):
        self.home = home
        self.checkpoint = home / "checkpoint"
        self.code = int((home / "code").read_text())
        self.out, self.err = (home / "out").read_text(), (home / "err").read_text()
        sink = home / "losses"
        self.losses = [float.fromhex(line) for line in sink.read_text().split()] if sink.exists() else []
        self.record = json.loads((home / "run" / "run.json").read_text())

    def saved(self, folder="checkpoint"):
        return sorted(path.name for path in (self.home / folder).glob("step-*"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What became of each case, by its name."""
    home = tmp_path_factory.mktemp("signals")
    cases = []
    for name, options in CASES.items():
        (home / name).mkdir()
        environment = SLURM if name == "slurm" else {}
        cases.append({"home": str(home / name), "environment": environment, "options": options})
    (home / "cases.json").write_text(json.dumps(cases))
    script = "from __future__ import annotations\n" + textwrap.dedent(inspect.getsource(train)) + NURSERY
    (home / "script.py").write_text(script)
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "HOTLOOP"))}
    done = subprocess.run(
        [sys.executable, home / "script.py", home / "cases.json"],
        env={**variables, "HOTLOOP_PROGRESS": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: Ended(home / name) for name in CASES}


@pytest.fixture(scope="module")
def unbroken():
    os.environ["HOTLOOP_PROGRESS"] = "0"
    return train("nowhere-at-all", save=False)


@pytest.mark.parametrize(
    ("case", "name", "code", "after"),
    [
        ("term", "SIGTERM", 143, 5),
        ("slurm", "SIGUSR1", 138, 6),
        ("ctrl-c", "SIGINT", -signal.SIGINT, 6),  # which a shell shows as 130
        ("epoch end", "SIGTERM", 143, 4),
        ("evaluation", "SIGTERM", 143, 8),
    ],
)
def test_one_save_and_an_exit(ended, unbroken, case, name, code, after):
    run = ended[case]
    assert run.code == code, run.err
    assert run.err.count(f"{name}: saving and stopping") == 1
    assert f"saved update {after} to checkpoint" in run.out
    assert run.saved() == [f"step-{after:010d}"]
    # two batches an update: none of a window that has begun is lost or done twice
    assert run.losses == unbroken[: 2 * after]
    assert run.record["status"] == "interrupted"
    assert run.losses + train(run.checkpoint) == unbroken


def test_a_second_ctrl_c_ends_at_once(ended, unbroken):
    run = ended["ctrl-c twice"]
    assert run.code == -signal.SIGINT, run.err
    assert "KeyboardInterrupt" in run.err
    assert run.saved() == []
    assert run.losses == unbroken[:6]


@pytest.mark.parametrize("where", ["forward", "step"])
def test_a_script_that_catches_the_second_ctrl_c_may_train_on(monkeypatch, where):
    monkeypatch.setenv("HOTLOOP_PROGRESS", "0")
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loop = hotloop.Loop(device="cpu", record=False)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = loop.prepare(model, optimizer, [torch.ones(3, 2)] * 4)

        def train(interrupted=-1):
            for _ in loop.epochs(2):
                for batch in loader:
                    for here in ("forward", "step"):
                        if here == where and loop.updates == interrupted:
                            signal.raise_signal(signal.SIGINT)
                            signal.raise_signal(signal.SIGINT)
                        if here == "forward":
                            loop.backward(model(batch).mean())
                    loop.update(optimizer)

        with pytest.raises(KeyboardInterrupt):
            train(2)
        assert loop.updates == 2
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        train()
        # the epoch that was broken off is done again, whole
        assert loop.updates == 2 + 8
        loop.end_training()
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_same_signal_again_changes_nothing(ended):
    run = ended["term twice"]
    assert run.code == 143, run.err
    assert run.err.count("saving and stopping") == 1
    assert run.saved() == ["step-0000000002"]


def test_without_a_path_the_save_goes_to_the_runs_folder(ended):
    run = ended["no path"]
    assert run.code == 143, run.err
    assert str(run.home / "run" / "checkpoint") in run.out
    assert run.saved("run/checkpoint") == ["step-0000000002"]


def test_loops_over_a_loader_alone_leave_no_handler_behind(tmp_path, monkeypatch):
    import gc
    import weakref

    import hotloop

    monkeypatch.setenv("HOTLOOP_PROGRESS", "0")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def pass_over():
        loop = hotloop.Loop(device="cpu", record=False)
        loader = loop.prepare([1, 2, 3])
        for _ in loader:
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        return weakref.ref(loop)

    first = pass_over()
    second = pass_over()
    gc.collect()
    assert first() is None
    assert second() is None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(("case", "number"), [("before", 15), ("after", 15), ("no slurm", signal.SIGUSR1)])
def test_what_is_not_for_a_run_is_not_caught(ended, case, number):
    """Before and after training signals do what they always do, and SIGUSR1 without Slurm too."""
    run = ended[case]
    assert run.code == -number, run.err
    assert "saving and stopping" not in run.err
    assert run.saved() == []
