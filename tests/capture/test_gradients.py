"""Gradients around replays: made anew, added to, left lying, cleared by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

X = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))


def build(loop, optimizer="sgd"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    made = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
        "foreach": lambda: torch.optim.SGD(model.parameters(), lr=0.1, foreach=True),
    }[optimizer]()
    return loop.prepare(model, made)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("clear", ["each", "second", "third", "to zero"])
def test_a_step_that_is_a_backward_alone(graph_loop, clear):
    trails = []
    for captured in (False, True):
        loop = graph_loop(nonfinite="ignore")
        model, optimizer = build(loop)

        def step(x, loop=loop, model=model):
            loss = model(x).square().mean()
            loop.backward(loss)
            return loss

        run = loop.capture(step, mode="graph") if captured else step
        trail = []
        for i in range(24):
            run(X[2 * i : 2 * i + 2])
            trail += [p.grad.clone() for p in model.parameters()]
            if (i + 1) % {"each": 1, "second": 2, "third": 3, "to zero": 2}[clear] == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=clear != "to zero")
        trails.append(trail)
        if captured:
            assert run.reason is None
            assert run.replays > 10
    for a, b in zip(*trails, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_gradients_of_a_step_are_there_after_each_replay(graph_loop):
    loop = graph_loop()
    model, optimizer = build(loop)

    @loop.capture(mode="graph")
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loop.backward(loss)
        optimizer.step()
        return loss

    twin = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    for i in range(12):
        twin.load_state_dict(model.state_dict())
        x = X[4 * i : 4 * i + 4]
        step(x)
        twin.zero_grad()
        twin(x).square().mean().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    # without and with gradients of the step before
    assert step.captures <= 2
    assert step.replays > 6


@pytest.mark.parametrize("optimizer", ["sgd", "foreach"])
@pytest.mark.parametrize("cleared", ["first", "last"])
def test_an_optimizer_behind_the_graph_steps_between_backward_and_clearing(graph_loop, cleared, optimizer):
    trails = []
    for captured in (False, True):
        loop = graph_loop(nonfinite="ignore")
        model, made = build(loop, optimizer)

        def step(x, loop=loop, model=model, made=made):
            if cleared == "first":
                made.zero_grad()
            loss = model(x).square().mean()
            loop.backward(loss)
            made.step()
            if cleared == "last":
                made.zero_grad()
            return loss

        run = loop.capture(step, mode="graph") if captured else step
        trails.append(torch.stack([run(X[4 * i : 4 * i + 4]).detach() for i in range(16)]))
        if captured:
            assert run.reason is None
            assert run.replays > 8
    torch.testing.assert_close(trails[0], trails[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "foreach"])
@pytest.mark.parametrize("accumulation", [2, 3])
def test_the_first_of_a_window_makes_gradients_and_the_others_add(graph_loop, accumulation, optimizer):
    trails = []
    for captured in (False, True):
        loop = graph_loop(accumulation=accumulation, nonfinite="ignore")
        model, made = build(loop, optimizer)

        def step(x, loop=loop, model=model, made=made):
            loss = model(x).square().mean()
            loop.backward(loss)
            loop.update(made, max_norm=1.0)
            return loss

        run = loop.capture(step, mode="graph") if captured else step
        losses, waiting = [], []
        for i in range(30):
            waiting.append(next(model.parameters()).grad is None)
            losses.append(run(X[4 * i : 4 * i + 4]).detach())
        # no zeros are kept to add to: each window begins without gradients
        assert waiting == [i % accumulation == 0 for i in range(30)]
        trails.append(torch.stack(losses))
        if captured:
            assert run.reason is None
            assert run.captures == min(accumulation, 3)
            assert run.replays > 15
    torch.testing.assert_close(trails[0], trails[1], rtol=1e-5, atol=1e-6)


def test_windows_of_two_shapes_add_to_the_same_gradients(graph_loop):
    trails = []
    for captured in (False, True):
        loop = graph_loop(accumulation=2)
        model, made = build(loop)

        def step(x, loop=loop, model=model, made=made):
            loss = model(x).square().mean()
            loop.backward(loss, weight=4)
            loop.update(made)
            return loss

        run = loop.capture(step, mode="graph") if captured else step
        losses = []
        for i in range(48):
            rows = 4 if i % 3 else 2
            losses.append(run(X[4 * i : 4 * i + rows]).detach())
        trails.append(torch.stack(losses))
        if captured:
            assert run.captures == 4
            assert run.replays > 20
    torch.testing.assert_close(trails[0], trails[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nonfinite", ["stop", "skip", "ignore"])
def test_two_optimizers_whose_gradients_cross(graph_loop, nonfinite):
    trails = []
    for captured in (False, True):
        torch.manual_seed(0)
        loop = graph_loop(nonfinite=nonfinite)
        # the step of one optimizer lies between a forward through batch norm and its backward for the other
        make, judge = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.Linear(6, 1)
        make, judge, a, b = loop.prepare(
            make,
            judge,
            torch.optim.Adam(make.parameters(), fused=True),
            torch.optim.Adam(judge.parameters(), fused=True),
        )

        def gan(noise, real, loop=loop, make=make, judge=judge, a=a, b=b):
            b.zero_grad()
            fake = make(noise)
            worse = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
            loop.backward(worse)
            b.step()
            a.zero_grad()
            better = F.softplus(-judge(fake)).mean()
            loop.backward(better)
            a.step()
            return worse, better

        run = loop.capture(gan, mode="graph") if captured else gan
        generator = torch.Generator().manual_seed(1)
        rows = []
        for _ in range(20):
            noise = torch.randn(8, 4, generator=generator)
            rows.append(torch.stack(run(noise, torch.randn(8, 6, generator=generator))).detach())
        trails.append(torch.stack(rows))
        if captured:
            assert run.reason is None
            assert run.replays > 12
    torch.testing.assert_close(trails[0], trails[1], rtol=1e-5, atol=1e-6)
