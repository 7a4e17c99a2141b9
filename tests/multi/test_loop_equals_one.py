"""Two processes equal one: loss curve, gradient norm, learning rate and weights for the same global batch."""

import pytest
import torch

pytestmark = pytest.mark.multi


def train_all(rank, world, kind="host"):
    """What each scenario gave on this rank: the same code for one process and for two."""
    import os

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop
    from hotloop.loop import loop as loop_module
    from hotloop.state import ResidentState

    os.environ["HOTLOOP_PROGRESS"] = "0"
    torch.set_num_threads(1)
    kept = loop_module.make_state
    if kind == "resident":
        loop_module.make_state = lambda device, nonfinite, *, scaled: ResidentState(
            device, nonfinite, run_ahead=4
        )
    fused = True if kind == "resident" else None
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(30, 1, generator=generator, dtype=torch.float64)

    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()

    def train(
        *,
        accumulation=1,
        count=30,
        batch=4,
        weight=None,
        clip=None,
        nonfinite="stop",
        bad=None,
        optimizer="adamw",
        shuffle=False,
        epochs=2,
        plain=False,
    ):
        # N ranks take batches of `batch`; one process takes what they take together
        size = batch * (2 // world)
        inputs = x[:count].clone()
        if bad is not None:
            inputs[bad] = float("nan")
        loop = hotloop.Loop(
            device="cpu", record=False, accumulation=accumulation, nonfinite=nonfinite, seed=1
        )
        model = make_model()
        if optimizer == "adamw":
            rule = torch.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
        else:
            rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        loader = DataLoader(TensorDataset(inputs, y[:count], torch.arange(count)), size, shuffle=shuffle)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rule, 9)
        model, rule, loader, schedule = loop.prepare(model, rule, loader, schedule)
        out = {"loss": [], "norm": [], "lr": [], "gathered": []}
        try:
            for _ in loop.epochs(epochs):
                for inputs, targets, index in loader:
                    errors = (model(inputs) - targets).square()
                    if weight is None:
                        loss, n = errors.mean(), None
                    else:
                        mask = (index % 3 != 0).double()[:, None]
                        # a batch in which nothing counts, on one rank only
                        mask = mask * (index[:, None] // batch != 2)
                        n = mask.sum()
                        loss = (errors * mask).sum() / n.clamp(min=1)
                        n = int(n) if weight == "int" else n
                    loop.backward(loss, weight=n)
                    loop.mean("loss", loss, weight=len(inputs) if n is None else n)
                    norm = loop.clip_grad_norm_(model.parameters(), clip) if clip else None
                    boundary = loop._window.boundary
                    rule.step()
                    schedule.step()
                    rule.zero_grad()
                    gathered = loop.gather_for_metrics({"i": index, "e": errors.detach()})
                    out["gathered"] += gathered["i"].tolist()
                    if boundary:
                        out["loss"].append(loop.mean("loss"))
                        out["norm"].append(None if norm is None else norm.item())
                        out["lr"] += schedule.get_last_lr()
            loop.end_training()
        except hotloop.NonFiniteError as error:
            out["stopped"] = error.step
            loop._session.end("stopped")
        out["weights"] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        out["updates"], out["skipped"] = loop.updates, loop.skipped
        return out

    results = {
        "plain": train(),
        "sgd": train(optimizer="sgd"),
        "shuffled": train(shuffle=True),
        "clipped": train(clip=0.05),
        "dry rank": train(count=26, clip=1.0),
        "accumulation": train(accumulation=2, clip=1.0),
        "long window, dry rank": train(accumulation=4, count=26, optimizer="sgd"),
        "weights": train(weight="int", accumulation=2, clip=1.0),
        "weights on the device": train(weight="tensor", accumulation=2, optimizer="sgd"),
        "skip": train(nonfinite="skip", bad=13, optimizer="sgd"),
        "skip in a window": train(nonfinite="skip", bad=13, accumulation=2, clip=1.0),
        "stop": train(nonfinite="stop", bad=13, clip=1.0),
        "stop in a window": train(nonfinite="stop", bad=21, accumulation=2),
    }
    loop_module.make_state = kept
    return results


def assert_same(got, want, where=""):
    if isinstance(want, dict):
        assert set(got) == set(want), where
        for key in want:
            assert_same(got[key], want[key], f"{where} {key}")
    elif isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8, msg=lambda text: f"{where}: {text}")
    elif isinstance(want, list):
        assert len(got) == len(want), f"{where}: {got} {want}"
        for a, b in zip(got, want, strict=True):
            assert_same(a, b, where)
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=1e-5, nan_ok=True), where
    else:
        assert got == want, f"{where}: {got} {want}"


@pytest.mark.parametrize("kind", ["host", "resident"])
def test_two_processes_equal_one(run_ranks, kind, monkeypatch):
    import inspect

    monkeypatch.setenv("HOTLOOP_PROGRESS", "0")
    one = train_all(0, 1, kind)
    script = "from __future__ import annotations\n" + inspect.getsource(train_all)
    script += f"\ndef main(rank, world):\n    return train_all(rank, world, {kind!r})\n"
    first, second = run_ranks(2, script, timeout=240)
    for name, want in one.items():
        for ours in (first[name], second[name]):
            # the union of both ranks' samples in a step is one process's batch, in the same order
            assert_same(ours, want, name)
    assert one["plain"]["updates"] == 8
    assert one["skip"]["skipped"] == 2
    assert one["stop"]["stopped"] == 1
    assert torch.isfinite(one["stop"]["weights"]).all()
