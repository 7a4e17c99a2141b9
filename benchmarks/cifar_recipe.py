"""CIFAR-10 as resident device work: runs of a recipe (`benchmarks.cifar_net`) as a few CUDA graphs.

The recipe descends from published ones (Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, and its
Muon variant; hiverge's cifar10-speedrun, 2025): whitening first layer, three blocks of two convolutions, Muon for
filters and SGD for the rest, alternating flip, translation, label smoothing, test-time augmentation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.cifar_end import end_and_back, end_takes
from benchmarks.cifar_muon import Filters
from benchmarks.cifar_net import BEST, DEEP, MEAN, STD, Net, Phase, Recipe, phases_of
from hotloop.data import resize_images
from hotloop.kernels.augment import Augment, augment, augment_filtered

__all__ = [
    "BEST",
    "MEAN",
    "STD",
    "Filters",
    "Net",
    "Outcome",
    "Phase",
    "Recipe",
    "Trainer",
    "phases_of",
    "read_cifar",
]


VIEWS = 6
"""Of the least certain test images: straight and mirrored, where they are and moved along a diagonal."""


def read_cifar(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images uint8 [N, 32, 32, 3] and labels int64 [N] of train and test, from train.pt and test.pt there."""
    parts: list[torch.Tensor] = []
    for split in ("train", "test"):
        found = torch.load(folder / f"{split}.pt", weights_only=True)
        parts += [found["images"], found["labels"]]
    return parts[0], parts[1], parts[2], parts[3]


class Trainer:
    """One recipe's buffers and graphs; `run` trains from scratch and evaluates, all on the device."""

    def __init__(self, recipe: Recipe, data: tuple[torch.Tensor, ...], *, seed: int = 0) -> None:
        self.recipe = recipe
        self.device = data[0].device
        self.train_images, self.train_labels, self.test_images, self.test_labels = data
        self.net = Net(recipe).to(self.device)
        self.n = len(self.train_images)
        self.augment_seed = seed
        self.phases = phases_of(recipe, self.n)
        self.total = sum(p.steps for p in self.phases)
        seen = self.total * recipe.batch
        self.counter = torch.zeros((), dtype=torch.int64, device=self.device)
        self.loaded = torch.zeros((), dtype=torch.int64, device=self.device)
        self.order = torch.zeros(seen, dtype=torch.int64, device=self.device)
        self.epochs = torch.zeros(seen, dtype=torch.int64, device=self.device)
        self.places = torch.arange(recipe.batch, device=self.device)
        self.rates = self.table().to(self.device)
        self.rate = torch.zeros(self.rates.shape[1], device=self.device)
        decay = recipe.decay * recipe.batch
        self.sgd = torch.optim.SGD(
            [
                {"params": list(self.net.biases), "lr": self.rate[1], "weight_decay": decay / recipe.bias_rate},
                {"params": [self.net.head], "lr": self.rate[2], "weight_decay": decay / recipe.head_rate},
            ],
            lr=self.rate[1], momentum=recipe.momentum, nesterov=True, fused=self.device.type == "cuda",
        )  # fmt: skip
        for p in (*self.net.biases, self.net.head):
            self.sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
        filters: list[torch.Tensor] = list(self.net.filters)
        # what may be updated apart: each early layer, and all deep ones
        self.muons = [
            Filters(part, self.rate[0], recipe.filter_momentum, recipe)
            for part in [*([p] for p in filters[:DEEP]), filters[DEEP:]]
        ]
        cuda = self.device.type == "cuda"
        self.aside = streams_aside() if cuda and recipe.beside else []
        self.how = Augment(
            recipe.translate, "reflect", "alternating", 0, recipe.brightness, recipe.contrast, MEAN, STD
        )
        self.plain = Augment(mean=MEAN, std=STD)
        self.forward: Any = self.net
        if recipe.capture in ("compile", "full"):
            self.forward = torch.compile(self.net)
        self.sized: dict[int, torch.Tensor] = {32: self.train_images}
        for size in {s for _, s in recipe.sizes} - {32}:
            self.sized[size] = torch.empty(self.n, size, size, 3, dtype=torch.uint8, device=self.device)
        self.right = torch.zeros((), device=self.device)
        self.plain_right = torch.zeros((), device=self.device)
        self.covariance = torch.zeros(12, 12, device=self.device)
        self.covariance_here = torch.zeros(12, 12, pin_memory=cuda)
        self.whiten_here = torch.empty_like(self.net.whiten, device="cpu", pin_memory=cuda)
        self.pool = torch.cuda.graph_pool_handle() if cuda else None
        self.patches_work: Callable[[], None] = self.measure_patches
        self.renewal: Callable[[], None] = self.renew
        self.evaluation: Callable[[], None] = self.evaluate
        self.made_s = 0.0

    def table(self) -> torch.Tensor:
        """Rates of filters, biases and head at each step: float32 [steps, 3]."""
        r = self.recipe
        t = torch.arange(self.total, dtype=torch.float64) / max(self.total, 1)
        if r.schedule == "linear":
            f = (1 - t) ** r.power * (1 - r.final) + r.final
        elif r.schedule == "one_cycle":
            rise, cosine = 0.2, lambda u: (1 - torch.cos(math.pi * u)) / 2
            f = torch.where(t < rise, 0.1 + 0.9 * cosine(t / rise), 1 - cosine((t - rise) / (1 - rise)))
        elif r.schedule == "step":
            f = torch.where(t < 0.5, 1.0, torch.where(t < 0.8, 0.2, 0.04))
        else:
            f = torch.ones_like(t)
        return torch.stack([f * r.filter_rate, f * r.bias_rate, f * r.head_rate], 1).float()

    @torch.no_grad()
    def renew(self) -> None:
        """New weights, a new order, smaller copies, and optimizers that remember nothing; all on the device."""
        self.net.reset()
        wanted = len(self.order)
        place = torch.arange(-(-wanted // self.n) * self.n, device=self.device)
        keys = (place // self.n << 32) + torch.randint(1 << 32, place.shape, device=self.device)
        self.order.copy_(keys.argsort()[:wanted] % self.n)
        self.epochs.copy_(place[:wanted] // self.n)
        self.counter.zero_()
        self.loaded.zero_()
        for state in self.sgd.state.values():
            state["momentum_buffer"].zero_()
        for muon in self.muons:
            muon.reset()
        for size, out in self.sized.items():
            if out is not self.train_images:
                out.copy_(resize_images(self.train_images, size))

    @torch.no_grad()
    def measure_patches(self) -> None:
        """The covariance of 2 x 2 patches of the first 1,000 images, for the whitening."""
        first = torch.arange(min(1000, self.n), device=self.device)
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        x = augment(self.train_images, first, zero, self.plain, seed=0, eager=not self.recipe.kernels)
        patches = x.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(len(x), -1, 12)
        self.covariance.copy_(patches.flatten(0, 1).T @ patches.flatten(0, 1) / (patches.numel() // 12))

    def reset(self, seed: int) -> None:
        """Everything that a run changes, as new; from the resident bytes."""
        torch.manual_seed(seed)
        self.patches_work()
        self.covariance_here.copy_(self.covariance, non_blocking=True)
        measured = torch.cuda.Event() if self.device.type == "cuda" else None
        if measured is not None:
            measured.record()
        self.renewal()
        if measured is not None:
            measured.synchronize()  # eigenvectors are the host's, while the device renews
        self.whiten_here.copy_(self.net.whitening(self.covariance_here))
        self.net.whiten.copy_(self.whiten_here, non_blocking=True)

    def apart(self, which: int) -> AbstractContextManager[Any]:
        """Work beside the current stream's, after what that has done so far; on it, where streams are not used."""
        if not self.aside:
            return nullcontext()
        self.aside[which].wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.aside[which])

    def load(self, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch, augmented and through the first layer, and its targets."""
        at = self.places + self.loaded
        index, epoch = self.order.index_select(0, at), self.epochs.index_select(0, at)
        self.loaded.add_(len(at))
        return augment_filtered(
            self.sized[phase.size], self.train_labels, index, epoch, self.how, self.net.whiten,
            seed=self.augment_seed, classes=10, smoothing=self.recipe.smoothing, edge=self.net.has_edge(phase.size - 1),
            eager=not self.recipe.kernels,
        )  # fmt: skip

    def steps(self, phase: Phase, count: int) -> None:
        """So many updates; each makes the next one's batch beside its last work."""
        batch = self.load(phase)
        for i in range(count):
            batch = self.step(batch, phase, i + 1 < count)

    def step(
        self, batch: tuple[torch.Tensor, torch.Tensor], phase: Phase, more: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One update; returns the next batch, if there is to be more."""
        x, y = batch
        net = self.net
        net.edged = net.has_edge(phase.size - 1)
        with self.apart(1):  # the rates, small kernels that nothing needs before the first update
            self.rate.copy_(self.rates.index_select(0, self.counter.view(1))[0])
            self.counter.add_(1)
        # input and result of what is differentiated apart
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.recipe.capture in ("compile", "full"):
            self.backward_of(self.forward(x), y)
        else:
            for first, last in pairwise([*range(DEEP + 1), len(net.filters)]):
                inner = x if first == 0 else x.detach().requires_grad_()
                x = net.through(inner, first, last)
                parts.append((inner, x))
            if self.recipe.kernels and end_takes(x, net.head):
                dx, slopes, largest = end_and_back(x.detach(), net.head.detach(), y)
                with self.apart(0):
                    count, channels = net.head.shape
                    net.head.grad = (slopes[:, :count].T @ largest).mul_(1 / channels)
                x.backward(dx)
            else:
                self.backward_of(net.end(x), y)
        for stream in self.aside[1:]:
            torch.cuda.current_stream().wait_stream(stream)
        updates = [muon.step for muon in self.muons]
        following = batch
        for left, ((inner, _), (_, result)) in enumerate(zip(parts[:0:-1], parts[-2::-1], strict=True)):
            with self.apart(0):
                updates.pop()()
            if more and left == len(parts) - 2:
                with self.apart(1):
                    following = self.load(phase)
            result.backward(inner.grad)
        with self.apart(0):
            self.sgd.step()
        if more and following is batch:
            with self.apart(1):
                following = self.load(phase)
        for update in updates:
            update()
        for stream in self.aside:
            torch.cuda.current_stream().wait_stream(stream)
        for p in net.parameters():
            p.grad = None
        return following

    @staticmethod
    def backward_of(logits: torch.Tensor, y: torch.Tensor) -> None:
        """The gradient of the summed cross-entropy; the loss itself is not needed to learn."""
        logits.backward((logits.detach().float().softmax(1) - y).to(logits.dtype))

    def looks(self, n: int) -> int:
        """Batches that an evaluation of n images takes."""
        batch = self.recipe.batch
        again = max(round(n * self.recipe.tta_share / batch), 1)
        return -(-n // batch) + again * (VIEWS - 1)

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
        moves = [(0, 0), (-s, -s), (s, s)]
        views = [replace(self.plain, offset=move, mirror=m) for move in moves for m in (False, True)]
        seen = [logits[unsure]]  # the first view's
        seen += [torch.cat([self.look(part, view) for part in unsure.split(batch)]) for view in views[1:]]
        logits.index_copy_(0, unsure, torch.stack(seen).mean(0))
        self.right.copy_((logits.argmax(1) == self.test_labels).sum())

    def look(self, index: torch.Tensor, view: Augment) -> torch.Tensor:
        """float32 logits of test images."""
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        x, _ = augment_filtered(
            self.test_images, self.test_labels, index, zero, view, self.net.whiten, seed=0,
            edge=self.net.has_edge(self.test_images.shape[1] - 1), eager=not self.recipe.kernels,
        )  # fmt: skip
        self.net.edged = self.net.has_edge(self.test_images.shape[1] - 1)
        return self.forward(x).float()

    def record(self, work: Callable[[], None], stream: torch.cuda.Stream) -> Callable[[], None]:
        """The replay of a graph of `work`."""
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream):
            work()
        return graph.replay

    def prepare(self) -> None:
        """Warm up and record; the weights are spoiled and `reset` mends them."""
        began = time.perf_counter()
        self.reset(0)
        if self.device.type != "cuda" or self.recipe.capture in ("eager", "compile"):
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.net.train()
            for phase in self.phases:
                self.steps(phase, 2)
                self.counter.zero_()
                self.loaded.zero_()
                for count in phase.counts(self.recipe.unroll):
                    if count not in phase.graphs:
                        phase.graphs[count] = self.record(partial(self.steps, phase, count), stream)
            self.renewal = self.record(self.renew, stream)
            self.patches_work = self.record(self.measure_patches, stream)
            self.net.eval()
            self.evaluate()
            self.evaluation = self.record(self.evaluate, stream)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.made_s = time.perf_counter() - began

    def train(self, phase: Phase) -> None:
        """A phase's updates, as graphs where those are recorded."""
        for count in phase.counts(self.recipe.unroll):
            replay = phase.graphs.get(count)
            if replay is not None:
                replay()
            else:
                self.steps(phase, count)

    def run(self, seed: int) -> Outcome:
        """Train from new weights and evaluate. The clock: from resident bytes to the count of right answers."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        self.reset(seed)
        self.net.train()
        for phase in self.phases:
            self.train(phase)
        self.net.eval()
        self.evaluation()
        right = int(self.right)
        seconds = time.perf_counter() - began
        n = len(self.test_labels)
        return Outcome(right / n, int(self.plain_right) / n, seconds)

    def parts(self, seed: int) -> tuple[float, list[float], float]:
        """Milliseconds of one run on a CUDA device: reset, each phase, evaluation; as events on the stream see them."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(self.phases) + 3)]
        torch.cuda.synchronize()
        marks[0].record()
        self.reset(seed)
        marks[1].record()
        self.net.train()
        for phase, mark in zip(self.phases, marks[2:], strict=False):
            self.train(phase)
            mark.record()
        self.net.eval()
        self.evaluation()
        marks[-1].record()
        torch.cuda.synchronize()
        took = [a.elapsed_time(b) for a, b in pairwise(marks)]
        return took[0], took[1:-1], took[-1]


@cache
def streams_aside() -> list[torch.cuda.Stream]:
    """For updates, whose small kernels go first, and for batches; of the process, since torch hands out few."""
    return [torch.cuda.Stream(priority=-1), torch.cuda.Stream()]


@dataclass(frozen=True)
class Outcome:
    """Test accuracy with and without test-time views, and seconds."""

    accuracy: float
    plain: float
    seconds: float
