"""Muon: its formula matrix by matrix in float64, torch's Muon, AdamW for the rest, refused updates."""

import copy
import math

import pytest
import torch
from torch import nn

import hotloop
from hotloop.kernels import gram
from hotloop.kernels import muon as kernels
from hotloop.optim import AdamW, Muon, masters_of, split_matrices
from hotloop.optim import adam as adam_module
from hotloop.optim import muon as muon_module
from hotloop.optim.orthogonal import QUINTIC

SHAPES = [(6, 4), (4, 6), (4, 4), (6, 4), (8, 2, 3, 3)]


def make_weights(dtype=torch.float64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def gradients(step, weights):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w.dtype) for w in weights]


def train(optimizer, weights, steps, *, bad=(), before=lambda step: None):
    for step in steps:
        before(step)
        for w, g in zip(weights, gradients(step, weights), strict=True):
            w.grad = g
            if step in bad:
                w.grad.fill_(float("nan"))
        if hasattr(optimizer, "found_inf"):
            optimizer.found_inf = torch.tensor(float(step in bad))
        optimizer.step()
    return [w.detach().clone() for w in weights]


def by_hand(weights, steps, *, lr, momentum=0.95, decay=0.0, nesterov=True, scale="original"):
    """The published formula, one matrix at a time."""
    values = [w.detach().clone() for w in weights]
    means = [torch.zeros_like(w) for w in values]
    for step in steps:
        for w, m, g in zip(values, means, gradients(step, values), strict=True):
            m.mul_(momentum).add_(g, alpha=1 - momentum)
            u = (1 - momentum) * g + momentum * m if nesterov else m
            x = u.reshape(len(u), -1)
            rows, columns = x.shape
            x = x / (x.norm() + 1e-7)
            a, b, c = QUINTIC
            for _ in range(5):
                gram = x @ x.T
                x = a * x + b * gram @ x + c * gram @ gram @ x
            factor = {
                "original": math.sqrt(max(1.0, rows / columns)),
                "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
                "none": 1.0,
            }[scale]
            w.mul_(1 - lr * decay).sub_(lr * factor * x.reshape(w.shape))
    return values


def assert_all_close(a, b, bound):
    assert max((x - y).abs().max().item() for x, y in zip(a, b, strict=True)) <= bound


@pytest.mark.parametrize("kind", ["numbers", "tensors", "flag"])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw", "none"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_formula_matrix_by_matrix(kind, scale, nesterov):
    weights = make_weights()
    expected = by_hand(weights, range(15), lr=0.05, decay=0.1, nesterov=nesterov, scale=scale)
    settings = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.95}
    if kind == "tensors":
        settings = {k: torch.tensor(v, dtype=torch.float64) for k, v in settings.items()}
    optimizer = Muon(weights, nesterov=nesterov, adjust_lr_fn=scale, **settings)
    if kind == "flag":
        optimizer.found_inf = torch.zeros(())
    assert_all_close(train(optimizer, weights, range(15)), expected, 1e-11)


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_it_is_torchs_muon_but_for_rounding(adjust):
    """torch rounds to bfloat16 before it divides by the norm, so a step differs by a few roundings of it."""
    shapes = [(32, 16), (16, 32), (16, 16)]
    theirs_weights = make_weights(torch.float32, shapes)
    ours_weights = copy.deepcopy(theirs_weights)
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": adjust}
    theirs = torch.optim.Muon(theirs_weights, **settings)
    ours = Muon(ours_weights, ns_dtype=torch.bfloat16, **settings)
    start = [w.detach().clone() for w in ours_weights]
    a = train(ours, ours_weights, range(20))
    b = train(theirs, theirs_weights, range(20))
    for x, y, begun in zip(a, b, start, strict=True):
        assert (x - y).norm() < 0.02 * (y - begun).norm()
    for x, y in zip(ours_weights, theirs_weights, strict=True):
        assert torch.equal(ours.state[x]["momentum_buffer"], theirs.state[y]["momentum_buffer"])


def test_state_goes_to_torchs_muon_and_back():
    theirs = torch.optim.Muon(weights := make_weights(shapes=SHAPES[:3]), lr=0.03, momentum=0.8)
    train(theirs, weights, range(3))
    ours = Muon(weights)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.03
    assert ours.param_groups[0]["momentum"] == 0.8
    for w in weights:
        assert torch.equal(ours.state[w]["momentum_buffer"], theirs.state[w]["momentum_buffer"])
    train(ours, weights, range(3, 5))
    theirs.load_state_dict(ours.state_dict())
    train(theirs, weights, range(5, 6))
    assert all(torch.isfinite(w).all() for w in weights)
    assert theirs.state[weights[0]]["momentum_buffer"].shape == weights[0].shape


@pytest.mark.parametrize("bad", [{0}, {0, 1, 5}, {4}])
def test_refused_updates_leave_no_trace(bad):
    results = []
    for steps, refused in (([s for s in range(8) if s not in bad], ()), (range(8), bad)):
        weights = make_weights()
        optimizer = Muon(
            [
                {"params": weights[:4], "use_muon": True},
                {"params": weights[4:], "use_muon": False, "weight_decay": 0.1},
            ],
            weight_decay=0.1,
        )
        optimizer.found_inf = torch.zeros(())
        results.append(train(optimizer, weights, steps, bad=refused))
        results[-1] += [state[k] for state in optimizer.state.values() for k in state]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)
    ).to(dtype)


def fit(model, optimizer, steps, scheduler=None):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x = torch.randn(8, 1, 4, 4, generator=generator, dtype=torch.float64)
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


def test_a_whole_model_is_split_and_the_rest_is_adamws():
    """One optimizer does what two would."""
    one, two = make_model(), make_model()
    muon = Muon(split_matrices(one), lr=0.02, adamw_lr=1e-3, adamw_weight_decay=0.05)
    assert [len(g["params"]) for g in muon.param_groups] == [2, 1, 5]
    assert "betas" not in muon.param_groups[0]
    assert "momentum" not in muon.param_groups[1]
    matrices = [two[0].weight, two[3].weight]
    spared = [p for p in two.parameters() if p.dim() < 2]
    first = Muon(matrices, lr=0.02)
    second = AdamW(
        [{"params": [two[5].weight], "weight_decay": 0.05}, {"params": spared, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    expected = None
    generator = torch.Generator().manual_seed(5)
    for _ in range(12):
        x = torch.randn(8, 1, 4, 4, generator=generator, dtype=torch.float64)
        two(x).square().mean().backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    expected = [p.detach() for p in two.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(fit(one, muon, 12), expected, strict=True))


def test_state_is_put_back_to_the_bit():
    for dtype in (torch.float64, torch.bfloat16):
        model = make_model(dtype)
        optimizer = Muon(split_matrices(model), weight_decay=0.1)
        fit(model, optimizer, 4)
        other = copy.deepcopy(model)
        again = Muon(split_matrices(other))
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        a, b = fit(model, optimizer, 4), fit(other, again, 4)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_one_cycle_moves_rates_and_momentum():
    model = make_model()
    optimizer = Muon(split_matrices(model))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 1e-3, 1e-3], total_steps=10)
    seen = []
    for _ in range(9):
        fit(model, optimizer, 1, schedule)
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    assert max(lr for lr, _ in seen) == pytest.approx(0.02, rel=0.1)
    assert min(m for _, m in seen) == pytest.approx(0.85, abs=0.01)


def test_what_is_no_matrix_is_an_error():
    with pytest.raises(hotloop.HotloopError, match=r"shape \(3,\) is no matrix; pass .*split_matrices"):
        Muon(nn.Linear(2, 3).parameters())
    with pytest.raises(hotloop.HotloopError, match="adjust_lr_fn='moon' is not known; valid: original"):
        Muon([nn.Parameter(torch.zeros(2, 2))], adjust_lr_fn="moon")


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_route_of_a_device_with_the_kernels_twins(monkeypatch, dtype, maximize):
    """Three launches around the products, also for channels_last kernels, whose matrix is what lies in memory."""
    calls = []
    original = kernels.muon_gather

    def gather(*tensors, dtype, **settings):
        calls.append(len(tensors[0]))
        # the products in float32: rounding between them is not what is compared
        return original(*tensors, dtype=torch.float32, **settings)

    monkeypatch.setattr(kernels, "muon_gather", gather)
    results = []
    for by_kernels in (False, True):
        for module in (adam_module, muon_module):
            monkeypatch.setattr(module, "kernels_run_on", lambda device, answer=by_kernels: answer)
        weights = make_weights(dtype)
        weights[4].data = weights[4].data.contiguous(memory_format=torch.channels_last)
        weights.append(nn.Parameter(torch.ones(3, dtype=dtype)))
        optimizer = Muon(
            [{"params": weights[:5]}, {"params": weights[5:], "use_muon": False}],
            lr=0.02,
            weight_decay=0.1,
            fused=by_kernels or None,
            maximize=maximize,
            ns_dtype=torch.bfloat16 if by_kernels else torch.float32,
        )
        optimizer.grad_scale = torch.full((), 4.0)
        for step in range(8):
            for w, g in zip(weights, gradients(step, weights), strict=True):
                w.grad = torch.empty_like(w).copy_(g)
            if step == 3:
                weights[0].grad.fill_(float("nan"))
            optimizer.found_inf = torch.tensor(float(step == 3))
            optimizer.step()
        pairs = masters_of(optimizer)
        results.append([w.detach() if pairs is None else pairs.get(w) for w in weights])
        assert all(torch.equal(w, m.to(dtype)) for w, m in zip(weights, results[-1], strict=True))
    # of one shape at a time, seven updates and a refused one
    assert calls == [2, 1, 1, 1] * 8
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-6)


@pytest.mark.parametrize("refuse", [False, True])
def test_unit_rows_are_weights_scaled_before_each_update(refuse):
    mine, theirs = make_weights(), make_weights()
    ours, plain = Muon(mine, lr=0.05, unit_rows=True), Muon(theirs, lr=0.05)
    if refuse:
        ours.found_inf = plain.found_inf = torch.zeros(())
    for step in range(6):
        for w in theirs:
            w.data.mul_(math.sqrt(len(w)) / w.detach().norm())
        for weights, optimizer in ((mine, ours), (theirs, plain)):
            for w, g in zip(weights, gradients(step, weights), strict=True):
                w.grad = g
            optimizer.step()
    assert_all_close([w.detach() for w in mine], [w.detach() for w in theirs], 1e-12)
    if refuse:
        before = [w.detach().clone() for w in mine]
        ours.found_inf.fill_(1.0)
        ours.step()
        assert all(torch.equal(a, b) for a, b in zip(before, mine, strict=True))


def test_unit_rows_leave_zeros():
    weight = nn.Parameter(torch.zeros(4, 6))
    weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    Muon([weight], lr=0.1, unit_rows=True).step()
    assert 0 < weight.norm() < 1


def test_matrices_of_whole_tiles_go_by_gram_matrices(monkeypatch):
    """Small and larger ones, float16 throughout; those of other shapes go on as they did, all scaled alike."""
    shapes = [(64, 32, 3, 3), (128, 160), (64, 96), (20, 33)]
    g = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=g).half() for s in shapes]
    slopes = [[torch.randn(s, generator=g).half() for s in shapes] for _ in range(3)]
    monkeypatch.setattr(muon_module, "kernels_run_on", lambda device: True)
    settings = {"lr": 0.2, "momentum": 0.6, "ns_steps": 3, "unit_rows": True}
    weights = [nn.Parameter(w.clone()) for w in start]
    exact = [nn.Parameter(w.double()) for w in start]
    calls = []
    original = gram.muon_step
    monkeypatch.setattr(gram, "muon_step", lambda w, *a, **k: (calls.append(len(w)), original(w, *a, **k)))
    optimizers = (
        Muon(weights, fused=True, ns_dtype=torch.float16, master=False, **settings),
        Muon(exact, fused=False, **settings),
    )
    for step in slopes:
        for w, e, slope in zip(weights, exact, step, strict=True):
            w.grad, e.grad = slope.clone(), slope.double()
        for optimizer in optimizers:
            optimizer.step()
    assert calls == [2, 1] * 3
    for w, e, begun in zip(weights, exact, start, strict=True):
        assert (w.double() - e).norm() < 0.01 * (e - begun.double()).norm()


def test_matrices_of_no_elements_are_left_alone():
    weights = make_weights() + [nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in [(0, 3), (3, 0)]]
    optimizer = Muon(weights, lr=0.1)
    train(optimizer, weights, range(3))
    others = make_weights()
    train(Muon(others, lr=0.1), others, range(3))
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=False))


def test_loading_a_state_leaves_the_settings_of_the_groups_as_they_were():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    optimizer = Muon(split_matrices(net), lr=0.02)
    before = [set(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(optimizer.state_dict())
    assert [set(group) for group in optimizer.param_groups] == before
