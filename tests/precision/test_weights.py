"""Weights stored in bf16 with fp32 masters: the trajectory of bf16 autocast, whatever the order of preparing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.errors import NonFiniteError, PrepareError
from hotloop.optim import masters_of
from hotloop.precision import Precision, restore_weights, store_in_bf16

NO_MASTERS = Precision("bf16-true", master="none")


class Run:
    """A small training in one precision; batches are drawn alike in all."""

    def __init__(
        self,
        precision: str | Precision,
        *,
        order: str = "together",
        optimizer: Any = torch.optim.AdamW,
        **loop: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        self.loop = hotloop.Loop(precision, device="cpu", record=False, seed=0, **loop)
        data = torch.utils.data.TensorDataset(torch.randn(192, 8, generator=torch.Generator().manual_seed(0)))
        loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
        if order == "together":
            self.loop.prepare(self.optimizer, self.model)
        else:
            first, second = self.model, self.optimizer
            for thing in (first, second) if order == "model first" else (second, first):
                self.loop.prepare(thing)
        self.loader = self.loop.prepare(loader)

    def go(
        self, epochs: int = 2, *, clip: float | None = None, save: tuple[int, Path] | None = None
    ) -> list[float]:
        losses: list[float] = []
        for _ in self.loop.epochs(epochs):
            for (x,) in self.loader:
                loss = (self.model(x) - x[:, :4]).square().mean()
                self.loop.backward(loss)
                self.loop.update(self.optimizer, max_norm=clip)
                losses.append(loss.item())
                if save is not None and len(losses) == save[0]:
                    self.loop.save_state(save[1], wait=True)
                    return losses
        return losses


def test_only_what_may_be_rounded_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Embedding(4, 4))
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    found = store_in_bf16(model, masters=False)
    assert found.stored == ["0.weight", "0.bias", "3.weight"]
    assert found.kept == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert str(found) == "3 parameters stored in bf16, 4 of normalisation layers in fp32"
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {torch.float32}
    for name, p in model.named_parameters():
        original = before[[id(q) for q in parameters].index(id(p))]
        right = original if name in found.kept else original.bfloat16()
        assert torch.equal(p.detach(), right)
    restore_weights(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_shared_weights_stay_shared() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(4, 4), "b": nn.Linear(4, 4, bias=False)})
    model.b.weight = model.a.weight
    assert store_in_bf16(model, masters=False).stored == ["a.weight"]
    assert model.b.weight is model.a.weight


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, hotloop.optim.AdamW])
def test_the_trajectory_is_that_of_bf16_autocast_to_the_bit(optimizer: Any) -> None:
    right = Run("bf16", optimizer=optimizer)
    losses = right.go()
    mine = Run("bf16-true", optimizer=optimizer)
    assert mine.go() == losses
    masters = masters_of(mine.optimizer)
    assert masters is not None
    # autocast keeps fp32 weights and rounds them in each forward: those are the masters here
    for p, q in zip(mine.model.parameters(), right.model.parameters(), strict=True):
        master = masters.get(p)
        full = p if master is None else master
        assert torch.equal(full.detach(), q.detach())
        assert torch.equal(p.detach(), q.detach().to(p.dtype))


def test_without_masters_it_is_another_trajectory() -> None:
    small = Run(NO_MASTERS, optimizer=lambda p, lr: torch.optim.SGD(p, lr=1e-4))
    right = Run("bf16", optimizer=lambda p, lr: torch.optim.SGD(p, lr=1e-4))
    first = small.model[0].weight.detach().clone()
    small.go()
    right.go()
    # steps smaller than half a last digit are lost
    stuck = (small.model[0].weight.detach() == first).float().mean().item()
    moved = (right.model[0].weight.detach().bfloat16() == first).float().mean().item()
    assert stuck > moved
    assert masters_of(small.optimizer) is None


def test_the_order_of_preparing_does_not_matter() -> None:
    losses = Run("bf16-true", order="together").go(clip=1.0)
    assert Run("bf16-true", order="model first").go(clip=1.0) == losses
    assert Run("bf16-true", order="optimizer first").go(clip=1.0) == losses


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, hotloop.optim.AdamW])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_group_that_is_added_late_has_masters_too(optimizer: Any, loaded: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    full = [p.detach().clone() for p in model[1].parameters()]
    made = optimizer(model[0].parameters(), lr=0.01)
    loop = hotloop.Loop("bf16-true", device="cpu", record=False)
    model, made = loop.prepare(model, made)
    x = torch.randn(4, 8)

    def train() -> None:
        loop.backward(model(x).square().mean())
        made.step()
        model.zero_grad()

    train()
    made.add_param_group({"params": list(model[1].parameters())})
    if loaded:
        with torch.no_grad():
            model[1].bias.fill_(0.5)
        full[1].fill_(0.5)
    reference = [nn.Parameter(f.clone()) for f in full]
    right = optimizer(reference, lr=0.01)
    for _ in range(3):
        loop.backward(model(x).square().mean())
        for q, p in zip(reference, model[1].parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        made.step()
        right.step()
        model.zero_grad()
    masters = masters_of(made)
    assert masters is not None
    for p, q in zip(model[1].parameters(), reference, strict=True):
        master = masters.get(p)
        assert master is not None
        assert torch.equal(master, q.detach())
        assert torch.equal(p.detach(), master.bfloat16())


def test_an_optimizer_of_two_models_prepared_one_after_the_other() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    kept = [a.weight.detach().clone(), b.weight.detach().clone()]
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    loop = hotloop.Loop("bf16-true", device="cpu", record=False)
    loop.prepare(a)
    loop.prepare(optimizer)
    loop.prepare(b)
    masters = masters_of(optimizer)
    assert masters is not None
    for p, full in zip((a.weight, b.weight), kept, strict=True):
        master = masters.get(p)
        assert master is not None
        assert torch.equal(master, full)
    loop.end_training()


def test_clipping_measures_in_fp32() -> None:
    mine, right = Run("bf16-true"), Run("bf16")
    for run in (mine, right):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
        run.loop.backward((run.model(x) - x[:, :4]).square().mean() * 100)
    norms = [run.loop.clip_grad_norm_(run.model.parameters(), 1.0) for run in (mine, right)]
    assert norms[0].dtype == torch.float32
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    left = torch.cat([p.grad.flatten().float() for p in mine.model.parameters() if p.grad is not None])
    assert left.norm().item() == pytest.approx(1.0, rel=3e-3)


def test_accumulation_sums_in_fp32() -> None:
    right = Run("bf16", accumulation=4).go(clip=1.0)
    mine = Run("bf16-true", accumulation=4)
    assert mine.go(clip=1.0) == right
    assert mine.model[0].weight.dtype == torch.bfloat16


def test_a_refused_update_leaves_masters_alone() -> None:
    run = Run("bf16-true", nonfinite="skip")
    run.go(1)
    masters = masters_of(run.optimizer)
    assert masters is not None
    before = [m.clone() for m in masters.tensors()] + [p.detach().clone() for p in run.model.parameters()]
    x = torch.full((16, 8), torch.inf)
    run.loop.backward(run.model(x).mean())
    run.loop.update(run.optimizer)
    after = [*masters.tensors(), *(p.detach() for p in run.model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert run.loop.skipped == 1
    stopping = Run("bf16-true")
    with pytest.raises(NonFiniteError):
        stopping.loop.backward(stopping.model(x).mean())
        stopping.loop.update(stopping.optimizer)
        stopping.go(1)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, hotloop.optim.AdamW])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_is_exact_to_the_bit(tmp_path: Path, optimizer: Any, accumulation: int) -> None:
    def make() -> Run:
        return Run("bf16-true", optimizer=optimizer, accumulation=accumulation)

    whole = make()
    losses = whole.go(clip=1.0)
    first = make().go(clip=1.0, save=(7, tmp_path))
    again = make()
    assert again.loop.resume(tmp_path)
    assert first + again.go(clip=1.0) == losses
    ours, theirs = masters_of(whole.optimizer), masters_of(again.optimizer)
    assert ours is not None
    assert theirs is not None
    assert all(torch.equal(a, b) for a, b in zip(ours.tensors(), theirs.tensors(), strict=True))
    assert list(whole.model.state_dict()) == list(nn.Sequential(*whole.model).state_dict())


def test_weights_loaded_afterwards_count() -> None:
    run = Run("bf16-true", optimizer=torch.optim.SGD)
    run.go(1)
    state = {k: torch.full_like(v, 0.5) for k, v in run.model.state_dict().items()}
    run.model.load_state_dict(state)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    x = torch.randn(16, 8)
    run.loop.backward(run.model(x).square().mean())
    run.loop.update(run.optimizer)
    assert run.model[0].weight.detach().eq(0.5).all()


def test_an_optimizer_that_was_not_prepared_is_refused() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = hotloop.Loop("bf16-true", device="cpu", record=False)
    loop.prepare(model)
    loop.backward(model(torch.randn(2, 8)).mean())
    with pytest.raises(PrepareError, match=r"SGD.step.*bf16.*prepare"):
        optimizer.step()
    # one of another model is none of its business
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    loop.prepare(optimizer)
    optimizer.step()
    loop.end_training()
    free = nn.Linear(8, 4)
    loop = hotloop.Loop(NO_MASTERS, device="cpu", record=False)
    loop.prepare(free)
    loop.backward(free(torch.randn(2, 8)).mean())
    torch.optim.SGD(free.parameters(), lr=0.1).step()
    loop.end_training()


def test_the_full_weights_can_be_had() -> None:
    run = Run("bf16-true")
    run.go(1)
    right = Run("bf16")
    right.go(1)
    masters = masters_of(run.optimizer)
    assert masters is not None
    restore_weights(run.model, dict(masters.items()))
    for mine, full in zip(run.model.parameters(), right.model.parameters(), strict=True):
        assert torch.equal(mine.detach(), full.detach())


def test_another_loop_takes_it_back_and_copies_are_plain() -> None:
    run = Run("bf16-true")
    run.go(1)
    other = copy.deepcopy(run.model)
    assert other[0].weight.dtype == torch.bfloat16
    assert type(other) is nn.Sequential
    values = [p.detach().float() for p in run.model.parameters()]
    loop = hotloop.Loop("fp32", device="cpu", record=False)
    loop.prepare(run.model)
    assert all(torch.equal(p.detach(), v) for p, v in zip(run.model.parameters(), values, strict=True))
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert run.model(torch.randn(4, 8)).dtype == torch.float32
    loop.end_training()
