"""Where a step is not one launch: forwards and backwards of its modules are, with the same training."""

import pytest
import torch
import torch.nn.functional as F
from tests.capture.conftest import RerunRecorder
from torch import nn

from hotloop.errors import CaptureError

X = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
SEEN = []


class Twofold(nn.Module):
    """Returns a dict, one of whose values does not learn."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, *, shift):
        out = self.body(x + shift)
        return {"out": out, "sign": out.detach().sign(), "nothing": None}


def train(loop, captured, *, steps=16, twice=False, accumulation=1):
    torch.manual_seed(0)
    model = Twofold()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    SEEN.clear()

    def step(x):
        out = model(x, shift=x.mean())["out"]
        loss = out.square().mean()
        if twice:
            loss = loss + model(x, shift=x.sum())["out"].square().mean()
        SEEN.append(loss.item())
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    run = loop.capture(step, mode="graph") if captured else step
    for i in range(steps):
        run(X[4 * i : 4 * i + 4])
    return run, model, list(SEEN)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("twice", [False, True])
def test_training_is_that_of_the_plain_loop(graph_loop, twice, accumulation, capsys):
    plain = train(graph_loop(accumulation=accumulation), False, twice=twice)
    said_before = capsys.readouterr().err
    run, model, seen = train(graph_loop(accumulation=accumulation), True, twice=twice)
    said = capsys.readouterr().err
    assert "SEEN.append" in run.reason
    assert "forward and backward of Twofold are launched as one each" in said
    assert said_before == ""
    # three forwards are made eagerly first; of two in a step one is replayed
    assert run._parts.replays == (15 if twice else 13)
    assert seen == pytest.approx(plain[2], rel=1e-5)
    for p, q in zip(model.state_dict().values(), plain[1].state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    # the module is the user's again
    assert model._compiled_call_impl is None


def test_what_backwards_read_lies_where_no_other_module_writes(graph_loop, monkeypatch):
    recorders = []
    record = RerunRecorder.record
    monkeypatch.setattr(
        RerunRecorder, "record", lambda self, *rest: (recorders.append(self), record(self, *rest))[1]
    )
    loop = graph_loop(nonfinite="ignore")
    first, second = loop.prepare(nn.Linear(4, 4), nn.Linear(4, 1))

    @loop.capture(mode="graph")
    def step(x):
        SEEN.append(1)
        loss = second(first(x).relu()).square().mean()
        loop.backward(loss)
        return loss

    for i in range(8):
        step(X[4 * i : 4 * i + 4])
    a, b, c, d = recorders
    assert a is b
    assert c is d
    assert a is not c
    assert loop._host.recorder() not in recorders


def test_a_second_backward_through_a_recorded_forward_is_an_error(graph_loop):
    loop = graph_loop(nonfinite="ignore")
    model = loop.prepare(nn.Linear(4, 1))

    @loop.capture(mode="graph")
    def step(x):
        SEEN.append(1)
        out = model(x)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()

    for _ in range(3):
        step(X[:4])
    with pytest.raises(CaptureError, match="second backward through one forward"):
        step(X[:4])


def test_gradients_reach_inputs_that_want_them(graph_loop):
    loop = graph_loop(nonfinite="ignore")
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = loop.prepare(first, second)

    def step(x):
        SEEN.append(1)
        loss = second(first(x).relu()).square().mean()
        loop.backward(loss)
        return loss

    run = loop.capture(step, mode="graph")
    for i in range(8):
        x = X[4 * i : 4 * i + 4]
        for p in (*first.parameters(), *second.parameters()):
            p.grad = None
        run(x)
        expected = torch.autograd.grad(
            F.linear(F.linear(x, first.weight, first.bias).relu(), second.weight, second.bias)
            .square()
            .mean(),
            [*first.parameters(), *second.parameters()],
        )
        for p, g in zip((*first.parameters(), *second.parameters()), expected, strict=True):
            torch.testing.assert_close(p.grad, g)
    assert run._parts.replays == 2 * 5


class Odd(nn.Linear):
    kind = "counter"

    def __init__(self):
        super().__init__(4, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_a_module_that_changes_itself_runs_eagerly(graph_loop, capsys):
    loop = graph_loop()
    model = loop.prepare(Odd())

    def step(x):
        SEEN.append(1)
        return model(x)

    run = loop.capture(step, mode="graph")
    for i in range(6):
        run(X[i : i + 1])
    assert model.calls == 6
    assert run._parts.replays == 0
    assert "changes its own attributes" in capsys.readouterr().err


def test_evaluation_and_changed_modules_are_obeyed(graph_loop):
    loop = graph_loop()
    model = loop.prepare(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.0)))

    def step(x):
        SEEN.append(1)
        return model(x)

    run = loop.capture(step, mode="graph")
    for _ in range(6):
        torch.testing.assert_close(run(X[:4]), F.linear(X[:4], model[0].weight, model[0].bias))
    before = run._parts.replays
    with torch.no_grad():
        model[0].weight.add_(1.0)
    torch.testing.assert_close(run(X[:4]), F.linear(X[:4], model[0].weight, model[0].bias))
    model.eval()
    run(X[:4])
    assert run._parts.replays == before + 1
    model.train()
    model[0].weight = nn.Parameter(torch.ones(2, 4))
    torch.testing.assert_close(run(X[:4]), F.linear(X[:4], model[0].weight, model[0].bias))
    assert run._parts.replays == before + 1
