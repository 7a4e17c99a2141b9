"""A non-finite loss or gradient: the update is not made, nothing is left of it, and the rest goes on right."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop

X = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(60, 1, generator=torch.Generator().manual_seed(2))
KINDS = ["host", "resident"]


def make_model():
    torch.manual_seed(0)
    # no bias before the norm: its gradient would be rounding noise, which Adam scales up to full steps
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def make_optimizer(name, model, kind):
    fused = True if kind == "resident" else None
    return {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.01, fused=fused),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused),
        "rmsprop": lambda: torch.optim.RMSprop(model.parameters(), lr=0.01),
        "dampened": lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, dampening=0.5),
    }[name]()


def train(loop, name, kind, bad, *, clip=None, poison="loss"):
    """Twelve updates, those in `bad` with a NaN; returns model, optimizer, scheduler."""
    model = make_model()
    optimizer = make_optimizer(name, model, kind)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(TensorDataset(X, Y), batch_size=5)
    model, optimizer, scheduler, loader = loop.prepare(model, optimizer, scheduler, loader)
    for step, (x, y) in enumerate(loader):
        if step in bad and poison == "input":
            x = x.clone()
            x[0] = float("inf")
        loss = F.mse_loss(model(x), y)
        if step in bad and poison == "loss":
            loss = loss * float("nan")
        if step in bad and poison == "constant":
            loss = loss + float("inf")  # gradients stay finite
        loop.backward(loss)
        if step in bad and poison == "gradient":
            model[0].weight.grad[0, 0] = float("-inf")
        if clip:
            loop.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def reference(name, kind, bad, clip=None, steps=12):
    """Plain PyTorch that never meets the bad batches."""
    model = make_model()
    optimizer = make_optimizer(name, model, kind)
    carrier = torch.optim.SGD([torch.zeros(1)], lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(carrier, 0.9)
    for step in range(steps):
        if step in bad:
            continue
        x, y = X[5 * step : 5 * step + 5], Y[5 * step : 5 * step + 5]
        F.mse_loss(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        lr = scheduler.get_last_lr()[0]
        # a table on the device holds float32
        optimizer.param_groups[0]["lr"] = torch.tensor(lr) if _tensor_lr(optimizer, kind) else lr
        optimizer.step()
        carrier.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def _tensor_lr(optimizer, kind):
    group = optimizer.param_groups[0]
    return kind == "resident" and bool(group.get("fused") or group.get("capturable"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", ["loss", "input", "gradient", "constant"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_skip_equals_never_having_seen_the_batch(make_loop, kind, poison, clip, name):
    bad = {0, 4, 5}
    loop = make_loop(kind, nonfinite="skip")
    model, _, scheduler = train(loop, name, kind, bad, clip=clip, poison=poison)
    expected, _, schedule = reference(name, kind, bad, clip)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-5, atol=1e-7)
    assert loop.skipped == 3
    assert loop.updates == 12
    assert scheduler.get_last_lr() == pytest.approx([float(lr) for lr in schedule.get_last_lr()], rel=1e-5)


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "dampened"])
def test_masked_optimizers_on_the_device(make_loop, name):
    """Unfused: parameters and state are selected back. Their rate is a number, so it may lag after a refusal."""
    bad = {0, 3, 7}
    loop = make_loop("resident", nonfinite="skip")
    model = make_model()
    optimizer = make_optimizer(name, model, "host")
    model, optimizer = loop.prepare(model, optimizer)
    assert loop._updates[0].route == "masked"
    expected = make_model()
    plain = make_optimizer(name, expected, "host")
    for step in range(12):
        x, y = X[5 * step : 5 * step + 5], Y[5 * step : 5 * step + 5]
        loop.backward(F.mse_loss(model(x), y) * (float("nan") if step in bad else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        if step not in bad:
            F.mse_loss(expected(x), y).backward()
            plain.step()
            plain.zero_grad()
    for key, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_an_optimizer_that_counts_on_the_host_is_refused_by_name(make_loop):
    loop = make_loop("resident", nonfinite="skip")
    model = make_model()
    with pytest.raises(hotloop.HotloopError, match="NAdam cannot skip"):
        loop.prepare(model, torch.optim.NAdam(model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_stop_raises_with_weights_before_the_fault(make_loop, kind, clip, tmp_path):
    loop = make_loop(kind, nonfinite="stop", record=tmp_path / "run")
    with pytest.raises(hotloop.NonFiniteError) as caught:
        train(loop, "adamw", kind, {6}, clip=clip)
    assert caught.value.step == 6
    assert caught.value.indices == list(range(30, 35))
    assert (tmp_path / "run" / "nonfinite-rank0.json").exists()
    model = loop._preparer.registry.modules[0]
    expected, _, _ = reference("adamw", kind, set(), clip, steps=6)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-6, atol=1e-7)


def test_stop_on_the_device_is_noticed_at_the_end_of_a_short_run(make_loop):
    loop = make_loop("resident", nonfinite="stop")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model, optimizer = loop.prepare(model, optimizer)
    loop.backward(model(X).mean() * float("nan"))
    optimizer.step()
    with pytest.raises(hotloop.NonFiniteError) as caught:
        loop.end_training()
    assert caught.value.step == 0


@pytest.mark.parametrize("kind", KINDS)
def test_ignore_lets_it_through(make_loop, kind):
    loop = make_loop(kind, nonfinite="ignore")
    model, _, _ = train(loop, "adamw", kind, {3})
    assert torch.isnan(model[0].weight).any()


@pytest.mark.parametrize("kind", KINDS)
def test_two_optimizers_are_judged_apart(make_loop, kind):
    loop = make_loop(kind, nonfinite="skip")
    a, b = nn.Linear(8, 1), nn.Linear(8, 1)
    oa = torch.optim.SGD(a.parameters(), lr=0.1, fused=True)
    ob = torch.optim.SGD(b.parameters(), lr=0.1, fused=True)
    a, b, oa, ob = loop.prepare(a, b, oa, ob)
    before = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
    loop.backward(a(X).mean() * float("nan"))
    oa.step()
    loop.backward(b(X).mean())
    ob.step()
    assert torch.equal(a.weight, before[0]["weight"])
    assert not torch.equal(b.weight, before[1]["weight"])
    assert torch.isfinite(b.weight).all()
    assert loop.skipped == 1


def test_momentum_of_a_parameter_that_learns_late_begins_at_zero_too(make_loop):
    loop = make_loop("resident", nonfinite="skip")
    model = nn.ParameterList([nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2)])
    twin = copy.deepcopy(model)
    model[1].requires_grad_(False)
    ours = torch.optim.SGD(model, lr=0.1, momentum=0.9, fused=True)
    theirs = torch.optim.SGD(twin, lr=0.1, momentum=0.9)
    model, ours = loop.prepare(model, ours)
    assert model[1] not in ours.state
    for i in range(4):
        model[1].requires_grad_(i >= 1)
        loss = model[0].square().sum() + (model[1].square().sum() if i else 0.0)
        loop.backward(loss * float("nan") if i == 1 else loss)
        if i == 1:
            assert model[1].grad.isnan().all()
        ours.step()
        ours.zero_grad()
        if i != 1:
            (twin[0].square().sum() + (twin[1].square().sum() if i else 0.0)).backward()
            theirs.step()
            theirs.zero_grad()
    assert all(torch.allclose(p, q, rtol=1e-6) for p, q in zip(model, twin, strict=True))
    assert all(
        torch.allclose(ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"], rtol=1e-6)
        for p, q in zip(model, twin, strict=True)
    )


def test_fp16_scale_follows_torchs_grad_scaler(make_loop):
    """The scale on the device halves on overflow and recovers as GradScaler's does; an overflow is no fault."""
    loop = make_loop("resident", scaled=True, nonfinite="stop")
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=2000)
    model, twin = nn.Linear(8, 1), None
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    reference_optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    model, optimizer = loop.prepare(model, optimizer)
    for step in range(6):
        huge = 1e35 if step in (1, 2) else 1.0  # overflows once multiplied by the scale, not before
        loop.backward(F.mse_loss(model(X), Y) * huge)
        optimizer.step()
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(twin(X), Y) * huge).backward()
        scaler.step(reference_optimizer)
        scaler.update()
        reference_optimizer.zero_grad()
        assert loop._state.scale.value.item() == scaler.get_scale()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("clippings", [0, 1, 2, 3])
def test_fp16_scale_counts_an_update_once_however_often_it_is_clipped(make_loop, clippings):
    loop = make_loop("resident", scaled=True, nonfinite="skip")
    loop._state.scale.interval = 3
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=3)
    model = nn.Linear(8, 1)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    reference = torch.optim.SGD(twin.parameters(), lr=0.01)
    model, optimizer = loop.prepare(model, optimizer)
    for step in range(24):
        loop.backward(F.mse_loss(model(X), Y))
        scaler.scale(F.mse_loss(twin(X), Y)).backward()
        if step in (2, 3, 9, 17):
            model.weight.grad[0, 0] = twin.weight.grad[0, 0] = float("inf")
        for max_norm in (1.0, 0.5, 0.25)[:clippings]:
            loop.clip_grad_norm_(model.parameters(), max_norm)
        scaler.unscale_(reference)
        for max_norm in (1.0, 0.5, 0.25)[:clippings]:
            nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        for each in (
            optimizer.step,
            lambda: scaler.step(reference),
            optimizer.zero_grad,
            reference.zero_grad,
        ):
            each()
        scaler.update()
        assert loop._state.scale.value.item() == scaler.get_scale()
        assert loop._state.scale.state_dict()["quiet"] == scaler._get_growth_tracker()
    assert loop.skipped == 4
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-5, atol=1e-7)


def test_fp16_overflow_at_the_floor_is_a_fault(make_loop):
    loop = make_loop("resident", scaled=True, nonfinite="stop")
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    model, optimizer = loop.prepare(model, optimizer)
    with pytest.raises(hotloop.NonFiniteError) as caught:
        for _ in range(40):
            loop.backward(F.mse_loss(model(X), Y))
            model.weight.grad[0, 0] = float("inf")
            optimizer.step()
            optimizer.zero_grad()
    # 65536 halves sixteen times to 1; the seventeenth overflow has no lower scale to try
    assert caught.value.step == 16
