"""Which way an optimizer can be refused an update, and that a refused one leaves no trace."""

import copy

import pytest
import torch

import hotloop
from hotloop.errors import OptimizerError
from hotloop.optim import MaskedStep, choose_route, prefer_fused, takes_device_rate


def parameter():
    return torch.nn.Parameter(torch.tensor([1.0, -2.0]))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD([p], lr=0.1),
    "momentum": lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop([p], lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad([p], lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta([p], lr=1.0),
    "asgd": lambda p: torch.optim.ASGD([p], lr=0.1),
    "rprop": lambda p: torch.optim.Rprop([p], lr=0.1),
}


def test_routes():
    p = parameter()
    assert choose_route(torch.optim.AdamW([p], fused=True), "skip") == "fused"
    assert choose_route(torch.optim.SGD([p], lr=0.1, fused=True), "stop") == "fused"
    assert (
        choose_route(torch.optim.SGD([p], lr=0.1, momentum=0.9, dampening=0.5, fused=True), "skip")
        == "masked"
    )
    assert choose_route(torch.optim.SGD([p], lr=0.1), "skip") == "masked"
    assert choose_route(torch.optim.SGD([p], lr=0.1), "ignore") == "none"
    assert choose_route(torch.optim.NAdam([p]), "stop") == "none"
    with pytest.raises(hotloop.HotloopError, match="NAdam cannot skip"):
        choose_route(torch.optim.NAdam([p]), "skip")
    assert choose_route(torch.optim.SGD([p], lr=0.1), "ignore", scaled=True) == "masked"


def test_an_optimizer_that_cannot_skip_is_told_what_can():
    p = parameter()
    with pytest.raises(OptimizerError) as caught:
        choose_route(torch.optim.AdamW([p]), "stop", scaled=True)
    # no capturable=True, which torch refuses on the CPU, and no nonfinite=, which fp16 does not ask about
    assert str(caught.value).endswith('use hotloop.optim.AdamW or fused=True or precision="bf16"')
    with pytest.raises(OptimizerError) as caught:
        choose_route(torch.optim.NAdam([p]), "skip")
    assert str(caught.value).endswith('use nonfinite="stop"')
    for cure in (hotloop.optim.AdamW([p]), torch.optim.AdamW([p], fused=True)):
        assert choose_route(cure, "stop", scaled=True) == "fused"


def test_momentum_begins_at_zero_which_is_torchs_first_step():
    """A fused first step that is refused would keep a buffer of uninitialised memory."""
    p, q = parameter(), parameter()
    ours = torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=True)
    theirs = torch.optim.SGD([q], lr=0.1, momentum=0.9)
    assert choose_route(ours, "skip") == "fused"
    assert torch.equal(ours.state[p]["momentum_buffer"], torch.zeros(2))
    ours.found_inf = torch.tensor(1.0)
    p.grad = torch.full((2,), float("nan"))
    ours.step()
    assert torch.equal(p, q)
    assert torch.equal(ours.state[p]["momentum_buffer"], torch.zeros(2))
    ours.found_inf = torch.tensor(0.0)
    for _ in range(3):
        p.grad, q.grad = torch.ones(2), torch.ones(2)
        ours.step()
        theirs.step()
    assert torch.equal(p, q)


def step_beside(masked, p, theirs, q, bad):
    """Five steps, those of `bad` refused, beside an optimizer that does not meet them."""
    for i in range(5):
        value = float("nan") if i in bad else 0.5 + i
        p.grad = torch.full((2,), value)
        masked(torch.tensor(float(i in bad)))
        if i not in bad:
            q.grad = torch.full((2,), value)
            theirs.step()
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("bad", [{0}, {1, 2}, {0, 3}])
def test_masked_steps_leave_no_trace(name, bad):
    p, q = parameter(), parameter()
    ours, theirs = OPTIMIZERS[name](p), OPTIMIZERS[name](q)
    if choose_route(ours, "stop") != "masked":
        pytest.skip("counts its steps on the host")
    masked = MaskedStep(ours, ours.step, "stop")
    step_beside(masked, p, theirs, q, bad)
    for ours_state, theirs_state in zip(ours.state.values(), theirs.state.values(), strict=True):
        for key, value in theirs_state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(ours_state[key], value), key


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("bad", [{1}, {1, 2}, {2}])
def test_a_parameter_that_learns_late_meets_a_refused_step_first(name, bad):
    """Its state is made by a step whose gradient is NaN, and must not outlive it."""
    ps, qs = [parameter(), parameter()], [parameter(), parameter()]
    ours, theirs = OPTIMIZERS[name](ps[0]), OPTIMIZERS[name](qs[0])
    if choose_route(ours, "stop") != "masked":
        pytest.skip("counts its steps on the host")
    for optimizer, late in ((ours, ps[1]), (theirs, qs[1])):
        optimizer.add_param_group({"params": [late]})
    masked = MaskedStep(ours, ours.step, "skip")
    for i in range(5):
        value = float("nan") if i in bad else 0.5 + i
        for p in ps[: 1 + (i >= 1)]:
            p.grad = torch.full((2,), value)
        masked(torch.tensor(float(i in bad)))
        if i not in bad:
            for q in qs[: 1 + (i >= 1)]:
                q.grad = torch.full((2,), value)
            theirs.step()
        assert all(torch.equal(p, q) for p, q in zip(ps, qs, strict=True))
    for p, q in zip(ps, qs, strict=True):
        assert ours.state[p].keys() == theirs.state[q].keys()
        for key, value in theirs.state[q].items():
            assert not isinstance(value, torch.Tensor) or torch.equal(ours.state[p][key], value), key


@pytest.mark.parametrize("bad", [{0}, {1}, {1, 3}])
def test_state_that_each_step_makes_anew_is_selected_back(bad):
    class Anew(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["mean"] = 0.5 * state.get("mean", torch.zeros_like(p)) + p.grad
                # one longer with each step
                state["past"] = torch.cat([state.get("past", p.new_zeros(0)), p.grad.sum()[None]])
                p.sub_(state["mean"] + state["past"].sum())

    p, q = parameter(), parameter()
    ours, theirs = Anew([p]), Anew([q])
    masked = MaskedStep(ours, ours.step, "skip")
    step_beside(masked, p, theirs, q, bad)
    assert all(torch.equal(ours.state[p][key], theirs.state[q][key]) for key in ("mean", "past"))


def test_an_optimizer_that_shows_its_host_state_late_is_an_error_for_skip():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]]["count"] = 1

    p = parameter()
    optimizer = Counting([p], lr=0.1)
    masked = MaskedStep(optimizer, optimizer.step, "skip")
    p.grad = torch.ones(2)
    with pytest.raises(hotloop.HotloopError, match=r"Counting cannot skip.*'count' is a Python number"):
        masked(torch.tensor(0.0))
    # fp16 skips its overflows whatever else was asked for
    optimizer = Counting([p], lr=0.1)
    with pytest.raises(hotloop.HotloopError, match=r"Counting cannot skip.*'count' is a Python number"):
        MaskedStep(optimizer, optimizer.step, "stop", scaled=True)(torch.tensor(0.0))
    MaskedStep(optimizer, optimizer.step, "stop")(torch.tensor(0.0))


def test_fused_is_preferred_only_where_the_user_left_it_open():
    p = parameter()
    for optimizer in (torch.optim.Adam([p]), torch.optim.RMSprop([p])):
        before = copy.deepcopy(optimizer.param_groups[0].get("fused"))
        assert not prefer_fused(optimizer)  # on the CPU nothing is to be won
        assert optimizer.param_groups[0].get("fused") == before


def test_rates_on_the_device():
    p = parameter()
    assert takes_device_rate(torch.optim.AdamW([p], fused=True))
    assert not takes_device_rate(torch.optim.SGD([p], lr=0.1))
