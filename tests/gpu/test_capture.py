"""Captured steps on a CUDA device: the eager trajectory, what falls back, no waits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build(loop, *, dropout=0.0, optimizer="adamw", schedule=True, batch=64):
    torch.manual_seed(0)
    x = torch.randn(1024, 32)
    data = TensorDataset(x, x[:, :1] * 2)
    model = nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 1)
    )
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    }[optimizer]
    made = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, 500) if schedule else None
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    prepared = loop.prepare(model, made, loader, *([scheduler] if schedule else []))
    return (*prepared[:3], scheduler)


def train(captured, *, epochs=4, mode=None, settings=None, **kinds):
    loop = hotloop.Loop(seed=0, record=False, **(settings or {}))
    model, optimizer, loader, scheduler = build(loop, **kinds)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, scheduler, max_norm=1.0)
        loop.log(loss=loss)
        return loss

    run = loop.capture(step, mode=mode or "graph") if captured else step
    losses = [run(x, y) for _ in loop.epochs(epochs) for x, y in loader]
    return loop, run, model, scheduler, torch.stack(losses).detach()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_trajectory_is_the_eager_one(precision, optimizer, dropout):
    settings = {"precision": precision, "nonfinite": "skip"}
    eager = train(False, settings=settings, optimizer=optimizer, dropout=dropout)
    captured = train(True, settings=settings, optimizer=optimizer, dropout=dropout)
    assert captured[1].reason is None
    assert captured[1].replays == 4 * 16 - 3
    assert eager[3].get_last_lr() == captured[3].get_last_lr()
    torch.testing.assert_close(captured[4], eager[4], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["accumulation", "ragged", "foreach", "no schedule", "stop", "ignore"])
def test_variants(kind):
    settings = {"nonfinite": kind if kind in ("stop", "ignore") else "skip"}
    kinds = {}
    if kind == "accumulation":
        settings["accumulation"] = 3
    if kind == "ragged":
        kinds["batch"] = 100
    if kind == "foreach":
        kinds["optimizer"], settings["nonfinite"] = "foreach", "ignore"
    if kind == "no schedule":
        kinds["schedule"] = False
    eager = train(False, settings=settings, epochs=6, **kinds)
    captured = train(True, settings=settings, epochs=6, **kinds)
    assert captured[1].reason is None
    assert captured[1].replays > 30
    torch.testing.assert_close(captured[4], eager[4], rtol=1e-4, atol=1e-5)


def test_full_compiles_and_records():
    eager = train(False, settings={"precision": "bf16"})
    full = train(True, mode="full", settings={"precision": "bf16"})
    assert full[1].reason is None
    torch.testing.assert_close(full[4], eager[4], rtol=0.1, atol=0.02)


def test_a_waiting_step_falls_back_and_names_the_line(capsys):
    loop = hotloop.Loop(record=False)
    model, optimizer, loader, _ = build(loop)

    @loop.capture(mode="graph")
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        if loss.item() > 1e9:
            return loss
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    for x, y in loader:
        step(x, y)
    assert step.captures == 0
    assert "test_capture.py" in step.reason
    assert "loss.item()" in step.reason
    assert "runs eagerly" in capsys.readouterr().err


def test_an_operation_that_cannot_be_recorded_falls_back_and_training_goes_on():
    loop = hotloop.Loop(record=False)
    model, optimizer, loader, _ = build(loop)
    count = 0

    def hidden(x):
        nonlocal count
        count += 1
        if count > 3:
            torch.cuda.synchronize()
        return x

    @loop.capture(mode="graph")
    def step(x, y):
        loss = F.mse_loss(model(hidden(x)), y)
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    losses = [step(x, y) for x, y in loader]
    assert step.captures == 0
    assert step.reason is not None
    assert torch.isfinite(torch.stack(losses)).all()


def test_captured_steps_never_wait(tmp_path):
    loop = hotloop.Loop(seed=0, record=tmp_path / "run", nonfinite="skip", precision="bf16")
    model, optimizer, loader, scheduler = build(loop)

    @loop.capture(mode="graph")
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, scheduler, max_norm=1.0)
        loop.log(loss=loss)
        return loss

    def some(n):
        while loop.updates < n:
            for x, y in loader:
                step(x, y)

    some(20)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        some(1020)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.replays > 990
    loop.end_training()


def test_evaluation_step_and_modes():
    loop = hotloop.Loop(record=False)
    model, *_ = build(loop, dropout=0.5)
    model.eval()

    @loop.capture
    def evaluate(x):
        with torch.no_grad():
            return model(x)

    for _ in range(8):
        x = torch.randn(16, 32, device="cuda")
        torch.testing.assert_close(evaluate(x), model(x), rtol=1e-5, atol=1e-6)
    assert evaluate.captures == 1
    model.train()
    for _ in range(4):
        evaluate(torch.randn(16, 32, device="cuda"))
    assert evaluate.captures == 2


def test_memory_that_others_free_is_not_a_graph_s():
    """Dropping cuBLAS workspaces and cached memory, as reduce-overhead compilation does, leaves replays right."""
    eager = train(False, settings={"precision": "bf16"}, epochs=4)
    loop = hotloop.Loop(seed=0, record=False, precision="bf16")
    model, optimizer, loader, scheduler = build(loop)

    @loop.capture(mode="graph")
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, scheduler, max_norm=1.0)
        return loss

    losses = []
    for _ in loop.epochs(4):
        for x, y in loader:
            losses.append(step(x, y))
            if step.captures and len(losses) % 8 == 0:
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()
                junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
                del junk
    torch.testing.assert_close(torch.stack(losses).detach(), eager[4], rtol=0, atol=0)
