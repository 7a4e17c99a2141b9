"""SGD: torch's trajectory, numbers on the device, updates refused without a trace."""

import pytest
import torch
from torch import nn

import hotloop
from hotloop.optim import SGD

SETTINGS = {
    "plain": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02, "maximize": True},
    "fused": {"lr": 0.1, "momentum": 0.8, "fused": True},
}


def make_weights(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in [(5, 3), (3,), (2, 3, 2, 2)]
    ]


def train(optimizer, weights, steps, *, bad=(), before=lambda step: None):
    for step in steps:
        before(step)
        generator = torch.Generator().manual_seed(step)
        for w in weights:
            w.grad = torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w.dtype)
            if step in bad:
                w.grad.fill_(float("inf"))
        if hasattr(optimizer, "found_inf"):
            optimizer.found_inf = torch.tensor(float(step in bad))
        optimizer.step()
    return [w.detach().clone() for w in weights]


def assert_all_equal(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", sorted(SETTINGS))
def test_trajectory_is_torchs_to_the_bit(settings, dtype):
    results = []
    for make in (SGD, torch.optim.SGD):
        weights = make_weights(dtype)
        results.append(train(make(weights, **SETTINGS[settings]), weights, range(60)))
    assert_all_equal(*results)


@pytest.mark.parametrize("settings", sorted(SETTINGS))
def test_numbers_on_the_device_give_torchs_trajectory(settings):
    weights = make_weights()
    expected = train(torch.optim.SGD(weights, **SETTINGS[settings]), weights, range(60))
    weights = make_weights()
    optimizer = SGD(weights, **SETTINGS[settings])
    for group in optimizer.param_groups:
        for name in ("lr", "momentum", "weight_decay"):
            group[name] = torch.tensor(group[name], dtype=torch.float64)
    found = train(optimizer, weights, range(60))
    optimizer = SGD(weights := make_weights(), **SETTINGS[settings])
    optimizer.found_inf = torch.zeros(())
    for result in (found, train(optimizer, weights, range(60))):
        assert max((a - b).abs().max() for a, b in zip(result, expected, strict=True)) < 1e-12


def test_momentum_that_a_table_moves():
    weights = make_weights()
    theirs = torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True)
    expected = train(
        theirs, weights, range(30), before=lambda s: theirs.param_groups[0].update(momentum=0.95 - 0.01 * s)
    )
    moved = torch.zeros((), dtype=torch.float64)
    ours = SGD(weights := make_weights(), lr=0.1, momentum=moved, nesterov=True)
    found = train(ours, weights, range(30), before=lambda s: moved.fill_(0.95 - 0.01 * s))
    assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) < 1e-13


@pytest.mark.parametrize("bad", [{0}, {0, 1, 7}, {5, 6}])
@pytest.mark.parametrize("settings", sorted(SETTINGS))
def test_refused_updates_leave_no_trace(settings, bad):
    results = []
    for steps, refused in (([s for s in range(12) if s not in bad], ()), (range(12), bad)):
        optimizer = SGD(weights := make_weights(), **SETTINGS[settings])
        optimizer.found_inf = torch.zeros(())
        results.append(train(optimizer, weights, steps, bad=refused))
        results[-1] += [state[k] for state in optimizer.state.values() for k in state]
    assert_all_equal(*results)


def test_momentum_set_later_begins_then():
    results = []
    for make in (SGD, torch.optim.SGD):
        optimizer = make(weights := make_weights(), lr=0.1)
        train(optimizer, weights, range(4))
        optimizer.param_groups[0]["momentum"] = 0.5
        results.append(train(optimizer, weights, range(4, 9)))
    assert_all_equal(*results)


def test_state_goes_to_torchs_optimizer_and_back():
    settings = SETTINGS["momentum"]
    expected = train(torch.optim.SGD(weights := make_weights(), **settings), weights, range(30))
    first = torch.optim.SGD(weights := make_weights(), **settings)
    train(first, weights, range(10))
    second = SGD(weights)
    second.load_state_dict(first.state_dict())
    train(second, weights, range(10, 20))
    third = torch.optim.SGD(weights)
    third.load_state_dict(second.state_dict())
    assert_all_equal(train(third, weights, range(20, 30)), expected)


def test_settings_it_does_not_know():
    with pytest.raises(hotloop.HotloopError, match="no dampening"):
        SGD(make_weights(), 0.1, 0.9, 0.1)
    with pytest.raises(hotloop.HotloopError, match="momentum > 0"):
        SGD(make_weights(), 0.1, nesterov=True)
    theirs = torch.optim.SGD(weights := make_weights(), lr=0.1, momentum=0.9, dampening=0.3)
    with pytest.raises(hotloop.HotloopError, match="no dampening"):
        SGD(weights).load_state_dict(theirs.state_dict())
