from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from hotloop.doctor.live import Stall
from hotloop.doctor.live.virtual import VirtualDevice


def test_only_what_comes_from_parameters_would_wait() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(8, 4), torch.tensor([0, 1] * 4)
    with VirtualDevice() as device:
        for _ in range(3):
            int(y[0])  # data of the host
            x[x > 0].sum().item()
            out = model(x)
            loss = torch.nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item()  # 1
            if loss > 100:  # 2
                raise AssertionError
            out[out > 0]  # 3
            out[out > 0] = 0.0  # a fill: no wait
            torch.nonzero(out)  # 4
            f"{loss:.2f}"  # 5
            loss.detach().to("cpu")  # 6
    stalls = device.stalls()
    lines = Path(__file__).read_text().splitlines()
    marks = [lines[stall.line - 1].rpartition("# ")[2] for stall in sorted(stalls, key=lambda s: s.line)]
    assert marks == ["1", "2", "3", "4", "5", "6"]
    assert {(stall.count, stall.steps) for stall in stalls} == {(3, 3)}
    by_line = {lines[stall.line - 1].rpartition("# ")[2]: stall for stall in stalls}
    assert by_line["2"].op == "__bool__"
    assert by_line["3"].why == "indexing with a boolean mask"
    assert "loss.item()" in str(by_line["1"])
    assert "1 a step" in str(by_line["1"])


def test_how_often_is_said_by_the_step_where_there_are_steps() -> None:
    found = [
        str(Stall("train.py", 7, "x.item()", "item", count, steps))
        for count, steps in ((1, 0), (3, 0), (4, 2))
    ]
    assert [text.split(", ")[1].split(":")[0] for text in found] == ["once", "3 times", "2 a step"]


def test_values_are_not_touched() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    x = torch.randn(8, 4)
    plain = model(x).sum().item()
    with VirtualDevice():
        assert model(x).sum().item() == plain


SCRIPT = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0.0
for _ in range(4):
    loss = model(torch.ones(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    total += loss.item()
print("done")
"""


def test_the_command_lists_the_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "hotloop", "doctor", "--virtual-gpu", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert "train.py:10  item, 1 a step: a value is read" in done.stderr
    assert "total += loss.item()" in done.stderr
    told = subprocess.run(
        [*command[:-1], "--json", "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    facts = json.loads(told.stderr[told.stderr.index("{\n") :])
    assert [stall["line"] for stall in facts["stalls"]] == [10]
    assert any("SGD" in stopper["why"] for stopper in facts["stoppers"])
