"""One run of the CIFAR-10 recipe in a process that has just begun: nothing is compiled, few things are loaded.

The first update of each size is made kernel by kernel, which brings up cuDNN and cuBLAS; the others replay a graph of
one update. No `torch.optim.Optimizer` is made: its constructor imports torch's compiler, which takes as long as torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.cifar_cold_layers import TorchLayers
from benchmarks.cifar_net import COEFFICIENTS, MEAN, STD, Net, Recipe

__all__ = ["ColdRun", "orthogonal"]

Mark = Callable[[str], None]


def orthogonal(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """`hotloop.optim.orthogonal.orthogonalise` of [n, rows, columns] with rows <= columns, without its package."""
    wide = matrices.float()
    x = (wide / (torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True) + 1e-7)).to(matrices.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class ColdRun:
    """Everything of one run over resident images; `train`, then `evaluate`.

    Args:
        recipe: sizes, lengths and rates; the rates fall on a line.
        data: uint8 images [N, 32, 32, 3] and int64 labels [N] of train and test, on the device.
        layers: whose kernels are used.
        graph: record an update of each size and replay it.
        mark: called with a name after each part.
    """

    def __init__(
        self, recipe: Recipe, data: tuple[torch.Tensor, ...], layers: TorchLayers, *, graph: bool, mark: Mark
    ) -> None:
        self.recipe, self.layers, self.mark = recipe, layers, mark
        self.train_images, self.train_labels, self.test_images, self.test_labels = data
        self.device = data[0].device
        self.graph = graph and self.device.type == "cuda"
        self.net = Net(recipe).to(self.device)
        self.n = len(self.train_images)
        self.phases = [(size, round(epochs * self.n / recipe.batch)) for epochs, size in recipe.sizes]
        self.filters: list[torch.Tensor] = list(self.net.filters)
        self.biases: list[torch.Tensor] = list(self.net.biases)
        self.momenta = [torch.zeros_like(p) for p in (*self.filters, *self.biases, self.net.head)]
        self.norms = torch.tensor([math.sqrt(len(p)) for p in self.filters], device=self.device)
        wide = 1 - recipe.smoothing
        self.targets = torch.eye(10, device=self.device) * wide + recipe.smoothing / 10
        scale = torch.tensor([1 / (255 * s) for s in STD], device=self.device)
        self.affine = torch.stack(
            (scale, torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)]).to(scale))
        )

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """New weights, the whitening, the order of the samples and how each is augmented."""
        torch.manual_seed(seed)
        r, n, device = self.recipe, self.n, self.device
        patches = self.train_images[:1000] * self.affine[0] + self.affine[1]
        patches = torch.cat([patches[:, y : y + 31, x : x + 31] for y in (0, 1) for x in (0, 1)], 3).view(
            -1, 12
        )
        covariance = (patches.T @ patches / len(patches)).view(4, 3, 4, 3).permute(1, 0, 3, 2).reshape(12, 12)
        self.net.whiten.copy_(self.net.whitening(covariance.cpu()))
        self.mark("whitening")
        self.net.reset()
        self.steps = sum(steps for _, steps in self.phases)
        seen = self.steps * r.batch
        place = torch.arange(-(-seen // n) * n, device=device)
        keys = (place // n << 32) + torch.randint(1 << 32, place.shape, device=device)
        self.order = keys.argsort()[:seen] % n
        coin = torch.randint(2, (n,), device=device)
        turned = (coin[self.order] + place[:seen] // n) % 2
        moves = torch.randint(-r.translate, r.translate + 1, (seen, 2), device=device)
        self.moves = torch.cat((moves, turned[:, None]), 1).int()
        b, c = (torch.rand(2, seen, 1, device=device) * 2 - 1).unbind()
        c = 1 + c * r.contrast
        self.tone = torch.stack((self.affine[0] * c, (self.affine[1] + b * r.brightness) * c), 1)
        falling = 1 - torch.arange(self.steps, device=device) / self.steps
        peaks = torch.tensor([r.filter_rate, r.bias_rate, r.head_rate], device=device)
        self.rates = falling[:, None] * peaks
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.places = torch.arange(r.batch, device=device)
        self.sized = {32: self.train_images}
        for size in {s for s, _ in self.phases} - {32}:
            wide = self.train_images.permute(0, 3, 1, 2).float()
            small = F.interpolate(wide, (size, size), mode="bilinear", antialias=True)
            self.sized[size] = small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        self.mark("new weights, order")

    def logits(self, x: torch.Tensor, training: bool) -> torch.Tensor:
        """What the network says of the first layer's result."""
        for k, (p, bias) in enumerate(zip(self.filters, self.biases, strict=True)):
            n = len(bias)
            y = F.conv2d(x, p, padding=1)
            x = self.layers.after(
                y, bias, self.net.means[k, :n], self.net.variances[k, :n], k % 2 == 0, training
            )
        return F.linear(F.max_pool2d(x, x.shape[-1]).flatten(1), self.net.head) / self.net.head.shape[1]

    def step(self, size: int, mark: Mark = lambda name: None) -> None:
        """One update; `mark` as the run's, and not while it is recorded."""
        at = self.places + self.counter * self.recipe.batch
        index = self.order.index_select(0, at)
        moves, tone = self.moves.index_select(0, at), self.tone.index_select(0, at)
        rates = self.rates.index_select(0, self.counter)[0]
        self.counter.add_(1)
        with torch.no_grad():
            x = self.layers.first(self.sized[size], index, moves, tone, self.net.whiten)
            y = self.targets.index_select(0, self.train_labels.index_select(0, index))
        mark(f"first batch at {size} pixels")
        logits = self.logits(x, True)
        said = logits.float()
        # the gradient of the summed cross-entropy; handed over as one, it would have autograd import sympy
        slope = said.detach().softmax(1) - y
        mark(f"first forward at {size} pixels")
        learnt = [*self.filters, *self.biases, self.net.head]
        gradients = torch.autograd.grad((said * slope).sum(), learnt)
        mark(f"first backward at {size} pixels")
        with torch.no_grad():
            self.update(list(gradients), rates)

    def update(self, gradients: list[torch.Tensor], rates: torch.Tensor) -> None:
        """Muon for filters that keep their norm; SGD with Nesterov's momentum for biases and head."""
        r, k = self.recipe, len(self.filters)
        momenta, own = self.momenta[:k], gradients[:k]
        torch._foreach_lerp_(momenta, own, 1 - r.filter_momentum)
        ahead = torch._foreach_lerp(own, momenta, r.filter_momentum)
        scales = self.norms / torch.stack(torch._foreach_norm(self.filters)).float()
        torch._foreach_mul_(self.filters, list(scales.to(self.filters[0].dtype).unbind()))
        stacks: dict[torch.Size, list[int]] = {}
        for i, p in enumerate(self.filters):
            stacks.setdefault(p.shape, []).append(i)
        rate = -rates[0]
        updates: list[torch.Tensor] = list(ahead)
        for members in stacks.values():
            # columns in the order of memory: to the rows' directions it is nothing
            matrices = [ahead[i].permute(0, 2, 3, 1) for i in members]
            stack = torch.stack([m.reshape(len(m), -1) for m in matrices])
            ready = orthogonal(stack, r.ns_steps) * rate
            for i, m, part in zip(members, matrices, ready.unbind(), strict=True):
                updates[i] = part.view(m.shape).permute(0, 3, 1, 2)
        torch._foreach_add_(self.filters, [u.to(p.dtype) for u, p in zip(updates, self.filters, strict=True)])
        decay = r.decay * r.batch
        head: list[torch.Tensor] = [self.net.head]
        for weights, own, momenta, peak, rate in (
            (self.biases, gradients[k:-1], self.momenta[k:-1], r.bias_rate, -rates[1]),
            (head, gradients[-1:], self.momenta[-1:], r.head_rate, -rates[2]),
        ):
            decayed = list(torch._foreach_add(own, weights, alpha=decay / peak))
            torch._foreach_mul_(momenta, r.momentum)
            torch._foreach_add_(momenta, decayed)
            change = list(torch._foreach_add(decayed, momenta, alpha=r.momentum))
            torch._foreach_mul_(change, rate.to(change[0].dtype))
            torch._foreach_add_(weights, change)

    def train(self, prepared: Callable[[], None]) -> None:
        """All updates; `prepared` is called when the last recording is made."""
        for size, steps in self.phases:
            self.step(size, self.mark)
            self.mark(f"first update at {size} pixels")
            if not self.graph:
                for _ in range(steps - 1):
                    self.step(size)
            else:
                graph = torch.cuda.CUDAGraph()
                # the counter says where the run is, and a recording does not move it
                graph.capture_begin()
                self.step(size)
                graph.capture_end()
                self.mark(f"recording at {size} pixels")
                if size == self.phases[-1][0]:
                    prepared()
                for _ in range(steps - 1):
                    graph.replay()
            self.mark(f"updates at {size} pixels")

    @torch.no_grad()
    def evaluate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Correct answers on the test images, with and without more views of the least certain ones, 0-d int64."""
        r, n, batch = self.recipe, len(self.test_images), self.recipe.batch
        every = torch.arange(-(-n // batch) * batch, device=self.device) % n
        logits = torch.cat([self.look(part, 0, 0, 0) for part in every.split(batch)])[:n]
        plain = (logits.argmax(1) == self.test_labels).sum()
        count = min(round(n * r.tta_share / batch) * batch, n) or min(batch, n)
        unsure = logits.softmax(1).amax(1).argsort()[:count]
        s = r.tta_shifts
        views = [(y, x, m) for y, x in ((0, 0), (-s, -s), (s, s)) for m in (0, 1)]
        seen = [torch.cat([self.look(part, *view) for part in unsure.split(batch)]) for view in views]
        logits.index_copy_(0, unsure, torch.stack(seen).mean(0))
        right = (logits.argmax(1) == self.test_labels).sum()
        return right, plain

    def look(self, index: torch.Tensor, down: int, right: int, turned: int) -> torch.Tensor:
        """float32 logits of test images in one view."""
        moves = torch.tensor([down, right, turned], dtype=torch.int32).to(self.device).expand(len(index), 3)
        tone = self.affine.expand(len(index), 2, 3)
        x = self.layers.first(self.test_images, index, moves, tone, self.net.whiten)
        return self.logits(x, False).float()
