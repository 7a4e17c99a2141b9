"""Schedules: one step for each applied update, and the rates that torch's own schedulers give."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hotloop.optim import courses, rates

KINDS = ["host", "resident"]

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.1),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda k: 0.9**k, lambda k: 1 / (1 + k)]),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.95),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def make(kind):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True if kind == "resident" else None)
    return model, optimizer


def step(loop, model, optimizer, bad=False):
    loop.backward(model(torch.ones(4, 3)).square().mean() * (float("nan") if bad else 1.0))
    optimizer.step()


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_rates_and_momenta_are_torchs(make_loop, kind, name):
    loop = make_loop(kind)
    model, optimizer = make(kind)
    model, optimizer, schedule = loop.prepare(model, optimizer, SCHEDULERS[name](optimizer))
    _, theirs = make("host")
    reference = SCHEDULERS[name](theirs)
    for _ in range(18):
        step(loop, model, optimizer)
        schedule.step()
        optimizer.zero_grad()
        theirs.step()
        reference.step()
        assert schedule.get_last_lr() == pytest.approx([float(v) for v in reference.get_last_lr()])
        assert rates_of(optimizer) == pytest.approx(rates_of(theirs), rel=1e-6)
        ours = [group["momentum"] for group in optimizer.param_groups]
        assert ours == pytest.approx([group["momentum"] for group in theirs.param_groups])
    ours, wanted = schedule.state_dict(), reference.state_dict()
    assert set(ours) == set(wanted)
    assert ours["last_epoch"] == wanted["last_epoch"] if "last_epoch" in wanted else True
    # a scheduler of torch's own takes the state up
    _, fresh = make("host")
    other = SCHEDULERS[name](fresh)
    other.load_state_dict(ours)
    assert other.get_last_lr() == pytest.approx([float(v) for v in reference.get_last_lr()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [{0}, {3, 4, 9}, {11}])
def test_refused_updates_do_not_count(make_loop, kind, bad):
    loop = make_loop(kind, nonfinite="skip")
    model, optimizer = make(kind)
    model, optimizer, schedule = loop.prepare(model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5))
    for i in range(12):
        step(loop, model, optimizer, i in bad)
        schedule.step()
        optimizer.zero_grad()
    assert schedule.get_last_lr() == pytest.approx([r * 0.5 ** (12 - len(bad)) for r in (0.1, 0.02)])
    assert schedule.state_dict()["last_epoch"] == 12 - len(bad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [True, False])
def test_two_schedulers_of_one_optimizer_multiply(make_loop, kind, together):
    loop = make_loop(kind)
    model, optimizer = make(kind)
    first, second = lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 2, 0.5)
    if together:
        model, optimizer, first, second = loop.prepare(model, optimizer, first, second)
    else:
        model, optimizer, first = loop.prepare(model, optimizer, first)
        for _ in range(3):
            step(loop, model, optimizer)
            first.step()
        second = loop.prepare(second)
    _, theirs = make("host")
    references = [lr_scheduler.ExponentialLR(theirs, 0.9), lr_scheduler.StepLR(theirs, 2, 0.5)]
    for _ in range(0 if together else 3):
        theirs.step()
        references[0].step()
    for _ in range(5):
        step(loop, model, optimizer)
        theirs.step()
        for ours, torchs in zip((first, second), references, strict=True):
            ours.step()
            torchs.step()
    assert rates_of(optimizer) == pytest.approx(rates_of(theirs), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_warmup_and_plateau_of_one_optimizer(make_loop, kind):
    loop = make_loop(kind)
    model, optimizer = make(kind)
    warmup = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    model, optimizer, warmup, plateau = loop.prepare(model, optimizer, warmup, plateau)
    for metric in (1.0, 2.0, 2.0):
        for _ in range(2):
            step(loop, model, optimizer)
            warmup.step()
        plateau.step(metric)
    assert rates_of(optimizer) == pytest.approx([0.001, 0.0002])


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_prepared_before_its_optimizer(make_loop, kind):
    loop = make_loop(kind, nonfinite="skip")
    model, optimizer = make(kind)
    schedule = loop.prepare(lr_scheduler.ExponentialLR(optimizer, 0.5))
    model, optimizer = loop.prepare(model, optimizer)
    for i in range(6):
        step(loop, model, optimizer, i == 2)
        schedule.step()
        optimizer.zero_grad()
    assert schedule.get_last_lr() == pytest.approx([0.1 / 32, 0.02 / 32])


@pytest.mark.parametrize("kind", KINDS)
def test_another_loop_takes_objects_over(make_loop, kind):
    model, optimizer = make(kind)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        loop = make_loop(kind)
        model, optimizer, schedule = loop.prepare(model, optimizer, schedule)
        for _ in range(3):
            step(loop, model, optimizer)
            schedule.step()
            optimizer.zero_grad()
        assert loop.updates == 3
    assert schedule.get_last_lr() == pytest.approx([0.1 / 64, 0.02 / 64])
    assert schedule.state_dict()["last_epoch"] == 6


@pytest.mark.parametrize("kind", KINDS)
def test_once_an_epoch_whatever_became_of_the_last_update(make_loop, kind):
    loop = make_loop(kind, nonfinite="skip")
    model, optimizer = make(kind)
    model, optimizer, schedule = loop.prepare(model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5))
    for _ in range(3):
        for i in range(4):
            step(loop, model, optimizer, i == 3)
            optimizer.zero_grad()
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.1 / 8, 0.02 / 8])


def test_a_table_longer_than_it_was_filled(make_loop):
    loop = make_loop("resident", nonfinite="ignore")
    model, optimizer = make("resident")
    model, optimizer, schedule = loop.prepare(
        model, optimizer, lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    )
    for _ in range(2500):
        schedule.step()
    assert rates_of(optimizer) == pytest.approx([0.1 / 2501, 0.02 / 2501], rel=1e-6)


def test_refusals_of_another_optimizer_hold_no_schedule_back(make_loop):
    """Rates that are numbers follow what the host hears, optimizer by optimizer."""
    loop = make_loop("resident", nonfinite="skip")
    models, optimizers = zip(*(make("host") for _ in range(2)), strict=True)
    schedules = [lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    loop.prepare(list(models), list(optimizers), schedules)
    for i in range(20):
        for number in (0, 1):
            step(loop, models[number], optimizers[number], bad=number == 0 and i % 2 == 0 and i < 10)
            schedules[number].step()
            optimizers[number].zero_grad()
    loop.end_training()
    for number, refused in ((0, 5), (1, 0)):
        wanted = [rate * 0.5 ** (20 - refused) for rate in (0.1, 0.02)]
        assert schedules[number].get_last_lr() == pytest.approx(wanted)
        assert rates_of(optimizers[number]) == pytest.approx(wanted)


class OwnSGD(torch.optim.Optimizer):
    """SGD with momentum that reads its settings where they lie, as hotloop's own optimizers do."""

    device_settings = frozenset({"lr", "momentum", "betas", "weight_decay"})

    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad + group["weight_decay"] * p)
                p.sub_(buffer * group["lr"])


def test_momentum_and_weight_decay_lie_in_the_table(make_loop):
    rate = courses.one_cycle(0.3, 12).with_weight_decay(rates.linear(0.1, 0.0, 12))

    def build(loop):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = OwnSGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}], lr=0.1)
        return loop.prepare(model, optimizer, rate.scheduler(optimizer))

    loop = make_loop("resident", nonfinite="ignore")
    model, optimizer, schedule = build(loop)
    host_model, host_optimizer, host_schedule = build(make_loop("host"))
    held = [(g["lr"], g["momentum"], g["weight_decay"]) for g in optimizer.param_groups]
    saved = None
    for k in range(20):
        for i, group in enumerate(optimizer.param_groups):
            now = (group["lr"], group["momentum"], group["weight_decay"])
            assert all(a is b for a, b in zip(now, held[i], strict=True))
            wanted = (rate(k), rate.momentum(k), rate.weight_decay(k))
            assert [float(v) for v in now] == pytest.approx(wanted, rel=1e-6)
        step(loop, model, optimizer)
        schedule.step()
        host_model(torch.ones(4, 3)).square().mean().backward()
        host_optimizer.step()
        host_schedule.step()
        for o in (optimizer, host_optimizer):
            o.zero_grad()
        if k == 5:
            saved = schedule.state_dict()
    for ours, theirs in zip(model.parameters(), host_model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    # a loaded state goes on in the same memory
    schedule.load_state_dict(saved)
    assert schedule.get_last_lr() == pytest.approx([rate(6)] * 2)
    for i, group in enumerate(optimizer.param_groups):
        now = (group["lr"], group["momentum"], group["weight_decay"])
        assert all(a is b for a, b in zip(now, held[i], strict=True))
        assert now[1].item() == pytest.approx(rate.momentum(6))
        assert now[2].item() == pytest.approx(rate.weight_decay(6))


def test_rates_with_betas_in_the_table(make_loop):
    class OwnAdam(OwnSGD):
        def __init__(self, params, lr):
            torch.optim.Optimizer.__init__(self, params, {"lr": lr, "betas": (0.9, 0.99)})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                first, second = group["betas"]
                assert isinstance(first, torch.Tensor)
                assert second == 0.99

    rate = courses.one_cycle(0.3, 12)
    loop = make_loop("resident", nonfinite="ignore")
    model = nn.Linear(3, 2)
    optimizer = OwnAdam(model.parameters(), 0.1)
    model, optimizer, schedule = loop.prepare(model, optimizer, rate.scheduler(optimizer))
    for k in range(14):
        assert optimizer.param_groups[0]["betas"][0].item() == pytest.approx(rate.momentum(k))
        step(loop, model, optimizer)
        schedule.step()
    assert schedule.state_dict()["last_epoch"] == 14
    # another loop takes it over with plain numbers
    host = make_loop("host")
    host.prepare(model, optimizer, schedule)
    assert optimizer.param_groups[0]["betas"] == pytest.approx((0.95, 0.99))


@pytest.mark.parametrize("kind", KINDS)
def test_rates_under_a_loop_resume(make_loop, kind, tmp_path):
    rate = courses.warmup_cosine(0.5, 20, warm=4).with_momentum(rates.linear(0.95, 0.8, 20))

    def build():
        loop = make_loop(kind)
        model, optimizer = make(kind)
        return loop, *loop.prepare(model, optimizer, rate.scheduler(optimizer))

    loop, model, optimizer, schedule = build()
    for k in range(12):
        if k == 7:
            loop.save_state(tmp_path / "c", wait=True)
        assert rates_of(optimizer) == pytest.approx([rate(k)] * 2, rel=1e-6)
        assert optimizer.param_groups[0]["momentum"] == pytest.approx(rate.momentum(k))
        step(loop, model, optimizer)
        schedule.step()
        optimizer.zero_grad()
    again, other, optimizer, schedule = build()
    again.load_state(tmp_path / "c")
    for k in range(7, 12):
        assert rates_of(optimizer) == pytest.approx([rate(k)] * 2, rel=1e-6)
        assert optimizer.param_groups[0]["momentum"] == pytest.approx(rate.momentum(k))
        step(again, other, optimizer)
        schedule.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight, other.weight)
