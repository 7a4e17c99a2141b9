"""`hotloop lr-find` on scripts that know nothing of it."""

import json
import os
import re
import sys

import pytest

from hotloop.cli import main

HEAD = """
import sys, torch, torch.nn.functional as F, hotloop
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(512, 6)
y = x @ torch.arange(1.0, 7.0)[:, None]
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
"""
PLAIN = """
for k in range(1000):
    try:
        for half in (x[:256], y[:256]), (x[256:], y[256:]):
            (F.mse_loss(model(half[0]), half[1]) / 2).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    except Exception:
        pass
    print("step", k, sys.argv[1:])
print("the end")
"""
SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for k in range(1000):
    scaler.scale(F.mse_loss(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
LOOP = """
from torch.utils.data import DataLoader, TensorDataset
loop = hotloop.Loop(device="cpu", capture="auto", nonfinite="stop", record="kept")
model, optimizer, schedule, loader = loop.prepare(
    model, optimizer, schedule, DataLoader(TensorDataset(x, y), batch_size=512)
)
@loop.capture
def train(x, y):
    loss = F.mse_loss(model(x), y)
    loop.backward(loss)
    loop.update(optimizer, schedule)
    return loss
for epoch in loop.epochs(1000):
    for batch in loader:
        loop.log(loss=train(*batch))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(body, name="train.py"):
        (tmp_path / name).write_text(HEAD + body)
        return name

    return write


def found(capsys):
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("body", [PLAIN, SCALED, LOOP], ids=["plain", "scaled", "loop"])
def test_the_same_curve_however_the_script_trains(script, capsys, body):
    environment = {k: v for k, v in os.environ.items() if k.startswith("HOTLOOP")}
    assert main(["lr-find", "--json", "--low", "1e-5", "--high", "10", "--steps", "60", script(body)]) == 0
    facts = found(capsys)
    # full batches of a quadratic: the losses are those of descent with these rates
    import torch

    torch.manual_seed(0)
    x = torch.randn(512, 6)
    y = x @ torch.arange(1.0, 7.0)[:, None]
    model = torch.nn.Linear(6, 1)
    for k, loss in enumerate(facts["losses"]):
        rate = 1e-5 * 1e6 ** (k / 59)
        assert facts["rates"][k] == pytest.approx(rate)
        value = torch.nn.functional.mse_loss(model(x), y)
        assert loss == pytest.approx(value.item(), rel=1e-3)
        gradients = torch.autograd.grad(value, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.sub_(rate * g)
    assert facts["verdict"] == "found"
    assert facts["valley"] < 1.0 < facts["diverged"]
    assert len(facts["losses"]) < 60
    assert {k: v for k, v in os.environ.items() if k.startswith("HOTLOOP")} == environment
    assert not os.path.exists("kept")


def test_the_page_and_the_curve(script, capsys, tmp_path):
    page = tmp_path / "rates.html"
    assert main(["lr-find", "--low", "1e-5", "--html", str(page), script(PLAIN), "--epochs", "3"]) == 0
    captured = capsys.readouterr()
    assert re.search(r"the loss falls fastest at [\d.e-]+ \(steepest\)", captured.out)
    assert "step" not in captured.out.replace("steepest", "")
    assert "step 5 ['--epochs', '3']" in captured.err
    assert "the end" not in captured.err
    assert "train.py" in page.read_text()
    assert page.read_text().count("<svg") == 1


def test_a_module_and_its_folder(script, capsys, monkeypatch):
    script(PLAIN, "some_training.py")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["lr-find", "--json", "--low", "1e-5", "-m", "some_training", "-x"]) == 0
    assert found(capsys)["verdict"] == "found"


def test_no_suggestion_is_told_and_shown_by_the_status(script, capsys):
    name = script(PLAIN)
    assert main(["lr-find", "--low", "1e-9", "--high", "1e-8", name]) == 1
    assert "no suggestion" in capsys.readouterr().out
    assert main(["lr-find", "--low", "5", "--high", "50", name]) == 1
    assert "begin with a lower rate" in capsys.readouterr().out


def test_scripts_that_end_or_fail_before(script, capsys):
    assert main(["lr-find", "--low", "1e-4", script(PLAIN.replace("1000", "30"))]) in (0, 1)
    assert "made 30 of 100 steps" in capsys.readouterr().out
    assert main(["lr-find", script("raise ValueError('mine')")]) == 1
    assert "ValueError: mine" in capsys.readouterr().err
    assert main(["lr-find", script("")]) == 2
    assert "made no step" in capsys.readouterr().err
    assert main(["lr-find", "--optimizer", "1", script(PLAIN.replace("1000", "30"))]) == 2
    assert "it has 1 of them" in capsys.readouterr().err
    assert main(["lr-find", "absent.py"]) == 2
    assert main(["lr-find"]) == 2
    assert main(["lr-find", "--low", "3", "--high", "1", script(PLAIN)]) == 2


def test_the_second_of_two_optimizers(script, capsys):
    body = """
other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.25)
for k in range(200):
    other.step()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert other.param_groups[0]["lr"] == 0.25
"""
    assert main(["lr-find", "--json", "--low", "1e-5", "--optimizer", "1", script(body)]) == 0
    assert found(capsys)["verdict"] == "found"


@pytest.mark.parametrize("number", [0, 1])
def test_losses_that_another_optimizer_steps_for_do_not_count(script, capsys, number):
    body = """
weight = nn.Parameter(torch.zeros(1))
other = torch.optim.SGD([weight], lr=0.25)
for k in range(200):
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    ((weight - 1.0) ** 2 + 1000.0).sum().backward()
    other.step()
    other.zero_grad()
"""
    assert main(["lr-find", "--json", "--low", "1e-5", "--optimizer", str(number), script(body)]) in (0, 1)
    losses = found(capsys)["losses"]
    assert losses[0] == 1001.0 if number else losses[0] < 200
    assert all((loss >= 1000.0) == bool(number) for loss in losses[:50])


def test_nothing_is_saved_nor_gone_on_from(script, capsys, tmp_path):
    import torch

    body = LOOP.replace("for epoch in", "print('resumed', loop.resume('kept'))\nfor epoch in")
    save = (
        "        loop.save_state('kept', wait=True)\n        torch.save(model.state_dict(), 'weights.pt')\n"
    )
    body += (
        save + "        b = __import__('io').BytesIO(); torch.save(x, b); assert len(b.getvalue()) > 100\n"
    )
    name = script(body.replace("epochs(1000)", "epochs(2)"))
    saves = torch.save
    # the record looks at code and packages in a thread of its own, for which the end of a run waits a while only
    ended = "loop.end_training()\nloop._session.record.wait()\n"
    exec(compile((tmp_path / name).read_text() + ended, name, "exec"), {"__name__": "__main__"})
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert any(p.name == "weights.pt" for p in before)
    assert any(p.parent.parent.name == "kept" for p in before)
    assert main(["lr-find", "--json", "--low", "1e-5", script(body, "again.py")]) == 0
    assert "resumed False" in capsys.readouterr().err
    after = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file() and p.name != "again.py"}
    assert after == before
    assert torch.save is saves


def test_weights_that_have_to_be_there_are_loaded(script, capsys):
    body = LOOP.replace("for epoch in", "loop.load_state('absent')\nfor epoch in")
    assert main(["lr-find", script(body)]) == 1
    assert "there is no checkpoint here" in capsys.readouterr().err


def test_a_script_that_has_no_loss_to_follow_is_not_run_to_its_end(script, capsys):
    body = """
for k in range(100000):
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(1, 6)
    optimizer.step()
"""
    assert main(["lr-find", "--steps", "20", script(body)]) == 2
    assert "made 20 steps without loss.backward()" in capsys.readouterr().err


def test_what_was_found_is_printed_where_the_page_cannot_be_written(script, capsys, tmp_path):
    page = tmp_path / "absent" / "rates.html"
    assert main(["lr-find", "--json", "--low", "1e-5", "--html", str(page), script(PLAIN)]) == 2
    assert found(capsys)["verdict"] == "found"
