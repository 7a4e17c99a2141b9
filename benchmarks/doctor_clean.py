"""The doctor on loops that are fine: findings (there should be none), and what watching costs outside its window.

Five well-kept training scripts run watched: three where there is a GPU, two where there is none. And the character
GPT's step is timed without a watch, under one that has not begun, and after one that is over.

    python -m benchmarks.doctor_clean [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.harness import Figure, arguments, report
from benchmarks.models import CharGPT
from hotloop.doctor.live import Watch, run_watched
from hotloop.doctor.report import gather_facts

_HEAD = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from benchmarks.models import CharGPT
torch.manual_seed(0)
"""

# name -> script; those that name "cuda" need one
LOOPS = {
    "GPU, wide network": """
model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(6)]).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
for step in range(50):
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "GPU, captured by a loop": """
import hotloop
loop = hotloop.Loop(precision="bf16", capture="graph", record=False)
layers = [nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(6)]
model = nn.Sequential(nn.Linear(256, 4096), *layers, nn.Linear(4096, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
data = TensorDataset(torch.randn(60 * 1024, 256))
model, optimizer, loader = loop.prepare(model, optimizer, DataLoader(data, batch_size=1024, num_workers=8))
@loop.capture
def train(x):
    loss = model(x).square().mean()
    loop.backward(loss)
    loop.update(optimizer)
    return loss
for (x,) in loader:
    loop.log(loss=train(x))
loop.end_training()
""",
    "GPU, convolutions with a loader": """
layers = [nn.Conv2d(64, 256, 3, padding=1)]
for _ in range(8):
    layers += [nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True)]
model = nn.Sequential(*layers).to("cuda", torch.bfloat16, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
data = TensorDataset(torch.randn(128 * 50, 64, 16, 16).bfloat16())
loader = DataLoader(data, batch_size=128, num_workers=4, pin_memory=True, persistent_workers=True)
for (x,) in loader:
    x = x.to("cuda", non_blocking=True).to(memory_format=torch.channels_last)
    x = F.interpolate(x, scale_factor=2)
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "CPU, small network": """
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(50 * 32, 64)
for batch, target in DataLoader(TensorDataset(x, x[:, :1] * 2), batch_size=32, shuffle=True):
    loss = F.mse_loss(model(batch), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "CPU, small character GPT": """
torch.set_num_threads(1)
model = CharGPT(width=48, heads=2, layers=2, context=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for step in range(50):
    batch = torch.randint(0, 65, (8, 33))
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}


def findings_of(name: str, text: str, folder: Path) -> list[str]:
    """Ids of what the doctor finds in a script; prints its evidence."""
    script = folder / "train.py"
    script.write_text(_HEAD + text)
    watched = run_watched(str(script), [], skip=20)
    if watched.status or watched.trace is None:
        raise RuntimeError(f"{name}: status {watched.status}, {watched.steps} steps")
    facts = gather_facts(watched.trace)
    print(f"{name}: {facts['verdict']} {watched.trace.timeline.pace} {facts['window_note']}", flush=True)
    for finding in facts["findings"]:
        print("   ", json.dumps(finding)[:1200], flush=True)
    return [finding["rule"] for finding in facts["findings"]]


def step_of(device: str) -> Callable[[], None]:
    """A step of the character GPT, whose batch already lies on the device."""
    model = CharGPT().to(device) if device == "cuda" else CharGPT(width=48, heads=2, layers=2, context=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(
        0, 65, (64 if device == "cuda" else 8, model.positions.num_embeddings + 1), device=device
    )

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def overhead(device: str, *, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a step without a watch and under one that waits, in turn; then after its windows, with more without."""
    step = step_of(device)
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None

    def timed() -> float:
        finish()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        finish()
        return (time.perf_counter() - start) / steps

    for _ in range(10):
        step()
    times: dict[str, list[float]] = {"plain": [], "before the window": [], "after the window": []}
    for _ in range(rounds):
        times["plain"].append(timed())
        with Watch(skip=10**9):
            times["before the window"].append(timed())
    with Watch(skip=1, active=3):
        for _ in range(14):
            step()
        for _ in range(rounds):
            times["after the window"].append(timed())
    return times


def main() -> None:
    """Run what the machine can run, and report."""
    options = arguments(__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in LOOPS.items():
            if name.startswith("GPU") != (device == "cuda"):
                continue
            try:
                found = findings_of(name, text, Path(folder))
                figures.append(Figure(f"{name}: findings", len(found), "", limit=0))
            except Exception:
                traceback.print_exc()
    try:
        times = overhead(device, steps=10 if options.quick else 40, rounds=5 if options.quick else 9)
        plain = statistics.median(times["plain"])
        figures.append(Figure(f"step of the character GPT, {device}", 1000 * plain, "ms"))
        for name in ("before the window", "after the window"):
            share = statistics.median(times[name]) / plain - 1
            figures.append(Figure(f"overhead of the watch {name}", 100 * share, "%", limit=2))
            print(name, [round(1000 * value, 3) for value in times[name]])
        print("plain", [round(1000 * value, 3) for value in times["plain"]])
    except Exception:
        traceback.print_exc()
    report("the doctor on loops that are fine", figures, options.json)


if __name__ == "__main__":
    main()
