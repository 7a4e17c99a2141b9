"""fp32 masters: the fp32 trajectory for 16-bit parameters, with hotloop's optimizers and with any other."""

import copy

import pytest
import torch
from torch import nn

import hotloop
from hotloop.optim import SGD, AdamW, MaskedStep, Muon, add_masters, choose_route, masters_of

ANY = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "own adamw": lambda p: AdamW(p, lr=1e-3, weight_decay=0.1),
    "own sgd": lambda p: SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.01),
    "own muon": lambda p: Muon([{"params": p[:1]}, {"params": p[1:], "use_muon": False}], lr=1e-3),
}


def make_weights():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).bfloat16()) for shape in [(5, 3), (3,), (2, 3)]]


def train(optimizer, weights, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for w in weights:
            w.grad = torch.randn(w.shape, generator=generator).bfloat16().to(w.dtype)
        optimizer.step()


def masters(optimizer, weights):
    return [masters_of(optimizer).get(w) for w in weights]


def assert_all_equal(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", sorted(ANY))
def test_masters_take_the_fp32_trajectory_and_parameters_are_their_rounding(name):
    weights = make_weights()
    wide = [nn.Parameter(w.detach().float()) for w in weights]
    start = [w.detach().clone() for w in weights]
    ours, theirs = add_masters(ANY[name](weights)), ANY[name](wide)
    train(ours, weights, range(25))
    train(theirs, wide, range(25))
    assert_all_equal(masters(ours, weights), [w.detach() for w in wide])
    assert_all_equal([w.detach() for w in weights], [w.detach().bfloat16() for w in wide])
    assert not any(torch.equal(a, b) for a, b in zip(weights, start, strict=True))
    for w in weights:
        assert all(
            v.dtype == torch.float32
            for v in ours.state[w].values()
            if isinstance(v, torch.Tensor) and v.dim()
        )
        assert w.grad.dtype == torch.bfloat16
    assert [id(p) for group in ours.param_groups for p in group["params"]] == [id(w) for w in weights]


@pytest.mark.parametrize("name", sorted(ANY))
def test_state_dict_carries_them_and_resuming_is_exact(name, tmp_path):
    weights = make_weights()
    optimizer = add_masters(ANY[name](weights))
    train(optimizer, weights, range(7))
    torch.save(
        {"weights": [w.detach() for w in weights], "optimizer": optimizer.state_dict()}, tmp_path / "x"
    )
    train(optimizer, weights, range(7, 12))
    saved = torch.load(tmp_path / "x", weights_only=True)
    again = [nn.Parameter(w) for w in saved["weights"]]
    other = add_masters(ANY[name](again))
    other.load_state_dict(saved["optimizer"])
    train(other, again, range(7, 12))
    assert_all_equal(masters(other, again), masters(optimizer, weights))
    assert_all_equal(again, weights)


@pytest.mark.parametrize("name", ["adamw", "own adamw"])
def test_state_saved_before_the_first_step(name):
    weights = make_weights()
    precise = {w: w.detach().float() * (1 + 1e-4) for w in weights}
    optimizer = add_masters(ANY[name](weights), precise)
    saved = copy.deepcopy(optimizer.state_dict())
    other = add_masters(ANY[name](make_weights()))
    other.load_state_dict(saved)
    mine = other.param_groups[0]["params"]
    assert_all_equal(masters(other, mine), precise.values())
    train(optimizer, weights, range(3))
    train(other, mine, range(3))
    assert_all_equal(masters(other, mine), masters(optimizer, weights))


@pytest.mark.parametrize("name", ["adamw", "own adamw"])
def test_values_it_was_rounded_from_are_kept(name):
    torch.manual_seed(1)
    wide = [torch.randn(4, 3), torch.randn(3)]
    weights = [nn.Parameter(w.bfloat16()) for w in wide]
    optimizer = add_masters(ANY[name](weights), dict(zip(weights, wide, strict=True)))
    assert_all_equal(masters(optimizer, weights), wide)
    reference = [nn.Parameter(w.clone()) for w in wide]
    train(optimizer, weights, range(5))
    train(ANY[name](reference), reference, range(5))
    assert_all_equal(masters(optimizer, weights), [w.detach() for w in reference])


@pytest.mark.parametrize("name", ["sgd", "own adamw"])
def test_a_parameter_that_somebody_sets_is_believed(name):
    """Loading a model's weights must not be undone by masters of the old ones; equal ones keep their precision."""
    weights = make_weights()
    optimizer = add_masters(ANY[name](weights))
    train(optimizer, weights, range(4))
    before = [m.clone() for m in masters(optimizer, weights)]
    with torch.no_grad():
        weights[0].copy_(torch.ones(5, 3))
        weights[0][0, 0] = before[0][0, 0]
        weights[1].mul_(1.0)
    optimizer.state_dict()
    now = masters(optimizer, weights)
    expected = torch.ones(5, 3)
    expected[0, 0] = before[0][0, 0]
    assert torch.equal(now[0], expected)
    assert_all_equal(now[1:], before[1:])


def test_fp32_parameters_have_none_and_master_false_keeps_none():
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).bfloat16())]
    optimizer = AdamW(weights)
    train(optimizer, weights, range(2))
    assert "master" not in optimizer.state[weights[0]]
    assert optimizer.state[weights[1]]["master"].dtype == torch.float32
    weights = make_weights()
    optimizer = AdamW(weights, master=False)
    train(optimizer, weights, range(2))
    assert masters_of(optimizer) is None
    assert optimizer.state[weights[0]]["exp_avg"].dtype == torch.bfloat16
    assert masters_of(torch.optim.SGD(weights, lr=0.1)) is None


def test_closures_see_the_models_own_parameters():
    results = []
    for narrow in (True, False):
        weights = [w if narrow else nn.Parameter(w.detach().float()) for w in make_weights()]
        optimizer = torch.optim.SGD(weights, lr=0.25)
        if narrow:
            add_masters(optimizer)

        def closure(optimizer=optimizer, weights=weights, narrow=narrow):
            listed = optimizer.param_groups[0]["params"]
            assert all(a is b for a, b in zip(listed, weights, strict=True))
            assert all((w.dtype == torch.bfloat16) == narrow for w in listed)
            optimizer.zero_grad()
            # a gradient that bfloat16 holds exactly
            loss = sum((w * torch.full_like(w, 0.5)).sum() for w in listed)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        results.append([w.detach().bfloat16() for w in weights])
    assert_all_equal(*results)


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "fused"])
@pytest.mark.parametrize("bad", [{0}, {2, 3}])
def test_refused_updates_leave_no_trace_in_them(name, bad):
    results = []
    for steps in ([s for s in range(6) if s not in bad], range(6)):
        weights = make_weights()
        optimizer = add_masters(ANY[name](weights))
        route = choose_route(optimizer, "stop")
        masked = MaskedStep(optimizer, optimizer.step, "stop")
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for w in weights:
                w.grad = torch.randn(w.shape, generator=generator).bfloat16()
                if step in bad:
                    w.grad.fill_(float("nan"))
            refuse = torch.tensor(float(step in bad))
            if route == "fused":
                optimizer.found_inf = refuse
                optimizer.step()
            else:
                masked(refuse)
        results.append(masters(optimizer, weights) + [w.detach() for w in weights])
    assert_all_equal(*results)


def test_a_scheduler_made_before_or_after():
    for first in (True, False):
        weights = make_weights()
        optimizer = torch.optim.SGD(weights, lr=0.1)
        if first:
            add_masters(optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if not first:
            add_masters(optimizer)
        train(optimizer, weights, range(2))
        schedule.step()
        assert masters_of(optimizer).get(weights[0]).dtype == torch.float32


def test_an_optimizer_with_a_list_of_its_own_is_an_error():
    with pytest.raises(hotloop.HotloopError, match="LBFGS keeps a list of its parameters"):
        add_masters(torch.optim.LBFGS(make_weights()))


def test_fp32_and_bf16_parameters_in_one_group():
    """Both are updated in float32 and counted once, only one kind is rounded; also from a loaded state."""
    weights = [nn.Parameter(torch.ones(3).bfloat16()), nn.Parameter(torch.ones(3))]
    weights += [nn.Parameter(torch.full((2,), 2.0).bfloat16())]
    wide = [nn.Parameter(w.detach().float()) for w in weights]
    reference = torch.optim.AdamW(wide, lr=0.01)
    saved = None
    for first in (0, 3):
        optimizer = AdamW(weights, lr=0.01)
        if saved is not None:
            optimizer.load_state_dict(saved)
        train(optimizer, weights, range(first, first + 3))
        train(reference, wide, range(first, first + 3))
        saved = optimizer.state_dict()
        assert [optimizer.state[w]["step"].item() for w in weights] == [first + 3.0] * 3
        for w, expected in zip(weights, wide, strict=True):
            master = masters_of(optimizer).get(w)
            assert torch.equal(w if master is None else master, expected)
            assert torch.equal(w, expected.to(w.dtype))


@pytest.mark.parametrize("name", sorted(ANY))
@pytest.mark.parametrize("narrow_before", [False, True])
def test_masters_begin_after_steps_that_were_made_without(name, narrow_before):
    """Weights that become 16 bits wide in the middle, or a `master=False` that was taken back."""
    wide = [w.detach().float() for w in make_weights()]
    weights = [nn.Parameter(w.bfloat16() if narrow_before else w.clone()) for w in wide]
    optimizer = ANY[name](weights)
    for group in optimizer.param_groups:
        if "master" in group:
            group["master"] = False
    train(optimizer, weights, range(3))
    reference = [nn.Parameter(w.detach().float()) for w in weights]
    twin = ANY[name](reference)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert masters_of(twin) is None
    values = {w: w.detach().clone() for w in weights}
    for w in weights:
        w.grad = None
        w.data = w.data.bfloat16()
    add_masters(optimizer, values)
    assert_all_equal(masters(optimizer, weights), [v.float() for v in values.values()])
    train(optimizer, weights, range(3, 6))
    for step in range(3, 6):
        generator = torch.Generator().manual_seed(step)
        for w in reference:
            w.grad = torch.randn(w.shape, generator=generator).bfloat16().float()
        twin.step()
    assert_all_equal(masters(optimizer, weights), [w.detach() for w in reference])
    assert_all_equal([w.detach() for w in weights], [w.detach().bfloat16() for w in reference])


class Interrupted(torch.optim.SGD):
    interrupt = False

    def step(self, closure=None):
        if self.interrupt:
            raise KeyboardInterrupt
        return super().step(closure)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_step_that_raises_leaves_the_parameters_in_their_place(prepared):
    weights = make_weights()
    optimizer = add_masters(Interrupted(weights, lr=0.1, momentum=0.9))
    if prepared:
        loop = hotloop.Loop(device="cpu", record=False)
        optimizer = loop.prepare(optimizer)
    train(optimizer, weights, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        train(optimizer, weights, [2])
    optimizer.interrupt = False
    after = optimizer.state_dict()
    for number, entries in before["state"].items():
        assert entries.keys() == after["state"][number].keys()
        assert_all_equal(entries.values(), [after["state"][number][name] for name in entries])
    optimizer.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        train(optimizer, weights, [2])
    optimizer.interrupt = False
    optimizer.zero_grad()
    assert all(w.grad is None for w in weights)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], weights, strict=True))
    optimizer.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        train(optimizer, weights, [2])
    optimizer.interrupt = False
    optimizer.load_state_dict(before)
    train(optimizer, weights, [2])
    others = make_weights()
    whole = add_masters(Interrupted(others, lr=0.1, momentum=0.9))
    train(whole, others, range(3))
    assert_all_equal(masters(optimizer, weights), masters(whole, others))
