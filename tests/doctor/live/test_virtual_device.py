"""The virtual GPU: it notes the lines that a real one waits in, and computes what the CPU computes."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest

from hotloop.doctor.live import run_virtually

pytest.importorskip("torch._C._acc", reason="this torch has no private-use device in Python")

WAITS = Path(__file__).parent / "waits.py"


def test_the_lines_are_those_of_a_real_gpu() -> None:
    virtual = run_virtually(str(WAITS), [])
    assert (virtual.status, virtual.on_device, virtual.broke) == (0, True, "")
    lines = WAITS.read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if line.endswith("# waits")]
    found = sorted({stall.line for stall in virtual.stalls if stall.line > 14})
    assert [lines[n - 1] for n in found if n not in marked] == []
    assert [lines[n - 1] for n in marked if n not in found] == []


TRAINING = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model.to(device)
scaler = torch.amp.GradScaler(device, init_scale=1.0, growth_interval=10**6)
recurrent = torch.nn.LSTM(8, 8, batch_first=True).to(device)
data = TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,)))
compiled = torch.compile(model) if device == "cuda" else model
for x, y in DataLoader(data, batch_size=8, pin_memory=device == "cuda"):
    x = x.to(device, non_blocking=True)
    y = y.to(device)  # 1
    with torch.autocast(device, dtype=torch.bfloat16, enabled=False):
        loss = F.cross_entropy(compiled(recurrent(x[:, None])[0][:, 0]), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # 2
    scaler.update()
    optimizer.zero_grad()
    if torch.isnan(loss):  # 3
        raise SystemExit(1)
torch.save(model.state_dict(), "model.pt")
model.load_state_dict(torch.load("model.pt", map_location=device))
print(device, x.device, f"{loss.item():.5f}", f"{sum(p.sum().item() for p in model.parameters()):.5f}")
"""


def test_a_training_script_runs_as_on_the_cpu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    virtual = run_virtually(str(script), [])
    there = capfd.readouterr().out
    assert virtual.status == 0
    assert virtual.on_device
    assert virtual.steps == 4
    with warnings.catch_warnings():
        # of a loss scaler and of compiling, which have nothing to do here
        warnings.simplefilter("ignore")
        runpy.run_path(str(script))
    plain = capfd.readouterr().out
    assert there.split()[:2] == ["cuda", "cuda:0"]
    assert there.split()[2:] == plain.split()[2:]
    lines = TRAINING.splitlines()
    marks = {lines[stall.line - 1].rpartition("# ")[2]: stall for stall in virtual.stalls if stall.recurs}
    assert sorted(marks) == ["1", "2", "3"]
    assert marks["1"].op == "to the device"
    assert marks["3"].op == "__bool__"


def test_what_the_device_cannot_run_is_run_on_the_cpu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "if torch.cuda.is_available():\n"
        "    torch.cuda.CUDAGraph()\n"
        "for _ in range(3):\n"
        "    model(torch.ones(1, 2)).sum().item()\n"
        "raise SystemExit(4)\n"
    )
    virtual = run_virtually(str(script), [])
    assert virtual.status == 4
    assert not virtual.on_device
    assert "train.py:4" in virtual.broke
    assert [stall.line for stall in virtual.stalls] == [6]
    assert "Traceback" not in capfd.readouterr().err


def test_batches_of_several_shapes_are_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for x in torch.randn(36, 4).split(8):\n"
        "    x, y = x.cuda(), x[:, :1].cuda()\n"
        "    z = torch.ones(8, 4).cuda() + torch.ones(1).cuda()\n"
        "    (model(x) - y).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    virtual = run_virtually(str(script), [])
    assert (virtual.status, virtual.steps) == (0, 5)
    (changing,) = [stopper for stopper in virtual.stoppers if "shapes" in stopper.why]
    assert changing.line == 5
    assert "[8, 4], [4, 4]" in changing.why


def test_a_loop_waits_nowhere_but_where_its_script_does(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, hotloop\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "torch.set_num_threads(1)\n"
        "loop = hotloop.Loop(seed=0, record=False)\n"
        "x = torch.randn(64, 4)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "model, optimizer, loader = loop.prepare(\n"
        "    model, optimizer, DataLoader(TensorDataset(x, x[:, :1]), batch_size=8)\n"
        ")\n"
        "for a, b in loader:\n"
        "    loss = (model(a) - b).square().mean()\n"
        "    loop.backward(loss)\n"
        "    loop.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    loop.log(loss=loss)\n"
        "    if loss > 100:\n"
        "        break\n"
        f"loop.save_state({str(tmp_path / 'checkpoint')!r})\n"
        "loop.end_training()\n"
    )
    virtual = run_virtually(str(script), [])
    assert (virtual.status, virtual.on_device, virtual.broke) == (0, True, "")
    assert [stall.line for stall in virtual.stalls if stall.recurs] == [18]
    assert virtual.steps == 8
