"""A range test with a captured step: the rates reach the recording, and training goes on as if it had not been."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop import optim

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


def build(loop, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    if kind == "muon":
        optimizer = optim.Muon(optim.split_matrices(model), lr=0.02, adamw_lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    rate = optim.warmup_cosine(1.0, 40, warm=4)
    if kind == "muon":
        rate = rate.with_weight_decay(optim.linear(0.01, 0.0, 40))
    scheduler = rate.scheduler(optimizer, relative=True)
    model, optimizer, loader, scheduler = loop.prepare(model, optimizer, loader, scheduler)
    seen = []

    @loop.capture
    def train(x, y):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, scheduler)
        return loss

    def step(x, y):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        return train(x, y)

    return model, optimizer, loader, step, seen, train


def run(loader, step, epochs):
    return [step(x, y).item() for _ in range(epochs) for x, y in loader]


@pytest.mark.parametrize("kind", ["sgd", "muon"])
def test_a_captured_step_is_tested_and_goes_on(graph_loop, kind):
    loop = graph_loop()
    model, optimizer, loader, step, wanted_rates, train = build(loop, kind)
    wanted = run(loader, step, 6)
    weights = [p.detach().clone() for p in model.parameters()]

    loop = graph_loop()
    model, optimizer, loader, step, seen, train = build(loop, kind)
    losses = run(loader, step, 2)
    assert train.captures == 1
    before = len(seen)
    found = optim.find_rate(loop, optimizer=optimizer, loader=loader, step=step, low=1e-5, high=1.0, steps=20)
    tried = [max(rates) for rates in seen[before:]]
    assert tried == pytest.approx(found.rates, rel=1e-6)
    assert train.reason is None
    del seen[before:]
    losses += run(loader, step, 4)
    assert losses == wanted
    assert seen == wanted_rates
    assert all(map(torch.equal, model.parameters(), weights))
