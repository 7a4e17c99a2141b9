"""Resident data on a GPU: the CPU's bits, no waiting, resuming through a loop, captured sizes."""

import pytest
import torch
import torch.nn.functional as F

import hotloop
from hotloop.data import Augment, ResidentImages, ResidentLoader, ResidentWindows, Resizing
from hotloop.data.resident import permutation
from hotloop.optim import SGD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HOW = Augment(2, "reflect", "alternating", 4, 0.1, 0.1, (0.5,), (0.25,))


def images(n, size):
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, size, size, 3), dtype=torch.uint8, generator=g)


def test_batches_are_those_of_the_cpu():
    x, y = images(64, 16), torch.arange(64) % 10
    batches = []
    for device in ("cpu", "cuda"):
        source = ResidentImages(x, y, HOW, classes=10, smoothing=0.1, device=device)
        batches.append([b for _ in range(1) for b in ResidentLoader(source, 10, seed=4)])
    for (a, b), (c, d) in zip(*batches, strict=True):
        assert torch.equal(a, c.cpu())
        assert torch.equal(b, d.cpu())
    assert torch.equal(
        permutation(5000, 3, 7, torch.device("cuda")).cpu(), permutation(5000, 3, 7, torch.device("cpu"))
    )


def test_windows_are_those_of_the_cpu():
    data, ids = torch.randn(500, 6), torch.arange(500) // 60
    mean, std = data.mean(0), data.std(0)
    kinds = [
        ResidentWindows(data, 20, torch.arange(500), ids=ids, mean=mean, std=std, device=d)
        for d in ("cpu", "cuda")
    ]
    a, b = (k.cut(torch.arange(len(k), device=k.device), None, 0, None) for k in kinds)
    assert torch.equal(a[1], b[1].cpu())
    assert torch.allclose(a[0], b[0].cpu(), rtol=0, atol=1e-6)


def test_taking_batches_never_waits():
    loader = hotloop.Loop(record=False).prepare(
        ResidentLoader(ResidentImages(images(64, 16), torch.arange(64), HOW, device="cuda"), 8)
    )
    list(loader)
    running = iter(loader)
    next(running)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            x, _y = next(running)
            assert x.is_cuda
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_each_size_is_recorded_once_and_learns_what_the_eager_steps_learn():
    def train(mode):
        loop = hotloop.Loop(record=False, seed=0, capture=mode)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.ReLU(),
            torch.nn.AdaptiveMaxPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(8, 4),
        )
        plan = Resizing([(3, 8), (3, 16)], batch_size=8)
        source = ResidentImages(images(64, 16), torch.arange(64) % 4, HOW, device="cuda")
        model, optimizer, loader = loop.prepare(
            model,
            SGD(model.parameters(), lr=torch.tensor(0.05, device="cuda"), momentum=0.9),
            ResidentLoader(source, resizing=plan, seed=1),
        )

        @loop.capture
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loop.backward(loss)
            loop.update(optimizer)
            return loss

        losses = [step(x, y) for _ in loop.epochs(6) for x, y in loader]
        return torch.stack(losses).cpu(), step

    torch.backends.cudnn.deterministic = True
    try:
        eager, _ = train("off")
        graphed, step = train("graph")
    finally:
        torch.backends.cudnn.deterministic = False
    assert torch.allclose(eager, graphed, rtol=1e-4, atol=1e-5)
    assert not step.reason


def test_a_resumed_run_goes_on_to_the_bit(tmp_path):
    def run(folder, stop):
        loop = hotloop.Loop(record=False, seed=0)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 4))
        source = ResidentImages(images(60, 8), torch.arange(60) % 4, HOW, device="cuda")
        model, optimizer, loader = loop.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.05), ResidentLoader(source, 8, seed=1)
        )
        loop.resume(folder)
        losses = []
        for _ in loop.epochs(3):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                loop.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if loop.updates == stop:
                    loop.save_state(folder, wait=True)
                    return losses
        return losses

    whole = run(tmp_path / "whole", 0)
    first = run(tmp_path / "parts", 11)
    assert first == whole[:11]
    assert run(tmp_path / "parts", 0) == whole[11:]
