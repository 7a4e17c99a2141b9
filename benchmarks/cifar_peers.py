"""What CIFAR-10 recipes are measured beside: the `airbench` package's 94 % network, and plain PyTorch on ours."""

from __future__ import annotations

import contextlib
import io
import math
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.cifar_recipe import MEAN, STD, Outcome, Recipe, phases_of


class Airbench:
    """`airbench.train94` of the package on PyPI, which does not compile, on data in `folder`.

    Its own clock, as it prints it: whitening, training and test-time augmentation, without new weights, reading,
    casting and normalising. Evaluations between its epochs are not in it.
    """

    def __init__(self, folder: Path) -> None:
        import airbench

        self.package: Any = airbench
        self.folder = folder.resolve()
        with self._place():
            airbench.warmup94(verbose=False)

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            Path("cifar10").symlink_to(self.folder)  # where it looks for its data
            yield

    def run(self, _seed: int) -> Outcome:
        said = io.StringIO()
        with self._place(), contextlib.redirect_stdout(said):
            self.package.train94()
        last = [line for line in said.getvalue().splitlines() if "eval" in line][-1]
        numbers = [float(word) for word in last.split("|") if re.fullmatch(r"\s*\d+\.\d+\s*", word)]
        return Outcome(numbers[-2], numbers[-3], numbers[-1])


class PlainNet(nn.Module):
    """The recipe's network as one writes it in PyTorch."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        a, b, c = recipe.widths
        self.whiten = nn.Conv2d(3, recipe.features, 2, bias=False)
        self.whiten.weight.requires_grad = False
        layers: list[nn.Module] = []
        for k, (i, o) in enumerate([(recipe.features, a), (a, a), (a, b), (b, b), (b, c), (c, c)]):
            norm = nn.BatchNorm2d(o, eps=1e-12, momentum=recipe.norm_momentum)
            norm.weight.requires_grad = False
            layers += [
                nn.Conv2d(i, o, 3, padding=1, bias=False),
                *([nn.MaxPool2d(2)] if k % 2 == 0 else []),
                norm,
                nn.SiLU(),
            ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(c, 10, bias=False)
        self.half() if recipe.type == torch.float16 else self.to(recipe.type)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.float()

    def reset(self) -> None:
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            if isinstance(module, nn.Conv2d) and module is not self.whiten:
                nn.init.dirac_(module.weight.data[: module.in_channels])
        self.head.weight.data.mul_(1 / self.head.weight.data.std())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(F.silu(self.whiten(x)))
        return self.head(F.max_pool2d(x, x.shape[-1]).flatten(1)) / self.head.in_features


def orthogonal(g: torch.Tensor, steps: int) -> torch.Tensor:
    x = g.bfloat16()
    x = x / (x.norm() + 1e-7)
    turned = len(x) > x.shape[1]
    x = x.T if turned else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4576 * x + (-4.7391 * a + 2.0843 * a @ a) @ x
    return x.T if turned else x


class PlainRun:
    """The same recipe in plain PyTorch: a loop of eager or compiled forwards, torch's SGD, Muon matrix by matrix."""

    def __init__(self, recipe: Recipe, data: tuple[torch.Tensor, ...], *, compiled: bool = False) -> None:
        self.recipe = recipe
        self.train_images, self.train_labels, self.test_images, self.test_labels = data
        self.device = data[0].device
        self.net = PlainNet(recipe).to(self.device).to(memory_format=torch.channels_last)
        # every shape apart: what is compiled for any shape is slower
        self.forward: Any = torch.compile(self.net, dynamic=False) if compiled else self.net
        self.orthogonal: Any = torch.compile(orthogonal, dynamic=False) if compiled else orthogonal
        self.mean = torch.tensor(MEAN, device=self.device).view(1, 3, 1, 1)
        self.std = torch.tensor(STD, device=self.device).view(1, 3, 1, 1)
        self.phases = phases_of(recipe, len(self.train_images))

    def normal(self, images: torch.Tensor) -> torch.Tensor:
        x = (images.permute(0, 3, 1, 2).to(self.recipe.type) / 255 - self.mean) / self.std
        return x.to(self.recipe.type).contiguous(memory_format=torch.channels_last)

    def augmented(self, padded: torch.Tensor, epoch: int) -> torch.Tensor:
        """All images shifted, turned every other epoch and jittered, out of padded ones [N, 3, H, H]."""
        n, t = len(padded), self.recipe.translate
        shift = torch.randint(0, 2 * t + 1, (n, 2, 1), device=self.device)
        span = torch.arange(padded.shape[-1] - 2 * t, device=self.device)
        rows, columns = shift[:, 0] + span, shift[:, 1] + span
        x = padded.permute(0, 2, 3, 1)[
            torch.arange(n, device=self.device)[:, None, None], rows[:, :, None], columns[:, None]
        ]
        x = x.permute(0, 3, 1, 2)
        if epoch % 2:
            x = x.flip(-1)
        b = (torch.rand(n, 1, 1, 1, device=self.device) * 2 - 1) * self.recipe.brightness
        c = (torch.rand(n, 1, 1, 1, device=self.device) * 2 - 1) * self.recipe.contrast + 1
        return ((x + b) * c).to(self.recipe.type).contiguous(memory_format=torch.channels_last)

    def smaller(self, x: torch.Tensor, size: int) -> torch.Tensor:
        if size == x.shape[-1]:
            return x
        parts = [
            F.interpolate(part.float(), (size, size), mode="bilinear", antialias=True).to(x.dtype)
            for part in x.split(5000)
        ]
        return torch.cat(parts).contiguous(memory_format=torch.channels_last)

    def share(self, k: int, total: int) -> float:
        """What the peak rates are multiplied by at update k."""
        r = self.recipe
        if r.schedule != "linear":
            raise ValueError("the plain peer knows a line down alone")
        return (1 - k / total) ** r.power * (1 - r.final) + r.final

    def run(self, seed: int) -> Outcome:
        r, net = self.recipe, self.net
        torch.manual_seed(seed)
        int(self.train_labels[0])  # nothing is left to do
        began = time.perf_counter()
        net.reset()
        net.train()
        decay = r.decay * r.batch
        biases = [m.bias for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
        filters = [m.weight for m in net.layers if isinstance(m, nn.Conv2d)]
        sgd = torch.optim.SGD(
            [
                {"params": biases, "lr": r.bias_rate, "weight_decay": decay / r.bias_rate},
                {"params": [net.head.weight], "lr": r.head_rate, "weight_decay": decay / r.head_rate},
            ],
            lr=r.bias_rate, momentum=r.momentum, nesterov=True, fused=self.device.type == "cuda",
        )  # fmt: skip
        buffers = [torch.zeros_like(p) for p in filters]
        x = self.normal(self.train_images)
        patches = x[:1000].float().unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        scaled = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        more = scaled[12 - (r.features - 24) // 2 :] * r.again
        net.whiten.weight.data.copy_(torch.cat((scaled, -scaled, more, -more)))
        x = torch.where((torch.rand(len(x), device=self.device) < 0.5).view(-1, 1, 1, 1), x.flip(-1), x)
        total = sum(phase.steps for phase in self.phases)
        k, epoch, at, size = 0, 0, len(x), 0
        for phase in self.phases:
            if phase.size != size:
                size = phase.size
                padded = F.pad(self.smaller(x, size), (r.translate,) * 4, "reflect")
                at = len(x)  # a new size begins a new pass
            for _ in range(phase.steps):
                if at + r.batch > len(x):
                    seen = self.augmented(padded, epoch)
                    order = torch.randperm(len(x), device=self.device)
                    at, epoch = 0, epoch + 1
                index = order[at : at + r.batch]
                at += r.batch
                loss = F.cross_entropy(
                    self.forward(seen[index]).float(),
                    self.train_labels[index],
                    label_smoothing=r.smoothing,
                    reduction="sum",
                )
                loss.backward()
                share, momentum = self.share(k, total), r.filter_momentum
                for group, rate in zip(sgd.param_groups, (r.bias_rate, r.head_rate), strict=True):
                    group["lr"] = rate * share
                sgd.step()
                with torch.no_grad():
                    for p, m in zip(filters, buffers, strict=True):
                        m.mul_(momentum).add_(p.grad, alpha=1 - momentum)
                        g = p.grad.lerp(m, momentum)
                        p.mul_(math.sqrt(len(p)) / p.norm())
                        p.add_(
                            self.orthogonal(g.reshape(len(p), -1), r.ns_steps).view_as(p),
                            alpha=-r.filter_rate * share,
                        )
                net.zero_grad()
                k += 1
        net.eval()
        with torch.no_grad():
            tx = self.normal(self.test_images)
            logits = torch.cat([self.forward(part) for part in tx.split(2000)]).float()
            plain = (logits.argmax(1) == self.test_labels).sum()
            unsure = logits.softmax(1).amax(1).topk(int(r.tta_share * len(tx)), largest=False).indices
            wide = F.pad(tx[unsure], (1,) * 4, "reflect")
            views = [tx[unsure], wide[:, :, :32, :32], wide[:, :, 2:, 2:]]
            views += [v.flip(-1) for v in views]
            logits[unsure] = torch.stack(
                [self.forward(v.contiguous(memory_format=torch.channels_last)).float() for v in views]
            ).mean(0)
            right = int((logits.argmax(1) == self.test_labels).sum())
        seconds = time.perf_counter() - began
        n = len(self.test_labels)
        return Outcome(right / n, int(plain) / n, seconds)
