"""Progressive resizing on textures of 128 pixels: seconds to an accuracy, against full size throughout.

    python -m benchmarks.resizing_textures [--quick] [--json FILE] [--seeds 3]

The images are no photographs and no enlarged small ones: twelve classes of procedural textures (gratings, checks,
rings, dots, hexagons, marble, wood, cloud, ridges, cells, cell borders, bricks), each drawn at 128 x 128 with a random
scale, turn, phase, pair of colours, shading and noise. 24,000 train and 6,000 test a residual network in bf16 through
`ResidentImages`, `Resizing` and captured steps, with one-cycle rates. What small images save is judged beside what the
same time buys at full size: a run of fewer epochs.

Counts: wall time from new weights to the end of training, the device synchronised; resizing the set is in it. Left out:
drawing the images, recording the steps (a first run of each variant, shown apart), evaluation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from benchmarks.harness import Figure, arguments, report
from hotloop import data, optim

SIZE = 128


def noise(n: int, cells: int, g: torch.Generator, size: int = SIZE) -> torch.Tensor:
    """Smooth noise in about ±1, [n, size, size]."""
    grid = torch.randn(n, 1, cells, cells, device=g.device, generator=g)
    return F.interpolate(grid, (size, size), mode="bicubic", align_corners=True)[:, 0]


def octaves(n: int, g: torch.Generator, fold: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return sum(fold(noise(n, 4 * 2**k, g)) * 0.6**k for k in range(4))  # type: ignore[return-value]


def textures(kind: int, n: int, g: torch.Generator) -> torch.Tensor:
    """uint8 [n, 128, 128, 3] of one class."""

    def draw(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(n, 1, 1, device=g.device, generator=g)

    line = torch.linspace(-1, 1, SIZE, device=g.device)
    y, x = line[None, :, None].expand(n, SIZE, SIZE), line[None, None, :].expand(n, SIZE, SIZE)
    turn, f = draw(0, 2 * math.pi), torch.exp(draw(math.log(12.0), math.log(45.0)))
    u = f * (x * turn.cos() + y * turn.sin()) + draw(0, 6.3)
    v = f * (y * turn.cos() - x * turn.sin()) + draw(0, 6.3)
    r = f * ((x - draw(-1, 1)) ** 2 + (y - draw(-1, 1)) ** 2).sqrt()
    if kind in (9, 10):
        points = torch.rand(n, 90, 2, device=g.device, generator=g) * 2.4 - 1.2
        where = torch.stack((y, x), -1).reshape(n, -1, 2)
        near = torch.cdist(where, points).topk(2, dim=2, largest=False).values.view(n, SIZE, SIZE, 2)
        value = 12 * near[..., 0] - 1 if kind == 9 else 12 * (near[..., 1] - near[..., 0]) - 1
    else:
        shapes: list[Callable[[], torch.Tensor]] = [
            lambda: u.sin(),
            lambda: 3 * u.sin() * v.sin(),
            lambda: r.sin(),
            lambda: 2 * (u.cos() + v.cos() - 0.8),
            lambda: u.cos() + (0.5 * u + 0.866 * v).cos() + (0.5 * u - 0.866 * v).cos(),
            lambda: (u + 2.5 * noise(n, 8, g)).sin(),
            lambda: (r + 2.5 * noise(n, 8, g)).sin(),
            lambda: octaves(n, g, lambda t: t),
            lambda: 2 - 3 * octaves(n, g, torch.abs),
            lambda: u,
            lambda: u,
            lambda: torch.where(
                (u.sin() > 0.9) | ((v + (u / 6.2832).floor() * 3.1416).sin() > 0.9), 1.0, -1.0
            ),
        ]
        value = shapes[kind]()
    share = value.clamp(-1, 1)[..., None] * draw(0.25, 0.5)[..., None] + 0.5
    one, two = (torch.rand(n, 1, 1, 3, device=g.device, generator=g) for _ in range(2))
    shade = 1 + 0.4 * noise(n, 3, g)[..., None]
    image = (one + (two - one) * share) * shade
    image = image + 0.12 * torch.randn(image.shape, device=g.device, generator=g)
    return (image * 255).clamp(0, 255).to(torch.uint8)


def draw_set(n: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """n images of all classes in turn, and their classes."""
    g = torch.Generator(device).manual_seed(seed)
    labels = torch.arange(n, device=device) % 12
    images = torch.empty(n, SIZE, SIZE, 3, dtype=torch.uint8, device=device)
    for kind in range(12):
        mine = (labels == kind).nonzero().flatten()
        for part in mine.split(64 if device.type == "cuda" else 8):
            images[part] = textures(kind, len(part), g)
    return images, labels


class Block(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(o), nn.BatchNorm2d(o)
        self.skip = nn.Conv2d(i, o, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm_one(self.one(x)))
        return F.relu(self.norm_two(self.two(y)) + self.skip(x))


def make_net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), Block(width, width, 1),
        Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2), Block(4 * width, 8 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 12),
    )  # fmt: skip


def train(
    sizes: list[tuple[float, int]], grow: float, seed: int, sets: list[torch.Tensor], batch: int, width: int
) -> tuple[float, float, float]:
    """(seconds, test accuracy, the same with norms refreshed) of one run; its steps are recorded in the time."""
    loop = hotloop.Loop(precision="bf16", record=False, nonfinite="ignore", device=str(sets[0].device))
    torch.manual_seed(seed)
    x, y, tx, ty = sets
    how = data.Augment(translate=4, flip="random", mean=(0.5,), std=(0.25,))
    images = data.ResidentImages(x, y, how, dtype=torch.bfloat16)
    plan = data.Resizing(sizes, batch_size=batch, cost=grow, rate="sqrt", most=2 * batch)
    loader = data.ResidentLoader(images, seed=seed, resizing=plan, drop_last=True)
    batches = plan.batches(len(x), drop_last=True)
    model = make_net(width).to(memory_format=torch.channels_last)
    optimizer = optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02)
    seen = [b.batch_size for b in batches]
    whole = optim.one_cycle(1.0, sum(seen), unit="samples")
    # one curve over samples, times what the batch grew by
    values = [whole(sum(seen[:k])) * b.rate for k, b in enumerate(batches)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: values[min(k, len(values) - 1)])
    model, optimizer, scheduler, loader = loop.prepare(model, optimizer, scheduler, loader)

    @loop.capture(outputs="static")
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, scheduler)
        return loss

    loop.read(torch.zeros(1, device=loop.device))
    began = time.perf_counter()
    for _ in loop.epochs(math.ceil(plan.epochs)):
        for a, b in loader:
            step(a, b)
    loop.read(next(model.parameters()).flatten()[0])
    seconds = time.perf_counter() - began
    test = data.ResidentLoader(
        data.ResidentImages(tx, ty, data.Augment(mean=(0.5,), std=(0.25,)), dtype=torch.bfloat16),
        500,
        shuffle=False,
    )

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            right = sum((model(a).argmax(1) == b).sum() for a, b in test)
        return float(right) / len(ty)

    plain = accuracy()
    full = data.ResidentLoader(images, batch, seed=99)
    data.refresh_norms(model, (a for (a, _), _ in zip(full, range(20), strict=False)))
    return seconds, plain, accuracy()


def main() -> None:
    args = arguments(__doc__, seeds=3, epochs=6)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    n, batch, width = (24000, 256, 32) if not args.quick else (240, 24, 4)
    sets = [*draw_set(n, 1, device), *draw_set(n // 4, 2, device)]
    e = float(args.epochs)
    variants: dict[str, tuple[list[tuple[float, int]], float]] = {
        "128 throughout": ([(e, 128)], 0),
        "128, half the epochs": ([(e / 2, 128)], 0),
        "64, 96, 128, larger batches": ([(0.4 * e, 64), (0.3 * e, 96), (0.3 * e, 128)], 2),
        "96, 112, 128, equal batches": ([(0.3 * e, 96), (0.3 * e, 112), (0.4 * e, 128)], 0),
    }
    figures: list[Figure] = []
    for name, (sizes, grow) in variants.items():
        rows = [train(sizes, grow, seed, sets, batch, width) for seed in range(args.seeds + 1)]
        figures.append(Figure(f"{name}: first run, its steps recorded", rows[0][0], "s"))
        for k, (what, unit, scale) in enumerate(
            [("training", "s", 1), ("accuracy", "%", 100), ("accuracy, norms refreshed", "%", 100)]
        ):
            values = [scale * row[k] for row in (rows if k else rows[1:])]
            spread = 1.96 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            figures.append(Figure(f"{name}: {what}", statistics.mean(values), unit, spread))
    report(f"textures of 128 pixels, {e:g} epochs", figures, args.json)


if __name__ == "__main__":
    main()
