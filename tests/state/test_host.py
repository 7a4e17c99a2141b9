"""The step's state on the host: finite or not, in one pass that also multiplies."""

import pytest
import torch

import hotloop
from hotloop.state import HostState, LossScale, ResidentState, ScheduleTable


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_losses(value):
    state = HostState("stop")
    state.note_loss(torch.tensor(1.0))
    assert state.losses_finite()
    state.note_loss(torch.tensor([[value]]))
    assert not state.losses_finite()
    state.close_losses()
    assert state.losses_finite()


def test_a_loss_of_several_elements():
    state = HostState("stop")
    state.note_loss(torch.tensor([1.0, float("nan")]))
    assert not state.losses_finite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_gradients_are_multiplied_and_judged(dtype, factor):
    state = HostState("skip")
    gradients = [torch.full((n,), 2.0, dtype=dtype) for n in (1, 40)]
    assert state.judge(gradients, factor)
    assert all((g == 2.0 * factor).all() for g in gradients)
    gradients[1][7] = float("inf")
    assert not state.judge(gradients, factor)
    gradients[1][7] = 1.0
    assert state.judge(gradients, factor)
    assert state.judge([], factor)


@pytest.mark.parametrize(("nonfinite", "watching"), [("stop", True), ("skip", True), ("ignore", False)])
def test_what_watches(nonfinite, watching):
    assert HostState(nonfinite).watching is watching


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"nonfinite": "skip"}, {"accumulation": 2}])
def test_another_default_dtype_trains_as_plain_torch_does(dtype, settings):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        every = settings.get("accumulation", 1)
        plain, model = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        model.load_state_dict(plain.state_dict())
        loop = hotloop.Loop(record=False, device="cpu", **settings)
        model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for i in range(4):
            x = torch.randn(3, 4)
            loss = model(x).square().mean()
            loop.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            (plain(x).square().mean() / every).backward()
            if (i + 1) % every == 0:
                other.step()
                other.zero_grad()
        assert model.weight.dtype == dtype
        assert torch.equal(model.weight, plain.weight)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_devices_state_is_float32_whatever_the_default_is(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        state = ResidentState(torch.device("cpu"), "skip", scale=LossScale(torch.device("cpu")))
        verdict = state.new_verdict()
        gradient = torch.ones(2, dtype=torch.float32)
        state.note_loss(torch.ones((), dtype=torch.float32))
        state.judge(verdict, [gradient], 0.5)
        assert verdict.refuse.item() == 0.0
        assert gradient.tolist() == [0.5 / 65536.0] * 2
        table = ScheduleTable(torch.device("cpu"), 1)
        table.extend([[1e-3], [2e-3]])
        table.put_in_force()
        assert table.current.tolist() == torch.tensor([1e-3], dtype=torch.float32).tolist()
    finally:
        torch.set_default_dtype(before)
