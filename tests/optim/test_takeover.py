"""The range test taken over a program's own loop: the loss of a step is the mean that the step's gradient is of."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.optim import Sweep, Takeover, takeover
from hotloop.state import LossScale


def data(n=75):
    torch.manual_seed(0)
    x = torch.randn(n, 3, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) * torch.linspace(1, 9, n, dtype=torch.float64)[:, None]


def test_a_loop_that_accumulates_shows_means_over_short_windows_too():
    x, y = data()
    loop = hotloop.Loop(record=False, accumulation=4, seed=0)
    model = torch.nn.Linear(3, 1).double()
    wanted = []
    with torch.no_grad():
        each = F.mse_loss(model(x), y, reduction="none")
    # 10 batches of 8, the last of 3: windows of 4, 4 and 2 batches
    for part in (each[:32], each[32:64], each[64:]):
        wanted.append(part.mean().item())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = loop.prepare(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=8))
    # rates too low to move anything
    sweep = Sweep(1e-20, 1e-19, 12, stop=1e6)
    with contextlib.suppress(takeover.TestOver), Takeover(sweep):
        for _ in loop.epochs(9):
            for a, b in loader:
                loop.backward(F.mse_loss(model(a), b))
                loop.update(optimizer)
    assert sweep.losses == pytest.approx(wanted * 4, rel=1e-6)


def test_a_loss_that_a_loop_has_scaled_counts_as_it_was():
    w = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([w], lr=0.1)
    scale = LossScale(torch.device("cpu"), initial=1024.0)
    before = LossScale.apply, torch.amp.GradScaler.scale, torch.autograd.backward
    sweep = Sweep(1e-20, 1e-19, 10, stop=1e6)
    with contextlib.suppress(takeover.TestOver), Takeover(sweep):
        for k in range(20):
            scale.apply(w * (k + 1)).backward()
            scale.update(torch.tensor(float(k % 2)))
            optimizer.step()
    assert sweep.losses == [2.0 * (k + 1) for k in range(10)]
    assert before == (LossScale.apply, torch.amp.GradScaler.scale, torch.autograd.backward)
