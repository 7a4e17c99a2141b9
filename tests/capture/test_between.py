"""What happens between replays on the host, and what of it recordings made before do not know."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotloop import optim

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (64,), generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # no bias before the norm: its gradient would be rounding noise, which Adam scales up to full steps
        self.stem, self.norm, self.head = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.stem(x))))


def run(loop, captured, script, *, make=optim.AdamW):
    """Losses and the model after a script of words and batch sizes."""
    torch.manual_seed(0)
    model = Net()
    model, optimizer = loop.prepare(model, make(model.parameters(), lr=1e-2))

    def whole(x, y):
        loss = F.cross_entropy(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    def head_alone(x, y):
        loss = F.cross_entropy(model.head(x.repeat(1, 2)[:, :8]), y)
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    steps = [loop.capture(s, mode="graph") if captured else s for s in (whole, head_alone)]
    losses = []
    for i, word in enumerate(script):
        x, y = X[i % 40 : i % 40 + 8], Y[i % 40 : i % 40 + 8]
        if isinstance(word, int):
            losses.append(steps[0](x[:word], y[:word]))
        elif word == "head":
            losses.append(steps[1](x, y))
        elif word == "nan":
            steps[0](x * float("nan"), y)
        elif word == "fails":
            with pytest.raises(ValueError, match="batch_size"):
                steps[0](x, y[:3])
        elif word in ("freeze", "thaw"):
            model.stem.requires_grad_(word == "thaw")
    return steps, model, torch.stack([loss.detach() for loss in losses])


def check(filmed_loop, script, **settings):
    make = settings.pop("make", optim.AdamW)
    _, plain, losses = run(filmed_loop(nonfinite="skip", **settings), False, script, make=make)
    steps, model, others = run(filmed_loop(nonfinite="skip", **settings), True, script, make=make)
    torch.testing.assert_close(others, losses, rtol=1e-5, atol=1e-6)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert steps[0].reason is None
    assert steps[0].replays > 8
    return steps


@pytest.mark.parametrize("make", [optim.AdamW, optim.Adam])
def test_counters_of_layers_that_rested_are_their_own_when_they_thaw(filmed_loop, make):
    script = [8] * 8 + ["freeze"] + [8] * 20 + ["thaw"] + [8] * 12
    steps = check(filmed_loop, script, make=make)
    # all learn, some learn, all learn by counters of two kinds
    assert steps[0].captures == 3


def test_counters_are_told_apart_by_another_step_over_the_same_optimizer(filmed_loop):
    script = [8] * 8 + ["head"] * 12 + [8] * 12 + ["head"] * 6 + [8] * 6
    steps = check(filmed_loop, script)
    assert steps[1].reason is None
    assert steps[1].replays > 8


def test_a_refused_update_after_a_step_that_failed_gives_back_the_right_buffers(filmed_loop):
    check(filmed_loop, [8] * 8 + ["fails", "nan"] + [8] * 8)


def test_a_recording_made_after_a_forward_alone_saves_the_buffers(filmed_loop):
    # the first micro-batch of the window with another shape is recorded while its second one is replayed
    script = [8] * 12 + [6, 8] * 5 + [6, "nan"] + [8, 8, 6, 8]
    check(filmed_loop, script, accumulation=2)


@pytest.mark.parametrize("schedule", ["cosine", "one cycle"])
@pytest.mark.parametrize("what", ["rate", "momentum", "state"])
def test_numbers_put_in_place_of_a_schedules_count_for_one_step(filmed_loop, schedule, what):
    """In the eager loop the next step of the schedule puts its own back; the captured one goes on being launched."""

    def train(loop, captured):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        if schedule == "cosine":
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        else:
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
        model, optimizer, scheduler = loop.prepare(model, optimizer, scheduler)

        def plain(x, y):
            loss = F.cross_entropy(model(x), y)
            loop.backward(loss)
            loop.update(optimizer, scheduler)
            return loss

        step, losses = loop.capture(plain, mode="graph") if captured else plain, []
        for i in range(24):
            if i == 10 and what == "rate":
                optimizer.param_groups[0]["lr"] = 0.1
            elif i == 10 and what == "momentum":
                optimizer.param_groups[0]["betas"] = (0.5, 0.9)
            elif i == 10:
                optimizer.load_state_dict(optimizer.state_dict())
            losses.append(step(X[i : i + 8], Y[i : i + 8]).detach())
        return step, torch.stack(losses)

    _, plain = train(filmed_loop(nonfinite="skip"), False)
    step, losses = train(filmed_loop(nonfinite="skip"), True)
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=1e-6)
    assert step.reason is None
    assert step.replays > 15


def test_a_rate_that_stands_in_place_of_a_schedules_for_long_is_recorded(filmed_loop):
    loop = filmed_loop(nonfinite="skip")
    model = nn.Linear(6, 3)
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = loop.prepare(model, optimizer, scheduler)

    @loop.capture(mode="graph")
    def step(x):
        loss = model(x).sum()
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    weight = model.weight.detach().clone()
    for i in range(60):
        if i == 10:
            optimizer.param_groups[0]["lr"] = 0.125
        step(torch.ones(1, 6))
        weight -= 0.01 if i < 10 else 0.125
        torch.testing.assert_close(model.weight.detach(), weight, rtol=1e-5, atol=1e-5)
    assert step.captures == 2
    assert step.replays > 20
    scheduler.step()
    step(torch.ones(1, 6))
    torch.testing.assert_close(model.weight.detach(), weight - 0.005, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["norm", "stem", "head"])
def test_gradients_that_wait_in_some_layer_are_added_to(filmed_loop, which):
    def train(loop, captured):
        torch.manual_seed(0)
        model = Net()
        model, optimizer = loop.prepare(model, optim.SGD(model.parameters(), lr=0.1))

        def plain(x, y):
            loss = F.cross_entropy(model(x), y)
            loop.backward(loss)
            loop.update(optimizer)
            return loss

        step, losses = loop.capture(plain, mode="graph") if captured else plain, []
        for i in range(20):
            if i % 4 == 3:
                # a penalty of one layer, backpropagated by the script itself
                sum(p.square().sum() for p in getattr(model, which).parameters()).backward()
            losses.append(step(X[i : i + 8], Y[i : i + 8]).detach())
        return step, torch.stack(losses), model

    _, plain, expected = train(filmed_loop(nonfinite="skip"), False)
    step, losses, model = train(filmed_loop(nonfinite="skip"), True)
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=1e-6)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert step.reason is None
    assert step.replays > 8
