"""Steps of torch's Adam and AdamW through the kernel's interface are torch's own, on torch's own state."""

import copy

import pytest
import torch
from torch import nn

from hotloop.optim import add_masters
from hotloop.optim.masters import masters_of
from hotloop.optim.one_launch import OneLaunch


def make(kind=torch.optim.AdamW, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "weight_decay": 0.0}]
    optimizer = kind(groups, lr=1e-2, weight_decay=0.1, fused=True, **settings)
    return model, optimizer


def backward(model, k):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(4, 5, generator=generator).to(next(model.parameters()).dtype)
    model.zero_grad()
    model(x).square().sum().backward()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_steps_are_torchs_and_torch_goes_on_from_them(kind):
    model, optimizer = make(kind)
    twin, plain = make(kind)
    kernel = OneLaunch(optimizer)
    backward(model, 0)
    # state is torch's to make
    assert not kernel.ready()
    for k in range(6):
        backward(model, k), backward(twin, k)
        if k in (0, 5):
            optimizer.step()
        else:
            assert kernel.ready()
            kernel(None, None)
        plain.step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        optimizer.state_dict()["state"], plain.state_dict()["state"], rtol=1e-5, atol=1e-7
    )


def test_clipping_goes_along_and_a_refused_step_changes_nothing():
    model, optimizer = make()
    twin, plain = make()
    backward(model, 0), backward(twin, 0)
    optimizer.step(), plain.step()
    kernel = OneLaunch(optimizer)
    backward(model, 1), backward(twin, 1)
    kernel(torch.tensor(0.25), torch.zeros(()))
    for p in twin.parameters():
        p.grad.mul_(0.25)
    plain.step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-5, atol=1e-7)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    next(model.parameters()).grad.fill_(float("nan"))
    kernel(torch.tensor(float("nan")), torch.ones(()))
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()["state"]), before, rtol=0, atol=0)


def test_masters_are_stepped_and_parameters_rounded_from_them():
    model, optimizer = make(dtype=torch.bfloat16)
    twin, plain = make(dtype=torch.bfloat16)
    add_masters(optimizer), add_masters(plain)
    kernel = OneLaunch(optimizer)
    for k in range(5):
        backward(model, k), backward(twin, k)
        if k == 0:
            optimizer.step()
        else:
            assert kernel.ready()
            kernel(None, None)
        plain.step()
        # the next gradients are made with the same weights, whatever the last bit of a master
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=2**-7, atol=1e-6)
            q.data.copy_(p)
    masters = masters_of(optimizer)
    for p in model.parameters():
        assert torch.equal(masters.get(p).bfloat16(), p)


def test_hooks_of_others_run():
    model, optimizer = make()
    backward(model, 0)
    optimizer.step()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    backward(model, 1)
    OneLaunch(optimizer)(None, None)
    assert seen == ["before", "after"]


def test_only_what_the_kernel_knows_is_taken():
    # on the CPU none: torch's own fused step is as good there
    assert OneLaunch.of(make()[1]) is None
    assert OneLaunch.of(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)) is None
    model, optimizer = make()
    backward(model, 0)
    optimizer.step()
    kernel = OneLaunch(optimizer)
    backward(model, 1)
    assert kernel.ready()
    weight = model[0].weight
    weight.grad = weight.grad.t().contiguous().t()
    assert not kernel.ready()
