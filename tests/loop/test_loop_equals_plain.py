"""The same loop: weights, learning rates and buffers equal those of plain PyTorch, to the bit where arithmetic is."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop

X = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(50, 1, generator=torch.Generator().manual_seed(2))


def make_model(norm=True):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(16, 1))


def make_optimizer(name, model, *, tensor_lr=False, fused=None):
    lr = torch.tensor(0.01) if tensor_lr else 0.01
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, fused=fused)
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=fused)


def plain(name, clip, *, tensor_lr=False, fused=None, epochs=3):
    """Plain PyTorch; with `tensor_lr` the float64 rates are written into a tensor, as a table holds them."""
    model = make_model()
    optimizer = make_optimizer(name, model, tensor_lr=tensor_lr, fused=fused)
    carrier = torch.optim.SGD([torch.zeros(1)], lr=0.01) if tensor_lr else optimizer
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(carrier, 20)
    torch.manual_seed(5)
    for _ in range(epochs):
        for x, y in DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True):
            F.mse_loss(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if tensor_lr:
                carrier.step()
            scheduler.step()
            if tensor_lr:
                optimizer.param_groups[0]["lr"].fill_(scheduler.get_last_lr()[0])
            optimizer.zero_grad()
    return model, scheduler


def ours(loop, name, clip, *, fused=None, epochs=3, update=False):
    model = make_model()
    optimizer = make_optimizer(name, model, fused=fused)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loader = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = loop.prepare(model, optimizer, loader, scheduler)
    torch.manual_seed(5)
    for _ in loop.epochs(epochs):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loop.backward(loss)
            if update:
                loop.update(optimizer, scheduler, max_norm=clip)
            else:
                if clip:
                    loop.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            loop.log(loss=loss)
    return model, scheduler


def assert_same(a, b):
    for (name, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("nonfinite", ["ignore", "stop", "skip"])
@pytest.mark.parametrize("clip", [None, 0.1, 100.0])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_host_loop_is_bitwise_plain(make_loop, name, clip, nonfinite):
    reference, schedule = plain(name, clip)
    model, mine = ours(make_loop(nonfinite=nonfinite), name, clip)
    assert_same(reference, model)
    assert schedule.get_last_lr() == mine.get_last_lr()


@pytest.mark.parametrize("nonfinite", ["ignore", "stop", "skip"])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_resident_loop_is_bitwise_plain_with_a_tensor_lr(make_loop, name, clip, nonfinite):
    reference, schedule = plain(name, clip, tensor_lr=True, fused=True)
    model, mine = ours(make_loop("resident", nonfinite=nonfinite), name, clip, fused=True)
    assert_same(reference, model)
    assert mine.get_last_lr() == schedule.get_last_lr()


@pytest.mark.parametrize("kind", ["host", "resident"])
def test_update_is_the_five_calls(make_loop, kind):
    fused = True if kind == "resident" else None
    one, _ = ours(make_loop(kind), "adamw", 0.1, fused=fused)
    other, _ = ours(make_loop(kind), "adamw", 0.1, fused=fused, update=True)
    assert_same(one, other)


def test_prepare_gives_back_the_same_objects_in_any_nesting(make_loop):
    loop = make_loop()
    model, other = make_model(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    out = loop.prepare({"s": scheduler, "rest": [optimizer, (loader, model)]}, other)
    assert out[0]["s"] is scheduler
    assert out[0]["rest"][0] is optimizer
    assert out[0]["rest"][1][1] is model
    assert out[1] is other
    assert isinstance(out[0]["rest"][1][0], DataLoader)
    assert loop.prepare(model) is model


def test_prepare_refuses_what_it_cannot_take(make_loop):
    loop = make_loop()
    with pytest.raises(hotloop.HotloopError, match="int"):
        loop.prepare(make_model(), 42)
    with pytest.raises(hotloop.HotloopError, match="Tensor"):
        loop.prepare([torch.ones(2), make_model()])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_prepared_module_copies_and_pickles_as_a_plain_one(make_loop, precision):
    loop = make_loop(precision=precision)
    model = loop.prepare(make_model())
    assert isinstance(model, nn.Sequential)
    assert type(model).__name__ == "Sequential"
    assert list(model.state_dict()) == list(make_model().state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is nn.Sequential
        assert_same(twin, model)
        assert twin(X).dtype == torch.float32
    parent = nn.ModuleList([model])
    assert type(copy.deepcopy(parent)[0]) is nn.Sequential
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=False)) is nn.Sequential


def test_bf16_computes_in_bf16_and_returns_fp32(make_loop):
    loop = make_loop(precision="bf16")
    model = make_model(norm=False).eval()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(X).float()
    model = loop.prepare(model)
    out = model(X)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)
    assert not torch.equal(out, copy.deepcopy(model)(X))


def test_prepared_optimizer_pickles_without_the_loop(make_loop):
    loop = make_loop()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    loop.prepare(model, optimizer)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.step.__func__ is type(twin).step


def test_scheduler_made_after_prepare_works_without_a_warning(make_loop):
    loop = make_loop()
    model = make_model(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loop.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        loop.backward(model(X).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert scheduler.get_last_lr() == [0.125]


def test_lbfgs_with_a_closure(make_loop):
    loop = make_loop()
    model = make_model(norm=False).eval()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    reference = torch.optim.LBFGS(twin.parameters(), max_iter=5)
    model, optimizer = loop.prepare(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), Y)
        loop.backward(loss)
        return loss

    def plain_closure():
        reference.zero_grad()
        loss = F.mse_loss(twin(X), Y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        reference.step(plain_closure)
    assert_same(model, twin)
    assert loop.updates == 2


def test_sparse_gradients(make_loop):
    loop = make_loop(nonfinite="skip")
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, sparse=True)
    twin = copy.deepcopy(table)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    reference = torch.optim.SparseAdam(twin.parameters(), lr=0.1)
    table, optimizer = loop.prepare(table, optimizer)
    for bad in (False, True, False):
        loss = table(torch.tensor([1, 2, 2])).square().sum() * (float("nan") if bad else 1.0)
        loop.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if not bad:
            twin(torch.tensor([1, 2, 2])).square().sum().backward()
            reference.step()
            reference.zero_grad()
    assert_same(table, twin)
    assert loop.skipped == 1
