"""hotloop's optimizers and averages inside a captured step: the eager trajectory to the bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop.optim import EMA, SGD, AdamW, AveragedWeights, Muon, masters_of, split_matrices

OPTIMIZERS = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "sgd": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "muon": lambda model: Muon(split_matrices(model), lr=0.02, weight_decay=0.01, adamw_lr=0.005),
}
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X[:, :2])


def train(loop, name, captured, *, poison=(), between=None, average=EMA):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 2))
    optimizer = OPTIMIZERS[name](model)
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=33)
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    model, optimizer, loader, scheduler = loop.prepare(model, optimizer, loader, scheduler)
    ema = average(model, optimizer=optimizer)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, scheduler, max_norm=1.0)
        ema.update()
        return loss

    run = loop.capture(step, mode="graph") if captured else step
    losses, moved, number = [], [], 0
    for _ in loop.epochs(4):
        for x, y in loader:
            losses.append(run(x * float("nan") if number in poison else x, y).detach())
            group = optimizer.param_groups[0]
            moved.append(float(group["betas"][0] if "betas" in group else group["momentum"]))
            number += 1
            if between is not None:
                between(number, model, ema)
    return {"run": run, "model": model, "optimizer": optimizer, "ema": ema, "losses": losses, "moved": moved}


def assert_same(a, b):
    for name, value in b.items():
        assert torch.equal(a[name], value), name


def assert_same_runs(a, b, *, losses=True):
    if losses:
        assert torch.equal(torch.stack(a["losses"]), torch.stack(b["losses"]))
    assert_same(a["model"].state_dict(), b["model"].state_dict())
    assert_same(a["ema"].averages, b["ema"].averages)
    assert a["moved"] == b["moved"]
    for x, y in zip(a["optimizer"].state.values(), b["optimizer"].state.values(), strict=True):
        assert_same(x, y)


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_trajectory_is_the_eager_one(graph_loop, name, precision):
    eager = train(graph_loop(precision=precision), name, False)
    held = set()
    captured = train(
        graph_loop(precision=precision),
        name,
        True,
        between=lambda n, model, ema: n > 4 and held.add(id(ema._optimizer.param_groups[0].get("betas"))),
    )
    # the same object at every step, so that a call finds in microseconds that nothing frozen has changed
    assert len(held) == 1
    assert captured["run"].reason is None
    assert captured["run"].captures == 1
    assert captured["run"].replays == 32 - 4
    assert_same_runs(captured, eager)
    # one-cycle lowers the momentum while the rate is high
    assert min(captured["moved"]) < 0.87
    assert captured["moved"][0] == pytest.approx(0.95, abs=0.005)
    assert (masters_of(captured["optimizer"]) is not None) == (precision == "bf16-true")


@pytest.mark.parametrize("average", [EMA, AveragedWeights])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_skipped_updates_inside_replays(graph_loop, name, average):
    bad = {0, 6, 7, 20}
    loops = [graph_loop(nonfinite="skip") for _ in range(2)]
    eager = train(loops[0], name, False, poison=bad, average=average)
    captured = train(loops[1], name, True, poison=bad, average=average)
    assert loops[0].skipped == loops[1].skipped == 4
    assert captured["ema"].averaged == 28
    assert captured["run"].replays > 20
    assert_same_runs(captured, eager, losses=False)


def test_evaluation_with_averages_between_replays_changes_nothing(graph_loop):
    def evaluate(number, model, ema):
        if number % 5 == 0:
            with ema.applied():
                model(X)

    plain = train(graph_loop(precision="bf16-true"), "adamw", True)
    between = train(
        graph_loop(precision="bf16-true"),
        "adamw",
        True,
        between=lambda n, model, ema: evaluate(n, model.eval(), ema) or model.train(),
    )
    assert between["run"].captures == 1
    assert_same_runs(between, plain)


def test_weights_loaded_between_replays_are_taken_by_the_masters(graph_loop):
    """A recording writes parameters from its masters: it must not write old ones over what was loaded."""
    saved = {}

    def reload(number, model, ema):
        if number == 8:
            saved.update({k: v.clone() for k, v in model.state_dict().items()})
        if number == 16:
            model.load_state_dict(saved)

    runs = [train(graph_loop(precision="bf16-true"), "sgd", captured, between=reload) for captured in (0, 1)]
    assert runs[1]["run"].replays > 20
    assert_same_runs(runs[1], runs[0])
    for p, master in masters_of(runs[1]["optimizer"]).items():
        assert torch.equal(p, master.bfloat16())


def test_decay_of_an_average_is_not_frozen(graph_loop):
    def change(number, model, ema):
        ema.decay = 0.5 if number > 15 else 0.9

    runs = [train(graph_loop(), "sgd", captured, between=change) for captured in (False, True)]
    assert runs[1]["run"].captures == 1
    assert_same_runs(runs[1], runs[0])
