"""AdamW and Adam: torch's trajectory, numbers on the device, updates refused without a trace."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hotloop
from hotloop.optim import Adam, AdamW
from hotloop.optim import adam as adam_module

SETTINGS = {
    "no eps": {"eps": 0.0},
    "plain": {},
    "decay": {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True, "weight_decay": 0.05},
    "fused": {"fused": True, "weight_decay": 0.1},
}
PAIRS = {"adamw": (AdamW, torch.optim.AdamW), "adam": (Adam, torch.optim.Adam)}


def make_weights(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in [(5, 3), (3,), (), (2, 3, 2, 2)]
    ]


def gradients(step, weights):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w.dtype) for w in weights]


def train(optimizer, weights, steps, *, absent=lambda step, i: False, bad=(), before=lambda step: None):
    """`steps`: numbers of the steps to make; gradients depend on the number alone."""
    for step in steps:
        before(step)
        for i, (w, g) in enumerate(zip(weights, gradients(step, weights), strict=True)):
            w.grad = None if absent(step, i) else g
            if step in bad:
                w.grad.fill_(float("nan"))
        if hasattr(optimizer, "found_inf"):
            optimizer.found_inf = torch.tensor(float(step in bad))
        optimizer.step()
    return [w.detach().clone() for w in weights]


def assert_all_equal(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_all_close(a, b, bound):
    assert max((x - y).abs().max().item() for x, y in zip(a, b, strict=True)) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", sorted(SETTINGS))
@pytest.mark.parametrize("name", sorted(PAIRS))
def test_trajectory_is_torchs_to_the_bit(name, settings, dtype):
    results = []
    for make in PAIRS[name]:
        weights = make_weights(dtype)
        groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 7e-3}]
        results.append(train(make(groups, **SETTINGS[settings]), weights, range(80)))
    assert_all_equal(*results)


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_weights_without_a_gradient_keep_their_own_count(name):
    def absent(step, i):
        return (step >= 3 and i == 0) or (i == 2 and step % 2 == 0)

    results, counts = [], []
    for make in PAIRS[name]:
        weights = make_weights()
        optimizer = make(weights, weight_decay=0.1)
        results.append(train(optimizer, weights, range(20), absent=absent))
        counts.append([optimizer.state[w]["step"].item() for w in weights])
    assert_all_equal(*results)
    assert counts[0] == counts[1] == [3.0, 20.0, 10.0, 20.0]


@pytest.mark.parametrize("settings", ["plain", "decay", "amsgrad", "maximize"])
@pytest.mark.parametrize("name", sorted(PAIRS))
def test_numbers_on_the_device_give_torchs_trajectory(name, settings):
    """With a flag to obey, or settings that are tensors, nothing is read: every coefficient is a 0-d tensor."""
    ours, theirs = PAIRS[name]
    weights = make_weights()
    expected = train(theirs(weights, **SETTINGS[settings]), weights, range(60))
    weights = make_weights()
    optimizer = ours(weights, **SETTINGS[settings])
    optimizer.found_inf = torch.zeros(())
    assert_all_close(train(optimizer, weights, range(60)), expected, 1e-12)
    weights = make_weights()
    optimizer = ours(weights, **SETTINGS[settings])
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        group["betas"] = tuple(torch.tensor(b, dtype=torch.float64) for b in group["betas"])
        group["weight_decay"] = torch.tensor(group["weight_decay"], dtype=torch.float64)
    optimizer.found_inf = torch.zeros(())
    assert_all_close(train(optimizer, weights, range(60)), expected, 1e-12)


@pytest.mark.parametrize("flagged", [True, False])
def test_betas_that_a_table_moves(flagged):
    """One tensor for the first beta, filled between steps, against torch's Adam told by hand."""

    def beta(step):
        return 0.95 - 0.1 * abs(step - 20) / 20

    weights = make_weights()
    theirs = torch.optim.AdamW(weights, lr=1e-2)
    expected = train(
        theirs, weights, range(40), before=lambda s: theirs.param_groups[0].update(betas=(beta(s), 0.99))
    )
    weights = make_weights()
    moved = torch.zeros((), dtype=torch.float64)
    ours = AdamW(weights, lr=1e-2, betas=(moved, 0.99))
    if flagged:
        ours.found_inf = torch.zeros(())
    found = train(ours, weights, range(40), before=lambda s: moved.fill_(beta(s)))
    assert_all_close(found, expected, 1e-13)


@pytest.mark.parametrize("bad", [{0}, {0, 1, 7}, {5, 6}])
@pytest.mark.parametrize("settings", sorted(SETTINGS))
@pytest.mark.parametrize("name", sorted(PAIRS))
def test_refused_updates_leave_no_trace(name, settings, bad):
    results, states = [], []
    for steps, refused in (([s for s in range(12) if s not in bad], ()), (range(12), bad)):
        weights = make_weights()
        optimizer = PAIRS[name][0](weights, **SETTINGS[settings])
        optimizer.found_inf = torch.zeros(())
        results.append(train(optimizer, weights, steps, bad=refused))
        states.append(optimizer.state_dict()["state"])
    assert_all_equal(*results)
    for mine, theirs in zip(states[0].values(), states[1].values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in mine)


@pytest.mark.parametrize("kind", ["plain", "tensors"])
def test_torchs_grad_scaler_unscales_and_skips(kind):
    results = []
    for make in (AdamW, torch.optim.AdamW):
        weights = make_weights(torch.float32)
        optimizer = make(weights, lr=1e-2, fused=True if make is torch.optim.AdamW else None)
        if kind == "tensors" and make is AdamW:
            optimizer.param_groups[0]["betas"] = (torch.tensor(0.9), torch.tensor(0.999))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        for step in range(12):
            loss = sum((w * g).sum() for w, g in zip(weights, gradients(step, weights), strict=True))
            if step == 4:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([w.detach() for w in weights])
        assert optimizer.state[weights[0]]["step"].item() == 11
        assert not hasattr(optimizer, "found_inf")
    assert_all_close(*results, 2e-6)


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_state_goes_to_torchs_optimizer_and_back(name):
    ours, theirs = PAIRS[name]
    weights = make_weights()
    expected = train(theirs(weights, weight_decay=0.1), weights, range(30))
    weights = make_weights()
    first = theirs(weights)
    first.param_groups[0]["weight_decay"] = 0.1
    train(first, weights, range(10))
    second = ours(weights)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["weight_decay"] == 0.1
    assert not {"foreach", "capturable", "differentiable"} & second.param_groups[0].keys()
    train(second, weights, range(10, 20))
    third = theirs(weights)
    third.load_state_dict(second.state_dict())
    assert_all_equal(train(third, weights, range(20, 30)), expected)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))], ids=["copy", "pickle"]
)
def test_copies_go_on_alike(again):
    weights = make_weights()
    optimizer = AdamW(weights, lr=1e-2)
    train(optimizer, weights, range(5))
    other = again(optimizer)
    theirs = other.param_groups[0]["params"]
    assert theirs[0] is not weights[0]
    assert_all_equal(train(other, theirs, range(5, 9)), train(optimizer, weights, range(5, 9)))


def test_group_added_later_and_closure():
    results = []
    for make in (AdamW, torch.optim.AdamW):
        weights = make_weights()
        optimizer = make(weights[:2], lr=1e-2)
        train(optimizer, weights[:2], range(3))
        optimizer.add_param_group({"params": weights[2:], "lr": 1e-3})

        def closure(weights=weights, optimizer=optimizer):
            optimizer.zero_grad()
            loss = sum(w.square().sum() for w in weights)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(4)]
        results.append([w.detach() for w in weights] + [torch.tensor(losses)])
    assert_all_equal(*results)


def test_what_it_cannot_update_is_an_error_that_says_so():
    with pytest.raises(hotloop.HotloopError, match=r"AdamW: betas=\(0.9, 1.0\) must be in \[0, 1\)"):
        AdamW(make_weights(), betas=(0.9, 1.0))
    with pytest.raises(hotloop.HotloopError, match=r"AdamW: lr=-1.0 must be at least 0"):
        AdamW(make_weights(), lr=-1.0)
    with pytest.raises(hotloop.HotloopError, match="tensor of 2 elements"):
        AdamW(make_weights(), lr=torch.zeros(2))
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(hotloop.HotloopError, match=r"shape \(3, 2\) with a sparse gradient: use torch.optim"):
        AdamW(embedding.parameters()).step()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_one_launch_for_masters_and_tensor_settings(monkeypatch, maximize, scaled):
    """The route that a CUDA device takes, with the kernel's twin computing."""
    calls = []
    from hotloop import kernels

    original = kernels.fused_adamw
    monkeypatch.setattr(kernels, "fused_adamw", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    results = []
    for by_kernel in (False, True):
        monkeypatch.setattr(adam_module, "kernels_run_on", lambda device, answer=by_kernel: answer)
        weights = make_weights(torch.bfloat16)
        optimizer = AdamW(weights, lr=1e-2, fused=by_kernel or None, maximize=maximize, weight_decay=0.1)
        optimizer.found_inf = torch.zeros(())
        if scaled:
            optimizer.grad_scale = torch.full((), 8.0)
        train(optimizer, weights, range(15), bad={3})
        masters = [optimizer.state[w]["master"] for w in weights]
        assert all(torch.equal(w, m.bfloat16()) for w, m in zip(weights, masters, strict=True))
        assert {optimizer.state[w]["step"].item() for w in weights} == {14.0}
        results.append(masters)
    assert len(calls) == 15
    assert_all_close(*results, 1e-6)
