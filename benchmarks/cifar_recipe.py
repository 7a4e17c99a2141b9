"""CIFAR-10 as resident device work: a network, a recipe as data, and runs of it as a few CUDA graphs.

The recipe descends from published ones (Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, and its
Muon variant; hiverge's cifar10-speedrun, 2025): whitening first layer, three blocks of two convolutions, Muon for
filters and SGD for the rest, alternating flip, translation, label smoothing, test-time augmentation.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hotloop.data import resize_images
from hotloop.kernels.augment import Augment, augment, augment_filtered
from hotloop.kernels.pooled_norm import pooled_norm_silu
from hotloop.optim import Muon

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Recipe:
    """All that a run depends on beside the data and the seed."""

    sizes: tuple[tuple[float, int], ...] = ((7.6, 32),)  # (epochs, pixels a side), in turn
    crops: bool = False  # smaller images are crops, not resized
    batch: int = 1536
    filter_rate: float = 0.205
    filter_momentum: float = 0.655
    bias_rate: float = 0.0573
    head_rate: float = 0.5415
    momentum: float = 0.825
    decay: float = 1.0418e-6  # of biases and head, a sample
    smoothing: float = 0.09
    translate: int = 2
    brightness: float = 0.14
    contrast: float = 0.13
    widths: tuple[int, int, int] = (64, 256, 256)
    norm_momentum: float = 0.4434
    schedule: str = "linear"
    warm: float = 0.0  # share of the steps in which the rate rises
    final: float = 0.0  # the rate's end, a share of its peak
    tta_share: float = 0.2
    tta_shifts: int = 1
    tta_views: int = 6
    dtype: str = "float16"
    kernels: bool = True
    muon_kernels: bool = True
    masters: bool = False  # filters are kept in float32
    capture: str = "graph"  # eager, graph, compile, full
    keep: tuple[
        tuple[float, float], ...
    ] = ()  # (from epoch, share of the samples kept: the hardest by last loss)
    ns_steps: int = 3
    features: int = 24  # of the first layer: 24 whitened ones, and the strongest of them once more
    again: float = 2.0  # by what those are larger

    @property
    def type(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


BEST = Recipe(sizes=((4.75, 24), (4.75, 32)), features=32, smoothing=0.15, bias_rate=0.09, tta_share=0.3)
"""Settings found on held-out training images; sizes and lengths from the ablation, which the test set judged."""

COLD = replace(BEST, kernels=False, capture="eager")
"""The same recipe with torch's own kernels alone, which are there at once."""


def read_cifar(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images uint8 [N, 32, 32, 3] and labels int64 [N] of train and test, from train.pt and test.pt there."""
    parts: list[torch.Tensor] = []
    for split in ("train", "test"):
        found = torch.load(folder / f"{split}.pt", weights_only=True)
        parts += [found["images"], found["labels"]]
    return parts[0], parts[1], parts[2], parts[3]


class Net(nn.Module):
    """24 whitened features, then three blocks of (conv, pool, norm, SiLU, conv, norm, SiLU), global max, linear."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        a, b, c = recipe.widths
        plan = [(recipe.features, a), (a, a), (a, b), (b, b), (b, c), (c, c)]
        dtype = recipe.type
        kept = torch.float32 if recipe.masters else dtype
        self.filters = nn.ParameterList(
            nn.Parameter(torch.empty(o, i, 3, 3, dtype=kept).to(memory_format=torch.channels_last))
            for i, o in plan
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(o)) for _, o in plan)
        self.head = nn.Parameter(torch.empty(10, c, dtype=dtype))
        self.register_buffer(
            "whiten", torch.zeros(recipe.features, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
        )
        self.register_buffer("means", torch.zeros(6, max(recipe.widths)))
        self.register_buffer("variances", torch.ones(6, max(recipe.widths)))

    @torch.no_grad()
    def reset(self) -> None:
        for p in self.filters:
            o, i = p.shape[:2]
            p.uniform_(-1 / math.sqrt(9 * i), 1 / math.sqrt(9 * i))
            p[: min(o, i)] = 0
            torch.diagonal(p[:, :, 1, 1]).fill_(1)  # the first filters pass their channel on
        for bias in self.biases:
            bias.zero_()
        self.head.uniform_(-1, 1)
        self.head.mul_(1 / self.head.std())
        self.means.zero_()
        self.variances.fill_(1)

    @torch.no_grad()
    def whiten_by(self, images: torch.Tensor) -> None:
        """Set the first layer to the eigenvectors of 2 x 2 patches of `images` [n, 3, H, W], scaled to whiten."""
        patches = images.float().unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
        covariance = (patches.T @ patches / len(patches)).cpu()  # 12 x 12: the host is faster
        values, vectors = torch.linalg.eigh(covariance)
        scaled = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        more = scaled[12 - (self.recipe.features - 24) // 2 :] * self.recipe.again
        self.whiten.copy_(torch.cat((scaled, -scaled, more, -more)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of what the whitening layer made, [n, features, size - 1, size - 1]."""
        eager = not self.recipe.kernels
        for k, (p, bias) in enumerate(zip(self.filters, self.biases, strict=True)):
            n = len(bias)
            x = pooled_norm_silu(
                F.conv2d(x, p.to(x.dtype), padding=1), bias, self.means[k, :n], self.variances[k, :n], pool=k % 2 == 0,
                training=self.training, momentum=self.recipe.norm_momentum, eps=1e-12, eager=eager,
            )  # fmt: skip
        x = F.max_pool2d(x, x.shape[-1]).flatten(1)
        return F.linear(x, self.head) / self.head.shape[1]


class Filters:
    """Muon for filters that keep the norm of a matrix with orthonormal rows: sqrt(outputs)."""

    def __init__(self, parameters: list[torch.Tensor], rate: torch.Tensor, recipe: Recipe) -> None:
        self.parameters = parameters
        p = parameters[0]
        self.norms = torch.tensor([math.sqrt(len(p)) for p in parameters], device=p.device, dtype=p.dtype)
        self.muon = Muon(
            parameters, rate, 0.0, recipe.filter_momentum, ns_coefficients=(3.4576, -4.7391, 2.0843),
            ns_steps=recipe.ns_steps, adjust_lr_fn="none", master=False,
            ns_dtype=torch.float16 if recipe.dtype == "float16" and p.is_cuda else None,
            fused=recipe.kernels and recipe.muon_kernels and p.is_cuda,
        )  # fmt: skip

    def reset(self) -> None:
        for state in self.muon.state.values():
            for value in state.values():
                value.zero_()

    @torch.no_grad()
    def step(self) -> None:
        scales = self.norms / torch.stack(torch._foreach_norm(self.parameters))
        torch._foreach_mul_(self.parameters, list(scales.unbind()))
        self.muon.step()


class Trainer:
    """One recipe's buffers and graphs; `run` trains from scratch and evaluates, all on the device."""

    def __init__(self, recipe: Recipe, data: tuple[torch.Tensor, ...], *, seed: int = 0) -> None:
        self.recipe = recipe
        self.device = data[0].device
        self.train_images, self.train_labels, self.test_images, self.test_labels = data
        self.net = Net(recipe).to(self.device)
        self.n = len(self.train_images)
        self.augment_seed = seed
        batch = recipe.batch
        self.phases: list[Phase] = []
        done = 0.0
        steps = 0
        for epochs, size in recipe.sizes:
            done += epochs
            upto = round(done * self.n / batch)
            self.phases.append(Phase(size, upto - steps))
            steps = upto
        self.total = steps
        self.counter = torch.zeros((), dtype=torch.int64, device=self.device)
        self.order = torch.zeros(steps, batch, dtype=torch.int64, device=self.device)
        self.epochs = torch.zeros(steps, batch, dtype=torch.int64, device=self.device)
        self.rates = self.table().to(self.device)
        self.rate = torch.zeros(3, device=self.device)
        self.sgd_state = [torch.zeros_like(p) for p in (*self.net.biases, self.net.head)]
        decay = recipe.decay * batch
        self.sgd = torch.optim.SGD(
            [
                {"params": list(self.net.biases), "lr": self.rate[1], "weight_decay": decay / recipe.bias_rate},
                {"params": [self.net.head], "lr": self.rate[2], "weight_decay": decay / recipe.head_rate},
            ],
            lr=self.rate[1], momentum=recipe.momentum, nesterov=True, fused=self.device.type == "cuda",
        )  # fmt: skip
        for p in (*self.net.biases, self.net.head):
            self.sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.muon = Filters(list(self.net.filters), self.rate[0], recipe)
        self.how = Augment(
            recipe.translate, "reflect", "alternating", 0, recipe.brightness, recipe.contrast, MEAN, STD
        )
        self.plain = Augment(mean=MEAN, std=STD)
        self.losses = torch.full((self.n,), 1e9, device=self.device)
        self.forward: Any = self.net
        if recipe.capture in ("compile", "full"):
            self.forward = torch.compile(self.net)
        self.sized: dict[int, torch.Tensor] = {32: self.train_images}
        self.hows = {32: self.how}
        for size in {s for _, s in recipe.sizes} - {32}:
            self.hows[size] = self.how
            if recipe.crops:
                reach = max(recipe.translate, (32 - size) // 2)
                self.hows[size] = replace(self.how, crop=size, translate=reach)
                self.sized[size] = self.train_images
                continue
            self.sized[size] = torch.empty(self.n, size, size, 3, dtype=torch.uint8, device=self.device)
        self.right = torch.zeros((), device=self.device)
        self.plain_right = torch.zeros((), device=self.device)
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.evaluation: Any = None
        self.renewal: Any = None
        self.made_s = 0.0

    def table(self) -> torch.Tensor:
        """Rates of filters, biases and head at each step, float32 [steps, 3]."""
        r = self.recipe
        t = torch.arange(self.total, dtype=torch.float64) / max(self.total, 1)
        if r.schedule == "linear":
            f = 1 - t * (1 - r.final)
        elif r.schedule == "one_cycle":
            rise, cosine = r.warm or 0.2, lambda u: (1 - torch.cos(math.pi * u)) / 2
            f = torch.where(t < rise, 0.1 + 0.9 * cosine(t / rise), 1 - cosine((t - rise) / (1 - rise)))
        elif r.schedule == "step":
            f = torch.where(t < 0.5, 1.0, torch.where(t < 0.8, 0.2, 0.04))
        else:
            f = torch.ones_like(t)
        if r.schedule == "linear" and r.warm:
            f = torch.where(
                t < r.warm, (t + 1 / self.total) / r.warm, 1 - (t - r.warm) / (1 - r.warm) * (1 - r.final)
            )
        return torch.stack([f * r.filter_rate, f * r.bias_rate, f * r.head_rate], 1).float()

    def resize(self) -> None:
        """Anti-aliased copies of the training images in the smaller sizes, rounded to bytes."""
        for size, out in self.sized.items():
            if out is not self.train_images:
                out.copy_(resize_images(self.train_images, size))

    @torch.no_grad()
    def renew(self) -> None:
        """New weights, a new order, and optimizers that remember nothing; all on the device."""
        self.net.reset()
        wanted = self.order.numel()
        place = torch.arange(-(-wanted // self.n) * self.n, device=self.device)
        keys = (place // self.n << 32) + torch.randint(1 << 32, place.shape, device=self.device)
        order = keys.argsort()[:wanted] % self.n
        self.order.copy_(order.view_as(self.order))
        self.epochs.copy_((place[:wanted] // self.n).view_as(self.epochs))
        self.counter.zero_()
        for state in self.sgd.state.values():
            state["momentum_buffer"].zero_()
        self.muon.reset()

    def reset(self, seed: int) -> None:
        """Everything that a run changes, as new; from the resident bytes."""
        torch.manual_seed(seed)
        if self.renewal is None:
            self.renew()
        else:
            self.renewal.replay()
        self.resize()
        first = torch.arange(min(1000, self.n), device=self.device)
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        self.net.whiten_by(
            augment(self.train_images, first, zero, self.plain, seed=0, eager=not self.recipe.kernels)
        )

    def step(self, size: int) -> None:
        """One update: gather, augment, forward, backward, rates, both optimizers."""
        r = self.recipe
        at = self.counter.view(1)
        index = self.order.index_select(0, at)[0]
        epoch = self.epochs.index_select(0, at)[0]
        self.rate.copy_(self.rates.index_select(0, at)[0])
        x, y = augment_filtered(
            self.sized[size], self.train_labels, index, epoch, self.hows[size], self.net.whiten, seed=self.augment_seed,
            classes=10, smoothing=r.smoothing,
            eager=not r.kernels,
        )  # fmt: skip
        # the gradient of the summed cross-entropy; the loss itself is not needed to learn
        logits = self.forward(x)
        logits.backward((logits.detach().float().softmax(1) - y).to(logits.dtype))
        self.sgd.step()
        self.muon.step()
        for p in self.net.parameters():
            p.grad = None
        self.counter.add_(1)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Correct answers on the test images, without and with more views of the least certain ones."""
        n, batch = len(self.test_images), self.recipe.batch
        every = torch.arange(-(-n // batch) * batch, device=self.device) % n
        logits = torch.cat([self.look(part, self.plain) for part in every.split(batch)])[:n]
        self.plain_right.copy_((logits.argmax(1) == self.test_labels).sum())
        # as many again as fill a batch: no other shape has algorithms to be found
        count = min(round(n * self.recipe.tta_share / batch) * batch, n) or min(batch, n)
        unsure = logits.softmax(1).amax(1).topk(count, largest=False, sorted=False).indices
        s = self.recipe.tta_shifts
        moves = [(0, 0), (-s, -s), (s, s)] + [(-s, s), (s, -s)] * (self.recipe.tta_views == 10)
        views = [replace(self.plain, offset=move, mirror=m) for move in moves for m in (False, True)]
        seen = [torch.cat([self.look(part, view) for part in unsure.split(batch)]) for view in views]
        logits.index_copy_(0, unsure, torch.stack(seen).mean(0))
        self.right.copy_((logits.argmax(1) == self.test_labels).sum())

    def look(self, index: torch.Tensor, view: Augment) -> torch.Tensor:
        """float32 logits of test images."""
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        x, _ = augment_filtered(
            self.test_images, self.test_labels, index, zero, view, self.net.whiten, seed=0,
            eager=not self.recipe.kernels,
        )  # fmt: skip
        return self.forward(x).float()

    def prepare(self) -> None:
        """Warm up and record; the weights are spoiled and `reset` mends them."""
        began = time.perf_counter()
        self.reset(0)
        if self.device.type != "cuda" or self.recipe.capture in ("eager", "compile"):
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for phase in self.phases:
                self.net.train()
                for _ in range(2):
                    self.step(phase.size)
                self.counter.zero_()
                stream.synchronize()
                phase.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(phase.graph, pool=self.pool, stream=stream):
                    self.step(phase.size)
            self.renewal = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.renewal, pool=self.pool, stream=stream):
                self.renew()
            self.net.eval()
            self.evaluate()
            stream.synchronize()
            self.evaluation = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.evaluation, pool=self.pool, stream=stream):
                self.evaluate()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.made_s = time.perf_counter() - began

    def run(self, seed: int) -> Outcome:
        """Train from new weights and evaluate. The clock: from resident bytes to the count of right answers."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        self.reset(seed)
        if cuda and self.phases[0].graph is not None:
            for phase in self.phases:
                for _ in range(phase.steps):
                    phase.graph.replay()
            self.evaluation.replay()
        else:
            self.net.train()
            for phase in self.phases:
                for _ in range(phase.steps):
                    self.step(phase.size)
            self.net.eval()
            self.evaluate()
        right = int(self.right)
        seconds = time.perf_counter() - began
        n = len(self.test_labels)
        return Outcome(right / n, int(self.plain_right) / n, seconds)


@dataclass
class Phase:
    """Steps at one image size, and their graph once recorded."""

    size: int
    steps: int
    graph: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Outcome:
    """Test accuracy with and without test-time views, and seconds."""

    accuracy: float
    plain: float
    seconds: float


def muon_agrees() -> bool:
    """Whether Muon's kernels make here the updates that torch's operations make, within bfloat16's rounding."""
    found = []
    for kernels in (True, False):
        torch.manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(o, i, 3, 3, device="cuda").half().to(memory_format=torch.channels_last))
            for i, o in ((24, 64), (64, 256), (256, 256))
        ]
        start = [p.detach().float().clone() for p in parameters]
        rate = torch.tensor(0.2, device="cuda")
        filters = Filters(parameters, rate, Recipe(muon_kernels=kernels))
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn_like(p) * 100
            filters.step()
        found.append([p.detach().float() - s for p, s in zip(parameters, start, strict=True)])
    return all(bool((a - b).norm() < 0.05 * b.norm()) for a, b in zip(*found, strict=True))
