"""A loss curve that must not change: bit for bit between two processes, and to 1e-4 from the one stored here.

`python tests/golden/test_loss_curve.py` prints the curve; after a change that is meant to move it, write that to
loss_curve.json and say why in the commit.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STORED = Path(__file__).with_name("loss_curve.json")


def train(precision="fp32"):
    """A small convolutional classifier of drawn bars, through all that a script may use; the loss of each batch."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (150,), generator=generator)
    images = 0.3 * torch.randn(150, 1, 8, 8, generator=generator)
    for image, label in zip(images, labels, strict=True):
        at = int(torch.randint(0, 6, (), generator=generator))
        shape = [
            (at, slice(None)),
            (slice(None), at),
            (slice(at, at + 2), slice(2, 6)),
            (slice(2, 6), slice(at, at + 2)),
        ]
        image[0][shape[label]] += 1.0

    loop = hotloop.Loop(precision, device="cpu", record=False, seed=0, accumulation=2, nonfinite="skip")
    model = nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(96, 4)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)
    loader = DataLoader(TensorDataset(images, labels), 16, shuffle=True)
    model, optimizer, scheduler, loader = loop.prepare(model, optimizer, scheduler, loader)
    curve = []
    for _ in loop.epochs(6):
        for image, label in loader:
            loss = F.cross_entropy(model(image), label)
            loop.backward(loss)
            loop.update(optimizer, scheduler, max_norm=1.0)
            curve.append(loss.item())
    loop.end_training()
    return curve


@pytest.fixture(scope="module")
def curves():
    """From two fresh processes at a time."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOTLOOP")} | {
        "HOTLOOP_PROGRESS": "0"
    }
    children = [
        subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    outputs = [child.communicate(timeout=200)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    return [json.loads(output) for output in outputs]


def test_two_processes_give_the_same_bits(curves):
    first, second = curves
    assert first == second
    assert len(first["fp32"]) == len(first["bf16"]) == 60


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_the_curve_is_the_stored_one(curves, precision, tolerance):
    stored = json.loads(STORED.read_text())[precision]
    assert curves[0][precision] == pytest.approx(stored, rel=tolerance, abs=tolerance)
    # it is a curve of something learned
    assert sum(stored[-10:]) < 0.5 * sum(stored[:10])


if __name__ == "__main__":
    print(json.dumps({name: [float(f"{x:.9g}") for x in train(name)] for name in ("fp32", "bf16")}))
