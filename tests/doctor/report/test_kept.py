from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hotloop.cli.doctor import VERB
from hotloop.doctor import TraceError
from hotloop.doctor.report import load_report
from hotloop.errors import HotloopError

SCRIPT = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import hotloop

torch.set_num_threads(1)
loop = hotloop.Loop(seed=0, device="cpu", record="runs/WHICH")
x = torch.randn(30 * 4, 8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = loop.prepare(model, optimizer, DataLoader(TensorDataset(x, x[:, :1]), batch_size=4))
for a, b in loader:
    loss = F.mse_loss(model(a), b)
    loop.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
loop.end_training()
"""


def test_a_recorded_run_keeps_its_report_and_is_compared_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(SCRIPT.replace("WHICH", name))
    command = [sys.executable, "-m", "hotloop", "doctor"]
    watched = subprocess.run(
        [*command, "first.py"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert watched.returncode == 0, watched.stderr
    facts = json.loads((tmp_path / "runs" / "first" / "doctor.json").read_text())
    assert facts["verdict"].startswith("No device took part")
    assert facts["steps"] >= 1
    # by its name, and by its folder
    monkeypatch.chdir(tmp_path)
    assert load_report("first") == facts
    compared = subprocess.run(
        [*command, "--against", "runs/first", "second.py"], capture_output=True, text=True, check=False
    )
    assert compared.returncode == 0, compared.stderr
    assert "a step takes" in compared.stderr
    assert "A  second.py" in compared.stderr
    assert "B  first.py" in compared.stderr


def test_a_report_that_json_printed_is_taken_and_a_trace_is_not(
    tmp_path: Path, machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    m = machine()
    for _ in range(4):
        with m.step():
            m.launch(50)
    trace = m.write(tmp_path / "trace.json")
    monkeypatch.chdir(tmp_path)
    assert load_report(str(trace)) is None
    assert load_report("none.json") is None
    assert VERB.run(["--json", "trace.json"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "report.json").write_text(printed)
    assert load_report("report.json") == json.loads(printed)
    assert VERB.run(["report.json", "--against", "trace.json"]) == 0
    assert "+0.0%" in capsys.readouterr().out
    with pytest.raises(HotloopError, match="a report without its trace"):
        VERB.run(["report.json", "--html", "page.html"])


def test_a_run_that_was_not_watched_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "plain"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": "finished", "script": "train.py"}))
    with pytest.raises(TraceError, match=r"`hotloop doctor train\.py` leaves one"):
        load_report("plain")
