"""hotloop's optimizers in a loop: the plain loop's trajectory, schedules of momentum, skipping, exact resume."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from hotloop.optim import EMA, SGD, AdamW, Muon, masters_of, no_decay, split_matrices
from hotloop.precision import Precision

OPTIMIZERS = {
    "adamw": lambda model: AdamW(no_decay(model, 0.05), lr=0.01),
    "sgd": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "muon": lambda model: Muon(split_matrices(model), lr=0.02, adamw_lr=0.005),
}
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X[:, :2])
EPOCHS, BATCHES = 3, 6


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12, bias=False),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 12),
        nn.Tanh(),
        nn.Linear(12, 2),
    )


def one_cycle(optimizer):
    lrs = [float(group["lr"]) for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, lrs, total_steps=EPOCHS * BATCHES + 1)


def train(loop, name, *, schedule=True, poison=(), drop=(), clip=1.0, folder=None, stop=None):
    """`poison`: numbers of batches made NaN; `drop`: left out of training altogether."""
    model = make_model()
    optimizer = OPTIMIZERS[name](model)
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    scheduler = one_cycle(optimizer) if schedule else None
    parts = loop.prepare(model, optimizer, loader, *([scheduler] if schedule else []))
    model, optimizer, loader = parts[:3]
    ema = EMA(model, 0.8, optimizer=optimizer, warmup=True)
    loop.register(ema)
    if folder is not None:
        loop.resume(folder)
    losses = []
    number = loop.updates
    for _ in loop.epochs(EPOCHS):
        for x, y in loader:
            number += 1
            if number in drop:
                continue
            loss = F.mse_loss(model(x * float("nan") if number in poison else x), y)
            loop.backward(loss)
            loop.update(optimizer, scheduler, max_norm=clip)
            ema.update()
            losses.append(loss.detach())
            if number == stop:
                loop.save_state(folder, wait=True)
                return losses
    return losses, model, optimizer, scheduler, ema


def plain(name):
    """The same training without hotloop's loop."""
    model = make_model()
    optimizer = OPTIMIZERS[name](model)
    scheduler = one_cycle(optimizer)
    for _ in range(EPOCHS):
        for x, y in DataLoader(TensorDataset(X, Y), batch_size=8):
            F.mse_loss(model(x), y).backward()
            # in the order of the groups: a sum in another order rounds otherwise
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


def assert_same(a, b):
    for name, value in b.items():
        assert torch.equal(a[name], value), name


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_loop_gives_the_plain_loops_weights(make_loop, name):
    _, model, _, scheduler, _ = train(make_loop("host"), name)
    expected = plain(name)
    assert_same(model.state_dict(), expected.state_dict())
    # on a device the numbers are a float32 table's
    loop = make_loop("resident")
    _, resident, optimizer, other, _ = train(loop, name)
    torch.testing.assert_close(list(resident.parameters()), list(expected.parameters()), rtol=1e-3, atol=1e-4)
    assert other.get_last_lr() == pytest.approx(scheduler.get_last_lr(), rel=1e-6)
    group = optimizer.param_groups[0]
    moved = group["betas"][0] if "betas" in group else group["momentum"]
    assert isinstance(moved, torch.Tensor)
    state = loop._preparer.updates[0]
    assert state.recordable()
    assert state.route == "fused"


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("bad", [{1}, {3, 4, 17}])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_skipped_updates_leave_no_trace(make_loop, name, bad, clip):
    with_bad, without = make_loop("resident", nonfinite="skip"), make_loop("resident", nonfinite="skip")
    a = train(with_bad, name, poison=bad, clip=clip)
    b = train(without, name, drop=bad, clip=clip)
    assert with_bad.skipped == len(bad)
    assert_same(a[1].state_dict(), b[1].state_dict())
    assert_same(a[4].averages, b[4].averages)
    assert a[4].averaged == b[4].averaged == EPOCHS * BATCHES - len(bad)
    assert a[3].get_last_lr() == b[3].get_last_lr()
    for x, y in zip(a[2].state.values(), b[2].state.values(), strict=True):
        assert_same(x, y)


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
@pytest.mark.parametrize("kind", ["host", "resident"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_resumed_to_the_bit(make_loop, tmp_path, name, kind, precision):
    settings = {"seed": 1, "precision": precision}
    whole = train(make_loop(kind, **settings), name, folder=tmp_path / "whole")
    first = train(make_loop(kind, **settings), name, folder=tmp_path / "x", stop=8)
    second = train(make_loop(kind, **settings), name, folder=tmp_path / "x")
    assert torch.equal(torch.stack(first + second[0]), torch.stack(whole[0]))
    assert_same(second[1].state_dict(), whole[1].state_dict())
    assert_same(second[4].averages, whole[4].averages)
    for x, y in zip(second[2].state.values(), whole[2].state.values(), strict=True):
        assert_same(x, y)
    if precision == "bf16-true":
        assert all(p.dtype == torch.bfloat16 for p in whole[1].parameters() if p.dim() > 1)
        masters = masters_of(whole[2])
        assert all(m.dtype == torch.float32 for m in masters.tensors())
        assert all(torch.equal(p, m.bfloat16()) for p, m in masters.items())


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_loss_scale_of_fp16_overflows_and_goes_on(make_loop, name):
    """Gradients unscaled by the scale on the device, an overflow refused, the rest as without a scale."""
    loop = make_loop("resident", scaled=True, nonfinite="skip")
    # squares of gradients overflow in float32 above 2**64 or so
    loop._state.scale.value.fill_(2.0**70)
    losses = train(loop, name, schedule=False)[0]
    skipped = loop.skipped
    assert 4 < skipped < 10
    assert loop._state.scale.value.item() == 2.0 ** (70 - skipped)
    assert all(torch.equal(losses[i], losses[i + BATCHES]) for i in range(skipped - BATCHES))
    assert losses[-1] < losses[BATCHES - 1]


def test_accumulation_is_one_update_a_window(make_loop):
    results = []
    for accumulation in (1, 2):
        loop = make_loop("resident", accumulation=accumulation)
        torch.manual_seed(3)
        model = nn.Linear(6, 2)
        optimizer = AdamW(model.parameters(), lr=0.01)
        data = DataLoader(TensorDataset(X[:32], Y[:32]), batch_size=8 // accumulation)
        model, optimizer, loader = loop.prepare(model, optimizer, data)
        for x, y in loader:
            loop.backward(F.mse_loss(model(x), y))
            loop.update(optimizer)
        results.append([p.detach() for p in model.parameters()])
        assert loop.updates == 4
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_precision_without_masters_is_obeyed(make_loop, name):
    precision = Precision("bf16", weights="bf16", master="none")
    _, model, optimizer, _, _ = train(make_loop("host", precision=precision), name)
    assert masters_of(optimizer) is None
    assert all(group["master"] is False for group in optimizer.param_groups)
    assert {v.dtype for p in model.parameters() for k, v in optimizer.state[p].items() if k != "step"} == {
        torch.bfloat16,
        torch.float32,
    }
