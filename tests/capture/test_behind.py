"""An optimizer that steps after each launch: nothing of the step may come before it that came after it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotloop import optim

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))


def run(loop, captured, make, *, scheduler=None, after=None, steps=16, **options):
    """Weights and losses of a short training; `after` gives what the step does after its update."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = make(model.parameters())
    things = [model, optimizer] + ([scheduler(optimizer)] if scheduler is not None else [])
    model, optimizer, *schedulers = loop.prepare(*things)
    ending = after(model, optimizer) if after is not None else lambda: None

    def step(x):
        loss = F.mse_loss(model(x), x[:, :2].sin())
        loop.backward(loss)
        loop.update(optimizer, *schedulers)
        ending()
        return loss

    train = loop.capture(step, mode="graph", **options) if captured else step
    losses = [train(X[2 * i : 2 * i + 2]).detach().clone() for i in range(steps)]
    return train, model, torch.stack(losses)


def check(filmed_loop, make, **settings):
    nonfinite = settings.pop("nonfinite", "ignore")
    _, plain, plain_losses = run(filmed_loop(nonfinite=nonfinite), False, make, **settings)
    step, model, losses = run(filmed_loop(nonfinite=nonfinite), True, make, **settings)
    # a rate on the device rounds otherwise than one on the host, in the last digit
    torch.testing.assert_close(losses, plain_losses, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-5, atol=1e-6)
    return step


def rmsprop(params):
    return torch.optim.RMSprop(params, lr=3e-2)


def clamp(model, optimizer):
    def ending():
        for p in model.parameters():
            p.data.clamp_(-0.3, 0.3)

    return ending


def average(model, optimizer):
    return optim.EMA(model, decay=0.5, optimizer=optimizer).update


def forget(model, optimizer):
    return model.zero_grad


def look(model, optimizer):
    return lambda: model(X[:2])


@pytest.mark.parametrize("after", [clamp, average, look])
def test_a_step_that_goes_on_with_the_parameters_runs_eagerly(filmed_loop, after):
    step = check(filmed_loop, rmsprop, after=after)
    assert "RMSprop steps after each launch" in step.reason
    assert "the step goes on with its parameters" in step.reason


def test_gradients_cleared_by_hand_after_the_update_are_not_missed(filmed_loop):
    step = check(filmed_loop, rmsprop, after=forget)
    assert "gradients are cleared before that" in step.reason


def test_an_update_that_ends_the_step_is_made_after_each_replay(filmed_loop):
    step = check(filmed_loop, rmsprop)
    assert step.reason is None
    assert step.replays > 8


def test_a_check_beside_the_plain_step_leaves_nothing_forbidden(filmed_loop):
    step = check(filmed_loop, rmsprop, check_every=3)
    assert step.reason is None
    assert step.checks > 2
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_what_follows_and_touches_other_memory_is_recorded(filmed_loop):
    def count(model, optimizer):
        empty, calls = torch.empty(0), torch.zeros(())
        return lambda: calls.add_(1.0 + (empty * 2).numel())

    def with_an_empty_one(params):
        return torch.optim.RMSprop([*params, nn.Parameter(torch.empty(0))], lr=3e-2)

    step = check(filmed_loop, with_an_empty_one, after=count)
    assert step.reason is None
    assert step.replays > 8


def test_two_networks_where_one_steps_behind(filmed_loop):
    def train(loop, captured):
        torch.manual_seed(0)
        made, judge = nn.Linear(4, 4), nn.Linear(4, 1)
        made, judge, first, second = loop.prepare(
            made, judge, rmsprop(judge.parameters()), optim.AdamW(made.parameters(), lr=1e-2)
        )

        def step(x):
            loss = judge(made(x).detach()).mean() - judge(x).mean()
            loop.backward(loss)
            loop.update(first)
            fooled = -judge(made(x)).mean()
            loop.backward(fooled)
            loop.update(second)
            judge.zero_grad()
            return fooled

        run = loop.capture(step, mode="graph") if captured else step
        return run, torch.stack([run(X[i : i + 4]).detach().clone() for i in range(12)])

    _, plain = train(filmed_loop(nonfinite="ignore"), False)
    step, values = train(filmed_loop(nonfinite="ignore"), True)
    torch.testing.assert_close(values, plain, rtol=1e-5, atol=1e-7)
    assert "RMSprop steps after each launch" in step.reason


@pytest.mark.parametrize("moved", ["by torch", "by hotloop"])
def test_the_rate_of_a_step_behind_is_that_of_its_own_row(filmed_loop, moved):
    """torch's fused AdamW reads its betas on the host, so a one-cycle schedule has it step behind."""

    def make(params):
        return torch.optim.AdamW(params, lr=1e-2, fused=True)

    def one_cycle(optimizer):
        if moved == "by torch":
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        return optim.one_cycle(0.1, 20).scheduler(optimizer)

    step = check(filmed_loop, make, scheduler=one_cycle, nonfinite="skip")
    assert step.reason is None
    assert step.replays > 8
    assert step.captures == 1


def test_two_schedulers_of_an_optimizer_behind_move_it_after_each_replay(filmed_loop):
    def train(loop, captured):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8),
        ]
        model, optimizer, *schedulers = loop.prepare(model, optimizer, *schedulers)

        def step(x):
            loss = model(x).square().mean()
            loop.backward(loss)
            loop.update(optimizer)
            for scheduler in schedulers:
                scheduler.step()
            return loss

        run = loop.capture(step, mode="graph") if captured else step
        losses = torch.stack([run(X[i : i + 4]).detach().clone() for i in range(14)])
        return run, losses, optimizer.param_groups[0]["lr"]

    _, plain, rate = train(filmed_loop(nonfinite="ignore"), False)
    step, losses, captured_rate = train(filmed_loop(nonfinite="ignore"), True)
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=1e-8)
    assert captured_rate == pytest.approx(rate, rel=1e-12)
    assert step.replays > 6
