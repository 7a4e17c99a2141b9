"""Clipping of some of the parameters, twice, or of several optimizers' at once: true gradients, and no NaN slips by."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))
# (kind, loss scaled, micro-batches per update)
LOOPS = [("host", False, 1), ("host", False, 2), ("resident", False, 1), ("resident", False, 2)]
LOOPS += [("resident", True, 1), ("resident", True, 2)]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def start(make_loop, kind, scaled, accumulation, *, optimizers=1, nonfinite="skip", **settings):
    """A loop, its model, and optimizers of one layer each, or of all."""
    loop = make_loop(kind, scaled=scaled, accumulation=accumulation, nonfinite=nonfinite)
    model = make_model()
    parts = [model] if optimizers == 1 else list(model)
    made = [torch.optim.SGD(part.parameters(), lr=0.1, fused=True, **settings) for part in parts]
    model, made = loop.prepare(model, made)
    return loop, model, made


def backpropagate(loop, model, loss=None):
    """All of a window; the body of the `for` runs once, inside its last micro-batch."""
    for i in range(loop._window.every):
        with loop.accumulate():
            loop.backward(F.mse_loss(model(X), Y) if loss is None else loss(model))
            if i == loop._window.every - 1:
                yield


def plain(clips, loss=None):
    """Gradients in plain torch after those clippings, the last norm, the model."""
    model = make_model()
    (F.mse_loss(model(X), Y) if loss is None else loss(model)).backward()
    for chosen, max_norm in clips:
        total = nn.utils.clip_grad_norm_(chosen(model), max_norm)
    return model, total


def first(model):
    return list(model[0].parameters())


def second(model):
    return list(model[1].parameters())


def everything(model):
    return list(model.parameters())


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize(
    "clips", [[(first, 0.1), (everything, 0.2)], [(second, 0.1), (everything, 0.2), (first, 1e-2)]]
)
def test_gradients_are_made_true_once_however_clippings_overlap(make_loop, loops, optimizers, clips):
    loop, model, _ = start(make_loop, *loops, optimizers=optimizers)
    for _ in backpropagate(loop, model):
        for chosen, max_norm in clips:
            total = loop.clip_grad_norm_(chosen(model), max_norm)
    right, norm = plain(clips)
    torch.testing.assert_close(total, norm, rtol=1e-5, atol=0)
    for p, q in zip(model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_in_a_clipped_part_refuses_the_update(make_loop, loops, value):
    loop, model, (optimizer,) = start(make_loop, *loops)
    before = copy.deepcopy(model.state_dict())
    for _ in backpropagate(loop, model):
        model[0].weight.grad[0, 0] = value
        loop.clip_grad_norm_(first(model), 0.1)
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert loop.skipped == 1


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_norm_over_two_optimizers_refuses_both(make_loop, loops, bad, value):
    """Its factor is 0 or NaN: what it leaves of the other's gradients is no gradient."""
    loop, model, optimizers = start(make_loop, *loops, optimizers=2, weight_decay=0.1)
    before = copy.deepcopy(model.state_dict())
    for _ in backpropagate(loop, model):
        model[bad].weight.grad[0, 0] = value
        loop.clip_grad_norm_(everything(model), 0.1)
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert loop.skipped == 2
    for optimizer in optimizers:
        optimizer.zero_grad()
    for _ in backpropagate(loop, model):
        for optimizer in optimizers:
            optimizer.step()
    assert not any(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("loops", LOOPS)
def test_a_layer_that_learns_from_a_later_step_on_is_seen(make_loop, loops):
    loop, model, (optimizer,) = start(make_loop, *loops)
    for _ in backpropagate(loop, model, lambda m: m[0](X).square().mean()):
        loop.clip_grad_norm_(first(model), 1.0)
        optimizer.step()
    optimizer.zero_grad()
    weights = copy.deepcopy(model.state_dict())
    for _ in backpropagate(loop, model):
        loop.clip_grad_norm_(first(model), 1.0)
        optimizer.step()
    right = make_model()
    right.load_state_dict(weights)
    F.mse_loss(right(X), Y).backward()
    expected = weights["1.weight"] - 0.1 * right[1].weight.grad
    torch.testing.assert_close(model[1].weight.detach(), expected, rtol=1e-5, atol=1e-7)
    optimizer.zero_grad()
    weights = copy.deepcopy(model.state_dict())
    for _ in backpropagate(loop, model):
        model[1].bias.grad[0] = float("nan")
        loop.clip_grad_norm_(first(model), 1.0)
        optimizer.step()
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def check_an_update(loop, model, optimizer, before):
    """One update from the weights `before` is plain PyTorch's, its norm too."""
    for _ in backpropagate(loop, model):
        total = loop.clip_grad_norm_(everything(model), 1e3)
        optimizer.step()
    right, norm = plain([(everything, 1e3)])
    torch.testing.assert_close(total, norm, rtol=1e-5, atol=0)
    for (k, p), q in zip(model.named_parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), before[k] - 0.1 * q.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loops", [loops for loops in LOOPS if loops[2] == 1])
def test_gradients_that_the_model_cleared_after_clipping_are_made_true_anew(make_loop, loops):
    loop, model, (optimizer,) = start(make_loop, *loops)
    before = copy.deepcopy(model.state_dict())
    for _ in backpropagate(loop, model):
        loop.clip_grad_norm_(everything(model), 0.1)
        model.zero_grad()
    check_an_update(loop, model, optimizer, before)


@pytest.mark.parametrize("loops", [loops for loops in LOOPS if loops[2] == 1])
@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_second_backward_after_a_clipping_is_seen_too(make_loop, loops, value):
    """One loss and its clipping after the other, for one optimizer."""
    loop, model, (optimizer,) = start(make_loop, *loops)
    before = copy.deepcopy(model.state_dict())
    right = make_model()
    inner = right[0](X).square().mean()
    inner.backward()
    nn.utils.clip_grad_norm_(first(right), 0.1)
    F.mse_loss(right[1](right[0](X).detach()), Y).backward()
    loop.backward(model[0](X).square().mean())
    loop.clip_grad_norm_(first(model), 0.1)
    loop.backward(F.mse_loss(model[1](model[0](X).detach()), Y))
    if value is not None:
        model[1].weight.grad[0, 0] = value
    optimizer.step()
    for (k, p), q in zip(model.named_parameters(), right.parameters(), strict=True):
        expected = before[k] - 0.1 * q.grad if value is None else before[k]
        torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loops", LOOPS)
def test_an_update_given_up_after_clipping_leaves_nothing_to_the_next(make_loop, loops):
    loop, model, (optimizer,) = start(make_loop, *loops)
    before = copy.deepcopy(model.state_dict())
    for _ in backpropagate(loop, model):
        model[0].weight.grad[0, 0] = float("inf")
        loop.clip_grad_norm_(everything(model), 0.1)
        optimizer.zero_grad()
    check_an_update(loop, model, optimizer, before)
    optimizer.zero_grad()
    before = copy.deepcopy(model.state_dict())
    for _ in backpropagate(loop, model):
        loop.clip_grad_norm_(everything(model), 0.1)
        optimizer.zero_grad()
    for _ in backpropagate(loop, model):
        model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("loops", [loops for loops in LOOPS if not loops[1]])
def test_ignored_is_what_is_not_finite_in_a_clipping_too(make_loop, loops):
    loop, model, (optimizer,) = start(make_loop, *loops, nonfinite="ignore")
    for _ in backpropagate(loop, model):
        model[0].weight.grad[0, 0] = float("nan")
        loop.clip_grad_norm_(everything(model), 0.1)
        optimizer.step()
    assert all(p.isnan().all() for p in model.parameters())


def test_no_gradients_at_all_have_a_norm_of_zero(make_loop):
    loop, _, (optimizer,) = start(make_loop, "resident", True, 1)
    assert loop.update(optimizer, max_norm=1.0).item() == 0.0
    assert loop.skipped == 0


@pytest.mark.parametrize("nonfinite", ["stop", "skip", "ignore"])
def test_an_overflow_refuses_the_update_of_one_optimizer_alone(make_loop, nonfinite):
    """What follows a step (schedules, averages) asks what became of it after the other optimizer's step."""
    from hotloop.optim import EMA

    loop, model, optimizers = start(make_loop, "resident", True, 1, optimizers=2, nonfinite=nonfinite)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
    schedulers = loop.prepare(schedulers)
    averages = [EMA(model, optimizer=o) for o in optimizers]
    for i in range(3):
        loop.backward(F.mse_loss(model(X), Y) * 1e-3)
        if i == 1:
            model[0].weight.grad[0, 0] = float("inf")
        for step in (
            [o.step for o in optimizers],
            [s.step for s in schedulers],
            [a.update for a in averages],
        ):
            step[0]()
            step[1]()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert [s.get_last_lr() for s in schedulers] == [[0.025], [0.0125]]
    assert [a.averaged for a in averages] == [2, 3]
    assert loop.skipped == 1
    assert loop._state.scale.value.item() == 32768.0


def test_a_loss_that_is_not_finite_stops_all_optimizers_in_fp16_too(make_loop):
    loop, model, optimizers = start(make_loop, "resident", True, 1, optimizers=2, nonfinite="stop")
    loop.backward(F.mse_loss(model[1](model[0](X).detach()), Y) * float("nan"))
    optimizers[1].step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    before = copy.deepcopy(model.state_dict())
    loop.backward(F.mse_loss(model(X), Y) * 1e-3)
    optimizers[0].step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
