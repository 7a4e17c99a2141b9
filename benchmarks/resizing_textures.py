"""Progressive resizing on textures of 128 pixels: accuracy after the same seconds, against full size throughout.

    python -m benchmarks.resizing_textures [--quick] [--json FILE] [--seeds 3] [--budgets 1.5,3]

The images are no photographs and no enlarged small ones: twelve classes of procedural textures (gratings, checks,
rings, dots, hexagons, marble, wood, cloud, ridges, cells, cell borders, bricks), each drawn at 128 x 128 with a random
scale, turn, phase, pair of colours, shading and noise. 24,000 train and 6,000 test a residual network in bf16 through
`ResidentImages`, `Resizing` and captured steps, with one-cycle rates.

What small images save is spent on more epochs: a budget is the seconds that so many epochs take at full size, and each
schedule gets the epochs that fit in, by the pace of each size as measured first. Small images come in batches of the
full size's 256 (so there are more updates) but for "larger batches".

Counts: wall time from new weights to the end of training, the device synchronised; resizing the set is in it. Left out:
drawing the images, recording the steps (a first run of each variant, whose accuracy counts), evaluation.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from benchmarks.harness import Figure, arguments, half_interval, report
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


Run = Callable[[int], tuple[float, float, float]]
Sizes = list[tuple[float, int]]


def make_run(sizes: Sizes, grow: float, sets: list[torch.Tensor], batch: int, width: int) -> Run:
    """Everything that a run needs. `run(seed)` gives seconds, test accuracy, and the same with norms refreshed."""
    loop = hotloop.Loop(precision="bf16", record=False, nonfinite="ignore", device=str(sets[0].device))
    x, y, tx, ty = sets
    how = data.Augment(translate=4, flip="random", mean=(0.5,), std=(0.25,))
    plan = data.Resizing(sizes, batch_size=batch, cost=grow, rate="sqrt", most=2 * batch)
    batches = plan.batches(len(x), drop_last=True)
    model = make_net(width).to(memory_format=torch.channels_last)
    optimizer = optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02)
    # the last epoch may be a part of one
    ends = list(itertools.accumulate(b.batch_size for b in batches))
    total = sum(end <= plan.epochs * len(x) for end in ends)
    rate = optim.one_cycle(2e-3, ends[total - 1], unit="samples")
    scheduler = plan.scheduler(optimizer, rate, len(x), drop_last=True)
    model, optimizer, scheduler = loop.prepare(model, optimizer, scheduler)
    at_start = scheduler.state_dict()

    @loop.capture(outputs="static")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loop.backward(F.cross_entropy(model(x), y))
        loop.update(optimizer, scheduler)

    def run(seed: int) -> tuple[float, float, float]:
        torch.manual_seed(seed)
        model.load_state_dict(make_net(width).state_dict())
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
        for group, lr in zip(optimizer.param_groups, at_start["_last_lr"], strict=True):
            group["lr"] = lr
        scheduler.load_state_dict(at_start)
        model.train()
        loop.read(torch.zeros(1, device=loop.device))
        began = time.perf_counter()
        images = data.ResidentImages(x, y, how, dtype=torch.bfloat16)
        loader = data.ResidentLoader(images, seed=seed, resizing=plan, drop_last=True)
        endless = itertools.chain.from_iterable(itertools.repeat(loader))
        for a, b in itertools.islice(endless, total):
            step(a, b)
        loop.read(next(model.parameters()).flatten()[0])
        seconds = time.perf_counter() - began
        plain = data.Augment(mean=(0.5,), std=(0.25,))
        test = data.ResidentLoader(
            data.ResidentImages(tx, ty, plain, dtype=torch.bfloat16), 500, shuffle=False
        )

        def accuracy() -> float:
            model.eval()
            with torch.no_grad():
                right = sum((model(a).argmax(1) == b).sum() for a, b in test)
            return float(right) / len(ty)

        before = accuracy()
        full = data.ResidentLoader(images, batch, seed=99)
        data.refresh_norms(model, (a for (a, _), _ in zip(full, range(20), strict=False)))
        return seconds, before, accuracy()

    return run


def find_costs(sets: list[torch.Tensor], batch: int, width: int) -> dict[int, tuple[float, float]]:
    """Seconds of an epoch at each size, and those that come once (resizing the set): a line through two runs."""
    costs = {}
    for size in (64, 96, SIZE):
        seconds = []
        for share in (0.25, 1.0):
            run = make_run([(share, size)], 0, sets, batch, width)
            run(0)
            seconds.append(run(0)[0])
        pace = (seconds[1] - seconds[0]) / 0.75
        costs[size] = (pace, max(seconds[0] - 0.25 * pace, 0.0))
        print(f"  an epoch at {size} pixels: {pace:.3f} s, once {costs[size][1]:.3f} s", flush=True)
    return costs


def epochs_within(seconds: float, shares: Sizes, costs: dict[int, tuple[float, float]]) -> float:
    """Epochs of a schedule that take so long."""
    once = sum(costs[size][1] for _, size in shares)
    return (seconds - once) / sum(share * costs[size][0] for share, size in shares)


SCHEDULES: dict[str, tuple[Sizes, float]] = {
    "128 throughout": ([(1.0, 128)], 0),
    "96 for six tenths, then 128": ([(0.6, 96), (0.4, 128)], 0),
    "64 for a quarter, 96, 128": ([(0.25, 64), (0.35, 96), (0.4, 128)], 0),
    "64, 96, 128, larger batches": ([(0.4, 64), (0.3, 96), (0.3, 128)], 2),
}
"""Shares of the epochs and their pixels, and how batches grow as pixels shrink."""


def main() -> None:
    args = arguments(__doc__, seeds=3, budgets="1.5,3")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    n, batch, width = (24000, 256, 32) if not args.quick else (240, 24, 4)
    began = time.perf_counter()
    sets = [*draw_set(n, 1, device), *draw_set(n // 4, 2, device)]
    print(f"  drawing the images: {time.perf_counter() - began:.1f} s", flush=True)
    costs = find_costs(sets, batch, width)
    figures: list[Figure] = []
    for budget in map(float, args.budgets.split(",")):
        for name, (shares, grow) in SCHEDULES.items():
            # at full size a budget is so many epochs: what the others have to fit into
            epochs = max(epochs_within(budget * costs[SIZE][0], shares, costs), 0.5 * budget)
            run = make_run([(share * epochs, size) for share, size in shares], grow, sets, batch, width)
            rows = [run(seed) for seed in range(args.seeds)]
            title = f"{name}, {epochs:.2f} epochs"
            for k, (what, unit, scale) in enumerate(
                [("training", "s", 1), ("accuracy", "%", 100), ("accuracy, norms refreshed", "%", 100)]
            ):
                values = [scale * row[k] for row in (rows if k else rows[1:])]
                figures.append(
                    Figure(f"{title}: {what}", statistics.mean(values), unit, half_interval(values))
                )
                print(f"  {title}: {what} {' '.join(f'{v:.3f}' for v in values)} {unit}", flush=True)
    report("textures of 128 pixels at equal seconds", figures, args.json)


if __name__ == "__main__":
    main()
