"""CIFAR-10 to 94 % test accuracy in well under a second of one GPU: a small network, a recipe made for time.

python examples/cifar10.py FOLDER --runs 3

FOLDER holds train.pt and test.pt: {"images": uint8 [N, 32, 32, 3], "labels": int64 [N]}. The recipe descends from
published ones (Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, and its variant with Muon; hiverge's
cifar10-speedrun, 2025). Images, order and weights lie on the device; each size's step is one launch. The first run of
a process records its steps; later runs find them.
"""

import argparse
import dataclasses
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from hotloop import data, optim
from hotloop.kernels.pooled_norm import pooled_norm_silu


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How it is trained. `sizes` are (epochs, pixels a side) in turn; rates are peaks."""

    sizes: tuple[tuple[float, int], ...] = ((7.6, 32),)
    batch: int = 1536
    rates: tuple[float, float, float] = (0.205, 0.0573, 0.5415)  # filters, biases, head
    momenta: tuple[float, float] = (0.655, 0.825)  # Muon, SGD
    decay: float = 1.0418e-6  # of biases and head, for each sample
    smoothing: float = 0.09
    unsure: float = 0.2  # share of the test images that are looked at from six sides
    widths: tuple[int, int, int] = (64, 256, 256)
    dtype: torch.dtype = torch.float16


PLAIN = data.Augment(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
LIVELY = dataclasses.replace(PLAIN, translate=2, flip="alternating", brightness=0.14, contrast=0.13)
VIEWS = [dataclasses.replace(PLAIN, offset=(d, d), mirror=m) for d in (0, -1, 1) for m in (False, True)]


class Net(nn.Module):
    """On 24 whitened features: three blocks of (conv, pool, norm, SiLU, conv, norm, SiLU); the largest; linear."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        a, b, c = recipe.widths
        plan = [(24, a), (a, a), (a, b), (b, b), (b, c), (c, c)]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1, bias=False) for i, o in plan)
        self.head = nn.Linear(c, 10, bias=False)
        self.to(recipe.dtype, memory_format=torch.channels_last)
        self.biases = nn.ParameterList(torch.zeros(o) for _, o in plan)
        self.register_buffer("statistics", torch.zeros(2, len(plan), max(recipe.widths)))

    @torch.no_grad()
    def reset(self) -> None:
        """Draw the weights anew, in place; the first filters of each layer pass their channel on."""
        for conv in self.convs:
            conv.reset_parameters()
            n = min(conv.weight.shape[:2])
            conv.weight[:n] = 0
            conv.weight[:n, :n, 1, 1].fill_diagonal_(1)
        self.head.reset_parameters()
        self.head.weight.div_(self.head.weight.std())
        torch._foreach_zero_(list(self.biases))
        self.statistics[0] = 0
        self.statistics[1] = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, (conv, bias) in enumerate(zip(self.convs, self.biases, strict=True)):
            mean, var = self.statistics[:, k, : len(bias)]
            x = pooled_norm_silu(
                conv(x), bias, mean, var, pool=k % 2 == 0, training=self.training, momentum=0.44, eps=1e-12
            )
        return self.head(F.max_pool2d(x, x.shape[-1]).flatten(1)).float() / self.head.in_features


@torch.no_grad()
def whiten(filters: torch.Tensor, images: data.ResidentImages) -> None:
    """Set `filters` to the scaled eigenvectors of 2 x 2 patches of a thousand images, and to their negatives."""
    zero = torch.zeros((), dtype=torch.int64, device=images.device)
    x = data.ResidentImages(images.images[:1000], how=PLAIN).cut(
        torch.arange(1000, device=zero.device), zero, 0, None
    )
    patches = F.unfold(x, 2).transpose(1, 2).reshape(-1, 12)
    values, vectors = torch.linalg.eigh((patches.T @ patches / len(patches)).cpu())
    scaled = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
    filters.copy_(torch.cat((scaled, -scaled)))


def make_run(folder: str, recipe: Recipe, capture: str = "graph"):
    """Everything that a run needs, made once. Returns `run`."""
    loop = hotloop.Loop(capture=capture, nonfinite="ignore", record=False)
    sets = [torch.load(Path(folder) / f"{name}.pt", weights_only=True) for name in ("train", "test")]
    filters = torch.zeros(24, 3, 2, 2, dtype=recipe.dtype, device=loop.device).to(
        memory_format=torch.channels_last
    )
    train, test = (
        data.ResidentImages(s["images"], s["labels"], LIVELY, filters=filters, device=loop.device)
        for s in sets
    )
    sizes = data.Resizing(recipe.sizes, batch_size=recipe.batch, cost=0)
    model = loop.prepare(Net(recipe))
    weights = [conv.weight for conv in model.convs]
    decay = recipe.decay * recipe.batch
    muon = optim.Muon(
        weights, momentum=recipe.momenta[0], ns_steps=3, adjust_lr_fn="none", lr=recipe.rates[0], master=False
    )
    groups = zip((list(model.biases), [model.head.weight]), recipe.rates[1:], strict=True)
    sgd = optim.SGD(
        [{"params": some, "lr": rate, "weight_decay": decay / rate} for some, rate in groups],
        momentum=recipe.momenta[1], nesterov=True, master=False,
    )  # fmt: skip
    total = round(sizes.epochs * len(train) / recipe.batch)
    down = optim.linear(1.0, 0.0, total)
    optimizers = [(o, optim.RateScheduler(o, down, relative=True)) for o in (muon, sgd)]
    optimizers = loop.prepare(optimizers)
    at_start = [scheduler.state_dict() for _, scheduler in optimizers]

    @loop.capture(outputs="static")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.cross_entropy(model(x), y, label_smoothing=recipe.smoothing, reduction="sum")
        loop.backward(loss)
        with torch.no_grad():  # filters keep the norm of a matrix with orthonormal rows
            norms = torch._foreach_norm(weights)
            torch._foreach_mul_(weights, [math.sqrt(len(w)) / n for w, n in zip(weights, norms, strict=True)])
        for optimizer, scheduler in optimizers:
            loop.update(optimizer, scheduler)

    @loop.capture
    def look(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    def logits(index: torch.Tensor, view: data.Augment) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.int64, device=loop.device)
        return torch.cat([look(test.seen(view).cut(part, zero, 0, None)[0]) for part in index.split(2000)])

    def run(seed: int) -> tuple[float, float]:
        """Train from new weights: (accuracy, seconds), from resident bytes to the count of right answers."""
        began = time.perf_counter()
        torch.manual_seed(seed)
        model.reset()
        model.train()
        whiten(filters, train)
        for (optimizer, scheduler), state in zip(optimizers, at_start, strict=True):
            torch._foreach_zero_(
                [v for s in optimizer.state.values() for v in s.values()] or [filters.new_zeros(1)]
            )
            scheduler.load_state_dict(state)
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                if not isinstance(group["lr"], torch.Tensor):  # a table on the device sees to itself
                    group["lr"] = rate
        loader = data.ResidentLoader(train, seed=seed, resizing=sizes, drop_last=True)
        done = 0
        while done < total:
            for x, y in loader:
                step(x, y)
                done += 1
                if done == total:
                    break
        model.eval()
        every = torch.arange(len(test), device=loop.device)
        found = logits(every, PLAIN)
        unsure = found.softmax(1).amax(1).topk(int(recipe.unsure * len(test)), largest=False).indices
        found[unsure] = torch.stack([logits(unsure, view) for view in VIEWS]).mean(0)
        accuracy = loop.read((found.argmax(1) == test.labels).float().mean())
        return accuracy, time.perf_counter() - began

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="with train.pt and test.pt")
    parser.add_argument(
        "--runs", type=int, default=1, help="with seeds 0, 1, ...; the first one is the cold one"
    )
    parser.add_argument("--capture", default="graph", help="graph, or off")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    run = make_run(args.folder, Recipe(), args.capture)
    for seed in range(args.runs):
        accuracy, seconds = run(seed)
        print(f"seed {seed}: test accuracy {accuracy:.2%}, {seconds:.3f} s")


if __name__ == "__main__":
    main()
