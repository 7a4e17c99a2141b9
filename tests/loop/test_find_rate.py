"""find_rate on a Loop: what it finds, and that nothing is left of it, to the bit."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop.errors import DataError, SettingError
from hotloop.optim import courses, find_rate
from hotloop.seeds import rng_state

KINDS = ["host", "resident"]


def build(loop, kind, *, scheduler=True, groups=False):
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    parameters = list(model.parameters())
    if groups:
        parameters = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "lr": 0.1}]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True if kind == "resident" else None)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    things = [model, optimizer, loader]
    if scheduler:
        things.append(courses.warmup_cosine(0.2, 30, warm=3).scheduler(optimizer))
    return loop.prepare(*things)


def train(loop, model, optimizer, loader, scheduler, epochs):
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loop.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def everything(model, optimizer, loader, scheduler):
    whole = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "loader": loader.state_dict(),
        "random": rng_state(),
    }
    return copy.deepcopy(whole)


def differences(a, b, where=""):
    """Where two structures differ, to the bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = [] if a.keys() == b.keys() else [f"{where}: {a.keys() ^ b.keys()}"]
        return found + [d for k in a.keys() & b.keys() for d in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, list | tuple) and len(a) == len(b):
        return [
            d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}/{i}")
        ]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if torch.equal(a, b) else [f"{where}: {a} {b}"]
    return [] if a == b else [f"{where}: {a} {b}"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_that_trains_is_found(make_loop, kind):
    loop = make_loop(kind)
    torch.manual_seed(0)
    x = torch.randn(512, 6)
    model, optimizer = nn.Linear(6, 1), None
    y = x @ torch.arange(1.0, 7.0)[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True if kind == "resident" else None)
    loader = DataLoader(TensorDataset(x, y), batch_size=256)
    model, optimizer, loader = loop.prepare(model, optimizer, loader)
    found = find_rate(loop, model, optimizer, loader, F.mse_loss, low=1e-6, high=100.0)
    # descent on this quadratic diverges at rates above 1 = 2 / (largest curvature, about 2)
    assert found.verdict == "found"
    assert 1e-3 < found.valley < 1.0
    assert 1e-2 < found.steepest < 1.0
    assert 1.0 < found.diverged < 10.0
    assert len(found.rates) < 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epochs", [0, 1])
def test_training_goes_on_as_if_it_had_never_been(make_loop, kind, epochs):
    plain = make_loop(kind)
    wanted = train(plain, *(things := build(plain, kind)), 3)
    loop = make_loop(kind)
    mine = build(loop, kind)
    model, optimizer, loader, _ = mine
    losses = train(loop, *mine, epochs)
    model[3].eval()
    before = everything(*mine)
    updates = loop.updates
    found = find_rate(loop, model, optimizer, loader, F.cross_entropy, low=1e-5, high=1e3, steps=60)
    assert differences(everything(*mine), before) == []
    assert not model[3].training
    model[3].train()
    assert loop.updates == updates
    assert len(found.rates) > 20
    losses += train(loop, *mine, 3 - epochs)
    assert losses == wanted
    assert all(map(torch.equal, model.state_dict().values(), things[0].state_dict().values()))


@pytest.mark.parametrize("kind", KINDS)
def test_your_own_step_with_a_scheduler_and_its_guard(make_loop, kind, tmp_path):
    loop = make_loop(kind, record=tmp_path / "run")
    mine = model, optimizer, loader, scheduler = build(loop, kind)
    seen = []

    def step(x, y):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        # blows up for good at some rate, gradients first
        loss = F.cross_entropy(model(x), y) * (math.nan if seen[-1] > 1.0 else 1.0)
        loop.backward(loss)
        loop.update(optimizer, scheduler)
        loop.log(loss=loss)
        return loss

    before = everything(*mine)
    found = find_rate(loop, optimizer=optimizer, loader=loader, step=step, low=1e-3, high=100.0, steps=30)
    assert seen == pytest.approx([1e-3 * 1e5 ** (i / 29) for i in range(len(seen))], rel=1e-6)
    assert found.diverged is not None
    assert found.diverged > 1.0
    assert differences(everything(*mine), before) == []
    # the guard has forgotten it, and nothing was logged
    assert train(loop, *mine, 1)
    loop.end_training()
    assert "loss" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_groups_keep_their_proportion(make_loop, kind):
    loop = make_loop(kind)
    model, optimizer, loader = build(loop, kind, scheduler=False, groups=True)
    seen = []

    def step(x, y):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        loop.backward(F.cross_entropy(model(x), y))
        loop.update(optimizer)
        return torch.tensor(1.0)

    found = find_rate(loop, optimizer=optimizer, loader=loader, step=step, low=1e-4, high=1.0, steps=10)
    assert found.verdict == "flat"
    assert [high for _, high in seen] == pytest.approx(found.rates, rel=1e-6)
    assert [low / high for low, high in seen] == pytest.approx([0.1] * 10)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.1]


def test_mistakes_are_told(make_loop):
    loop = make_loop()
    model, optimizer, loader = build(loop, "host", scheduler=False)
    with pytest.raises(SettingError, match="either model and loss, or step"):
        find_rate(loop, model, optimizer, loader)
    with pytest.raises(SettingError, match="optimizer and the loader"):
        find_rate(loop, model, None, loader, F.cross_entropy)
    for _ in loader:
        with pytest.raises(DataError, match="middle of an epoch"):
            find_rate(loop, model, optimizer, loader, F.cross_entropy)
        break
    found = find_rate(loop, model, optimizer, [], F.cross_entropy)
    assert found.verdict == "short"
    assert "no batch" in found.words


@pytest.mark.parametrize("kind", KINDS)
def test_an_accumulated_update_is_one_step_of_the_test(make_loop, kind):
    """10 batches in windows of 4, 4 and 2: each window has one rate, and the mean of its losses."""
    torch.manual_seed(0)
    x = torch.randn(80, 6)
    loop = make_loop(kind, accumulation=4)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True if kind == "resident" else None)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model, optimizer, loader = loop.prepare(model, optimizer, DataLoader(data, batch_size=8))
    seen = []

    def step(a, b):
        loss = F.mse_loss(model(a), b)
        loop.backward(loss)
        loop.update(optimizer)
        seen.append((float(optimizer.param_groups[0]["lr"]), loss.item()))
        return loss

    result = find_rate(loop, None, optimizer, loader, step=step, low=1e-6, high=1e-3, steps=12)
    assert len(result.rates) == 12
    assert len(seen) == 40
    sizes = [4, 4, 2] * 4
    for rate, loss in zip(result.rates, result.losses, strict=True):
        window = [seen.pop(0) for _ in range(sizes.pop(0))]
        assert [lr for lr, _ in window] == [pytest.approx(rate)] * len(window)
        assert loss == pytest.approx(sum(value for _, value in window) / len(window))


def test_a_rate_in_a_tensor_stays_that_tensor(make_loop):
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    loop = make_loop()
    model = nn.Linear(6, 1)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model, optimizer, loader = loop.prepare(model, optimizer, DataLoader(data, batch_size=8))
    find_rate(loop, model, optimizer, loader, F.mse_loss, low=1e-6, high=1e-3, steps=12)
    assert optimizer.param_groups[0]["lr"] is rate
    assert torch.equal(rate, torch.tensor(0.1))
