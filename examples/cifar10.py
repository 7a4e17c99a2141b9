"""CIFAR-10 to about 94 % test accuracy: a small network, a recipe made for time on one GPU.

python examples/cifar10.py FOLDER --runs 3

FOLDER holds train.pt and test.pt: {"images": uint8 [N, 32, 32, 3], "labels": int64 [N]}. The recipe descends from
published ones (Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, its variant with Muon, and hiverge's
cifar10-speedrun, 2025). The first run of a process records its steps, each size's as one launch; later runs find them.
"""

import argparse
import dataclasses
import time

import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from hotloop import data, optim
from hotloop.kernels.pooled_norm import PooledNormSiLU

PLAIN = data.Augment(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
LIVELY = dataclasses.replace(PLAIN, translate=2, flip="alternating", brightness=0.14, contrast=0.13)
VIEWS = [dataclasses.replace(PLAIN, offset=(d, d), mirror=m) for d in (0, -1, 1) for m in (False, True)]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How it is trained. `sizes` are (epochs, pixels a side) in turn; rates are peaks."""

    sizes: tuple[tuple[float, int], ...] = ((3.6, 24), (5.2, 32))
    batch: int = 1536
    rates: tuple[float, float, float] = (0.205, 0.115, 0.5415)  # filters, biases, head
    power: float = 1.2  # of the line that they fall on
    momenta: tuple[float, float] = (0.655, 0.825)  # filters, the rest
    decay: float = 1.6e-3  # of biases and head, over their rate
    norms: float = 0.4434  # share of a batch in the running statistics
    smoothing: float = 0.15
    unsure: float = 0.3  # share of the test images that are looked at from six sides
    widths: tuple[int, int, int] = (64, 256, 256)
    dtype: torch.dtype = torch.float16


class Net(nn.Sequential):
    """On 32 whitened features: three blocks of (conv, pool, norm, SiLU, conv, norm, SiLU); the largest; linear."""

    def __init__(self, recipe: Recipe) -> None:
        a, b, c = recipe.widths
        layers: list[nn.Module] = []
        for k, (i, o) in enumerate([(32, a), (a, a), (a, b), (b, b), (b, c), (c, c)]):
            conv = nn.Conv2d(i, o, 3, padding=1, bias=False, dtype=recipe.dtype)
            layers += [conv, PooledNormSiLU(o, pool=k % 2 == 0, momentum=recipe.norms, eps=1e-12)]
        super().__init__(*layers, nn.Linear(c, 10, bias=False, dtype=recipe.dtype))
        self.to(memory_format=torch.channels_last)

    @torch.no_grad()
    def reset(self) -> None:
        """Draw the weights anew, in place; the first filters of each layer pass their channel on."""
        for layer in self:
            layer.reset_parameters()
            if isinstance(layer, nn.Conv2d):
                nn.init.dirac_(layer.weight[: layer.in_channels])
        self[-1].weight.div_(self[-1].weight.std())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *layers, head = self
        for layer in layers:
            x = layer(x)
        return head(F.max_pool2d(x, x.shape[-1]).flatten(1)) / head.in_features


def make_run(folder: str, recipe: Recipe):
    """Everything that a run needs, made once. Returns `run`."""
    loop = hotloop.Loop(capture="graph", nonfinite="ignore", record=False)
    sets = [torch.load(f"{folder}/{name}.pt", weights_only=True) for name in ("train", "test")]
    first = torch.zeros(32, 2, 2, 3, dtype=recipe.dtype, device=loop.device).permute(0, 3, 1, 2)
    how = {"filters": first, "device": loop.device}
    train, test = (data.ResidentImages(s["images"], s["labels"], LIVELY, **how) for s in sets)
    sizes = data.Resizing(recipe.sizes, batch_size=recipe.batch, cost=0)
    total = round(sizes.epochs * len(train) / recipe.batch)
    model = loop.prepare(Net(recipe))
    filters = [p for p in model.parameters() if p.dim() == 4]
    rest = [p for p in model.parameters() if p.dim() == 1], [model[-1].weight]
    lr, *slow = recipe.rates
    ns = {"ns_coefficients": (3.4576, -4.7391, 2.0843), "ns_steps": 3, "ns_dtype": recipe.dtype}
    muon = optim.Muon(filters, lr, 0, recipe.momenta[0], adjust_lr_fn="none", fused=True, master=False, **ns)
    pairs = zip(rest, slow, strict=True)
    groups = [{"params": p, "lr": r, "weight_decay": recipe.decay / r} for p, r in pairs]
    sgd = optim.SGD(groups, momentum=recipe.momenta[1], nesterov=True, master=False)
    schedulers = [torch.optim.lr_scheduler.PolynomialLR(o, total, recipe.power) for o in (muon, sgd)]
    muon, sgd, schedulers = loop.prepare(muon, sgd, schedulers)
    at_start = [scheduler.state_dict() for scheduler in schedulers]

    @loop.capture(outputs="static")
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        logits = model(x).float()  # sums over a batch can exceed float16
        loop.backward(F.cross_entropy(logits, y, label_smoothing=recipe.smoothing, reduction="sum"))
        with torch.no_grad():  # filters keep the norm of a matrix with orthonormal rows
            torch._foreach_mul_(filters, [len(p) ** 0.5 / p.norm() for p in filters])
        loop.update(muon, schedulers[0])
        loop.update(sgd, schedulers[1])

    @loop.capture
    def look(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x).float()

    def answers(index: torch.Tensor, view: data.Augment) -> torch.Tensor:
        seen, zero = test.seen(view), torch.zeros_like(index[0])
        return torch.cat([look(seen.cut(part, zero, 0, None)[0]) for part in index.split(2000)])

    def run(seed: int) -> tuple[float, float]:
        """Train from new weights: (accuracy, seconds), from resident bytes to the count of right answers."""
        began = time.perf_counter()
        torch.manual_seed(seed)
        model.train().reset()
        up, down = data.whitening_filters(train.images[:1000], PLAIN).chunk(2)
        first.copy_(torch.cat((up, down, 2 * up[-4:], 2 * down[-4:])))  # the strongest a second time, larger
        for state in (*muon.state.values(), *sgd.state.values()):
            torch._foreach_zero_(list(state.values()))
        for group, rate in zip(muon.param_groups + sgd.param_groups, recipe.rates, strict=True):
            group["lr"] = rate  # as it was when the schedulers were made
        for scheduler, state in zip(schedulers, at_start, strict=True):
            scheduler.load_state_dict(state)
        loader = data.ResidentLoader(train, seed=seed, resizing=sizes, drop_last=True)
        for (x, y), _ in zip((batch for _ in range(total) for batch in loader), range(total), strict=False):
            step(x, y)
        model.eval()
        found = answers(torch.arange(len(test), device=loop.device), PLAIN)
        unsure = found.softmax(1).amax(1).topk(int(recipe.unsure * len(test)), largest=False).indices
        found[unsure] = torch.stack([answers(unsure, view) for view in VIEWS]).mean(0)
        return loop.read((found.argmax(1) == test.labels).float().mean()), time.perf_counter() - began

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="with train.pt and test.pt")
    parser.add_argument("--runs", type=int, default=1, help="with seeds 0, 1, ...")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    run = make_run(args.folder, Recipe())
    for seed in range(args.runs):
        print("seed {}: test accuracy {:.2%}, {:.3f} s".format(seed, *run(seed)))


if __name__ == "__main__":
    main()
