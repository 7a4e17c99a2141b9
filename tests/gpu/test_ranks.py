"""Two processes on two GPUs, through NCCL: they train as one does, and agree on what is not finite."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SCRIPT = """
import json, os, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hotloop

kind, folder, epochs = sys.argv[1:4]
captured, kind = kind.startswith("captured"), kind.removeprefix("captured ")
world = int(os.environ.get("WORLD_SIZE", "1"))
settings = {
    "nonfinite": "skip" if kind in ("skip", "uneven") else "stop",
    "precision": "bf16" if kind == "bf16" else "fp32",
    "accumulation": 2 if kind == "accumulate" else 1,
}
loop = hotloop.Loop(record=False, parallel=hotloop.Plan(capture=captured), **settings)
torch.manual_seed(0)
x = torch.randn(100 if kind == "uneven" else 96, 16)
data = TensorDataset(x, x[:, :1] * 2, torch.arange(len(x)))
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=16 // world)
model, optimizer, loader = loop.prepare(model, optimizer, loader)
scheduler = loop.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40))
rows = []
error = None

def train(x, y):
    loss = F.mse_loss(model(x), y)
    loop.backward(loss)
    return loss, loop.update(optimizer, scheduler, max_norm=0.5)

if captured:
    train = loop.capture(train, mode="graph")
try:
    for epoch in loop.epochs(int(epochs)):
        for x, y, index in loader:
            if captured:
                loss, norm = train(x, y)
                loop.mean("loss", loss, weight=loader.batch_samples)
                rows.append(norm.item())
                continue
            loss = F.mse_loss(model(x), y)
            if kind in ("skip", "stop") and loop.updates == 5 and 80 in index.tolist():
                loss = loss * float("nan")
            loop.backward(loss)
            norm = loop.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
            loop.mean("loss", loss, weight=loader.batch_samples)
            rows.append(norm.item())
        loop.mean("loss")
except hotloop.NonFiniteError as caught:
    error = caught.step
weights = [p.flatten().tolist() for p in model.parameters()]
out = {
    "norms": rows,
    "weights": sum(weights, []),
    "skipped": loop.skipped if error is None else None,
    "error": error,
    "lr": scheduler.get_last_lr(),
    "replays": train.replays if captured else 0,
    "reason": train.reason if captured else None,
}
with open(os.path.join(folder, f"{world}-{loop.processes.rank}.json"), "w") as file:
    json.dump(out, file)
"""


def run(tmp_path, kind, world, epochs=3):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["-m", "hotloop", "launch", "-n", str(world), str(script), kind, str(tmp_path), str(epochs)]
    env = {**os.environ, "HOTLOOP_PROGRESS": "0"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads((tmp_path / f"{world}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("kind", ["plain", "accumulate", "uneven", "bf16", "skip", "stop"])
def test_two_ranks_train_as_one(tmp_path, kind):
    (one,) = run(tmp_path, kind, 1)
    two = run(tmp_path, kind, 2)
    assert two[0]["weights"] == two[1]["weights"]
    tolerance = 2e-2 if kind == "bf16" else 1e-4
    assert two[0]["weights"] == pytest.approx(one["weights"], rel=tolerance, abs=tolerance)
    assert two[0]["lr"] == two[1]["lr"] == one["lr"]
    assert two[0]["error"] == two[1]["error"] == one["error"] == (5 if kind == "stop" else None)
    assert two[0]["skipped"] == one["skipped"]
    if kind == "skip":
        assert one["skipped"] == 1
    if kind in ("plain", "uneven"):
        assert two[0]["norms"] == pytest.approx(one["norms"], rel=1e-3)


@pytest.mark.parametrize("kind", ["plain", "accumulate", "uneven", "bf16"])
def test_captured_steps_of_two_ranks_train_as_eager_ones(tmp_path, kind):
    eager, captured = run(tmp_path, kind, 2, epochs=8), run(tmp_path, f"captured {kind}", 2, epochs=8)
    for plain, recorded in zip(eager, captured, strict=True):
        assert recorded["reason"] is None
        assert recorded["replays"] > 4
        assert recorded["lr"] == plain["lr"]
        assert recorded["weights"] == pytest.approx(plain["weights"], rel=1e-3, abs=1e-4)
        assert recorded["norms"] == pytest.approx(plain["norms"], rel=1e-2)
    assert captured[0]["weights"] == captured[1]["weights"]
