"""hotloop's optimizers and averages on a CUDA device: captured as eager, skipped without a trace, near float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.optim import (
    EMA,
    SGD,
    AdamW,
    AveragedWeights,
    Muon,
    add_masters,
    masters_of,
    orthogonalise,
    split_matrices,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIMIZERS = {
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-2),
    "adamw foreach": lambda model: AdamW(model.parameters(), lr=1e-2, fused=False),
    "adamw of torch": lambda model: AdamW(model.parameters(), lr=1e-2, fused=True),
    "sgd": lambda model: SGD(model.parameters(), lr=5e-2, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "muon": lambda model: Muon(split_matrices(model), lr=0.02, weight_decay=0.01, adamw_lr=5e-3),
    "muon kernels": lambda model: Muon(
        split_matrices(model), lr=0.02, weight_decay=0.01, adamw_lr=5e-3, fused=True
    ),
}


def train(name, captured, *, schedule="cycle", precision="fp32", poison=(), drop=(), average=EMA, epochs=4):
    loop = hotloop.Loop(seed=0, record=False, nonfinite="skip", precision=precision)
    torch.manual_seed(0)
    x = torch.randn(1024, 32)
    model = nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1)
    )
    optimizer = OPTIMIZERS[name](model)
    rates = [group["lr"] for group in optimizer.param_groups]
    if schedule == "cycle":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=16 * epochs + 1)
    else:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loader = DataLoader(TensorDataset(x, x[:, :1] * 2), batch_size=64, shuffle=True)
    model, optimizer, loader, scheduler = loop.prepare(model, optimizer, loader, scheduler)
    average = average(model, optimizer=optimizer)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, scheduler, max_norm=1.0)
        average.update()
        return loss

    run = loop.capture(step, mode="graph") if captured else step
    losses, number = [], 0
    for _ in loop.epochs(epochs):
        for x, y in loader:
            number += 1
            if number not in drop:
                losses.append(run(x * float("nan") if number in poison else x, y).detach())
    group = optimizer.param_groups[0]
    moved = group["betas"][0] if "betas" in group else group["momentum"]
    return {
        "loop": loop,
        "run": run,
        "model": model,
        "optimizer": optimizer,
        "average": average,
        "losses": torch.stack(losses),
        "moved": moved,
        "lr": scheduler.get_last_lr(),
    }


def assert_same(a, b):
    for name, value in b.items():
        assert torch.equal(a[name], value), name


def assert_same_runs(a, b):
    assert_same(a["model"].state_dict(), b["model"].state_dict())
    assert_same(a["average"].averages, b["average"].averages)
    assert a["lr"] == b["lr"]
    assert float(a["moved"]) == float(b["moved"])
    for x, y in zip(a["optimizer"].state.values(), b["optimizer"].state.values(), strict=True):
        assert_same(x, y)


RUNS = [(name, "cycle", precision) for name in sorted(OPTIMIZERS) for precision in ("fp32", "bf16-true")]
RUNS += [("adamw", "cosine", "fp32"), ("adamw of torch", "cosine", "bf16"), ("sgd", "cosine", "fp32")]
RUNS += [("muon kernels", "cosine", "fp16"), ("muon", "cycle", "fp16")]


@pytest.mark.parametrize(("name", "schedule", "precision"), RUNS)
def test_captured_is_eager_to_the_bit(name, schedule, precision):
    eager = train(name, False, schedule=schedule, precision=precision)
    captured = train(name, True, schedule=schedule, precision=precision)
    assert captured["run"].reason is None
    assert captured["run"].replays == 64 - 3
    assert torch.equal(captured["losses"], eager["losses"])
    assert_same_runs(captured, eager)
    if schedule == "cycle":
        assert isinstance(captured["moved"], torch.Tensor)
        assert captured["moved"].device.type == "cuda"
    assert captured["losses"][-8:].mean() < captured["losses"][:8].mean()


@pytest.mark.parametrize(("captured", "precision"), [(True, "fp32"), (True, "bf16-true"), (False, "fp32")])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_skipped_updates_leave_no_trace(name, precision, captured):
    bad = {1, 9, 10, 30}
    with_bad = train(name, captured, precision=precision, poison=bad, average=AveragedWeights, epochs=2)
    without = train(name, captured, precision=precision, drop=bad, average=AveragedWeights, epochs=2)
    assert with_bad["loop"].skipped == 4
    assert with_bad["average"].averaged == without["average"].averaged == 28
    assert_same_runs(with_bad, without)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_steps_never_wait(name):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)).cuda()
    optimizer = OPTIMIZERS[name](model)
    ema = EMA(model, 0.9, warmup=True)
    optimizer.found_inf = torch.zeros((), device="cuda")
    for step in range(8):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        ema.update()
    torch.cuda.set_sync_debug_mode("default")
    assert ema.averaged == 8


def reference(make, steps=20, dtype=torch.float64, device="cpu"):
    """Weights, moments after `steps` with gradients that depend on the step alone."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 48), (48, 64), (64,), (16, 8, 3, 3), (33, 7)]
    weights = [
        nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype))
        for s in shapes
    ]
    optimizer = make(weights)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step + 1)
        for w in weights:
            w.grad = torch.randn(w.shape, generator=generator, dtype=torch.float64).to(device, dtype)
        optimizer.step()
    return weights, optimizer


MAKERS = {
    "adamw": lambda w: AdamW(w, lr=1e-2, weight_decay=0.1),
    "sgd": lambda w: SGD(w, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", ["plain", "tensors", "flag", "scaled"])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_near_float64_by_every_route(name, kind):
    exact, _ = reference(MAKERS[name])

    def make(weights):
        optimizer = MAKERS[name](weights)
        group = optimizer.param_groups[0]
        if kind == "tensors":
            for key in ("lr", "momentum", "weight_decay"):
                if key in group:
                    group[key] = torch.tensor(group[key], device="cuda")
            if "betas" in group:
                group["betas"] = tuple(
                    torch.tensor(b, device="cuda", dtype=torch.float64) for b in group["betas"]
                )
        if kind == "flag":
            optimizer.found_inf = torch.zeros((), device="cuda")
        if kind == "scaled":
            optimizer.grad_scale = torch.ones((), device="cuda")
        return optimizer

    found, _ = reference(make, dtype=torch.float32, device="cuda")
    for a, b in zip(found, exact, strict=True):
        assert (a.detach().cpu().double() - b).abs().max() < 1e-5


def test_masters_in_bf16_near_float64():
    """The one launch that reads bf16 gradients and writes master and parameter, and torch's optimizer with masters."""
    for make in (
        MAKERS["adamw"],
        lambda w: add_masters(torch.optim.AdamW(w, lr=1e-2, weight_decay=0.1, fused=True)),
    ):
        weights, optimizer = reference(make, dtype=torch.bfloat16, device="cuda")
        wide = [nn.Parameter(torch.zeros(w.shape, dtype=torch.float64)) for w in weights]
        generator = torch.Generator().manual_seed(0)
        for w in wide:
            w.data.copy_(torch.randn(w.shape, generator=generator, dtype=torch.float64).bfloat16())
        plain = torch.optim.AdamW(wide, lr=1e-2, weight_decay=0.1)
        for step in range(20):
            generator = torch.Generator().manual_seed(step + 1)
            for w in wide:
                w.grad = torch.randn(w.shape, generator=generator, dtype=torch.float64).bfloat16().double()
            plain.step()
        for w, exact in zip(weights, wide, strict=True):
            master = masters_of(optimizer).get(w)
            assert (master.cpu().double() - exact).abs().max() < 1e-5
            assert torch.equal(w, master.bfloat16())


def test_orthogonal_matrices_in_bf16():
    given = torch.randn(6, 128, 384, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = orthogonalise(given)
    found = orthogonalise(given.float().cuda())
    assert found.dtype == torch.bfloat16
    assert ((found.cpu().double() - exact).norm() / exact.norm()) < 3e-2
    tall = orthogonalise(given.mT.float().cuda()).mT
    torch.testing.assert_close(tall, found, rtol=0.05, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_by_kernels_is_muon_by_torch(dtype):
    """Gathering, products and applying of both ways, conv kernels in channels_last and odd shapes included."""
    results = []
    for fused in (True, False):
        generator = torch.Generator().manual_seed(0)
        shapes = [(64, 48), (48, 64), (64, 48), (16, 8, 3, 3), (33, 7), (128, 384), (1, 5)]
        weights = [nn.Parameter(torch.randn(s, generator=generator).to("cuda", dtype)) for s in shapes]
        weights[3].data = weights[3].data.contiguous(memory_format=torch.channels_last)
        optimizer = Muon(weights, lr=0.02, weight_decay=0.1, fused=fused)
        start = [w.detach().float().clone() for w in weights]
        for step in range(10):
            generator = torch.Generator().manual_seed(step + 1)
            for w in weights:
                w.grad = torch.empty_like(w).copy_(torch.randn(w.shape, generator=generator))
            optimizer.step()
        results.append((weights, optimizer))
    for a, b, begun in zip(results[0][0], results[1][0], start, strict=True):
        assert (a.float() - b.float()).norm() < 0.02 * (b.float() - begun).norm()
        means = [o.state[w]["momentum_buffer"] for w, (_, o) in zip((a, b), results, strict=True)]
        torch.testing.assert_close(*means, rtol=1e-5, atol=1e-6)
        if dtype == torch.bfloat16:
            assert torch.equal(a, masters_of(results[0][1]).get(a).bfloat16())


def test_muon_on_gram_matrices_replayed_is_muon_in_float64():
    """Small and larger matrices, one that goes another way, and numbers that change between the replays of a graph."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 32, 3, 3), (64, 64), (256, 64, 3, 3), (128, 160), (24, 40)]
    start = [torch.randn(s, generator=generator).half().cuda() for s in shapes]
    start = [w.contiguous(memory_format=torch.channels_last) if w.dim() == 4 else w for w in start]
    weights, exact = ([nn.Parameter(w.clone()) for w in start], [nn.Parameter(w.double()) for w in start])
    rate = torch.tensor(0.2, device="cuda")
    settings = {"momentum": 0.65, "ns_steps": 3, "unit_rows": True}
    ours = Muon(weights, lr=rate, fused=True, ns_dtype=torch.float16, master=False, **settings)
    theirs = Muon(exact, lr=rate.double(), fused=False, **settings, ns_dtype=torch.float64)
    for w in weights:
        w.grad = torch.zeros_like(w)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        ours.step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            ours.step()
    with torch.no_grad():
        for w, begun in zip(weights, start, strict=True):
            w.copy_(begun)
            ours.state[w]["momentum_buffer"].zero_()
    for step in range(4):
        rate.fill_(0.2 / (step + 1))
        theirs.param_groups[0]["lr"].copy_(rate)
        for w, e in zip(weights, exact, strict=True):
            w.grad.copy_(torch.randn(w.shape, generator=generator) * 30)
            e.grad = w.grad.double()
        graph.replay()
        theirs.step()
    for w, e, begun in zip(weights, exact, start, strict=True):
        assert (w.double() - e).norm() < 0.02 * (e - begun.double()).norm()


def test_muon_beside_torchs():
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(s, device="cuda")) for s in [(128, 64), (64, 128), (96, 96)]]
    theirs = copy.deepcopy(mine)
    start = [w.detach().clone() for w in mine]
    pair = (
        Muon(mine, lr=0.02, momentum=0.9),
        torch.optim.Muon(theirs, lr=0.02, momentum=0.9, weight_decay=0.0),
    )
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator).cuda()
            b.grad = a.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for a, b, begun in zip(mine, theirs, start, strict=True):
        assert (a - b).norm() < 0.02 * (b - begun).norm()


def test_averages_near_float64():
    torch.manual_seed(0)
    model = nn.Linear(64, 64).cuda()
    ema, mean, seen, exact = EMA(model, 0.99), AveragedWeights(model), [], None
    for _ in range(50):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
        ema.update()
        mean.update()
        seen.append(model.weight.detach().double().clone())
        exact = seen[0] if exact is None else 0.99 * exact + (1 - 0.99) * seen[-1]
    assert (ema.averages["weight"].double() - exact).abs().max() < 1e-5
    assert (mean.averages["weight"].double() - torch.stack(seen).mean(0)).abs().max() < 1e-5


@pytest.mark.parametrize("make", [AdamW, SGD, Muon])
def test_saved_and_put_back_on_the_device(make, tmp_path):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)).cuda().bfloat16()
        return model, make(model.parameters(), lr=0.01, **({"momentum": 0.9} if make is not AdamW else {}))

    def step(model, optimizer, number):
        generator = torch.Generator().manual_seed(number)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()

    model, optimizer = build()
    for number in range(5):
        step(model, optimizer, number)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "x")
    other, again = build()
    weights, state = torch.load(tmp_path / "x", weights_only=True)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for number in range(5, 8):
        step(model, optimizer, number)
        step(other, again, number)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(masters_of(optimizer).get(p), masters_of(again).get(q))
