"""The network, the settings and the phases of the CIFAR-10 recipe (`benchmarks.cifar_recipe`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from hotloop.kernels.pooled_norm import global_max, pooled_norm_silu

__all__ = ["BEST", "COEFFICIENTS", "DEEP", "MEAN", "STD", "Net", "Phase", "Recipe", "phases_of"]

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
COEFFICIENTS = (3.4576, -4.7391, 2.0843)
"""Of Muon's quintic."""
DEEP = 2
"""Layers from this one on are updated while those below are still differentiated."""


@dataclass(frozen=True)
class Recipe:
    """All that a run depends on beside the data and the seed."""

    sizes: tuple[tuple[float, int], ...] = ((7.6, 32),)  # (epochs, pixels a side), in turn
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
    power: float = 1.0  # the line of the rates, to this power
    final: float = 0.0  # the rate's end, a share of its peak
    tta_share: float = 0.2
    tta_shifts: int = 1
    dtype: str = "float16"
    kernels: bool = True
    capture: str = "graph"  # eager, graph, compile, full
    edges: bool = True  # layers make the next one's padding where that saves work
    unroll: int = 16  # steps of one graph
    beside: bool = True  # deep updates and the next batch beside other work
    ns_steps: int = 3
    features: int = 24  # of the first layer: 24 whitened ones, and the strongest of them once more
    again: float = 2.0  # by what those are larger

    @property
    def type(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


BEST = Recipe(
    sizes=((3.6, 24), (5.2, 32)), features=32, smoothing=0.15, bias_rate=0.115, power=1.2, tta_share=0.3
)
"""Settings found on held-out training images, and lengths for 0.7 seconds."""


class Net(nn.Module):
    """24 whitened features, then three blocks of (conv, pool, norm, SiLU, conv, norm, SiLU), global max, linear."""

    whiten: torch.Tensor
    means: torch.Tensor
    variances: torch.Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.edged = False  # whether what the last layer made has the next one's padding
        a, b, c = recipe.widths
        plan = [(recipe.features, a), (a, a), (a, b), (b, b), (b, c), (c, c)]
        dtype = recipe.type
        self.filters = nn.ParameterList(
            nn.Parameter(torch.empty(o, i, 3, 3, dtype=dtype).to(memory_format=torch.channels_last))
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

    def whitening(self, covariance: torch.Tensor) -> torch.Tensor:
        """First filters out of the covariance [12, 12] of 2 x 2 patches: its eigenvectors, scaled to whiten."""
        values, vectors = torch.linalg.eigh(covariance)
        scaled = (vectors / (values + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        more = scaled[12 - (self.recipe.features - 24) // 2 :] * self.recipe.again
        return torch.cat((scaled, -scaled, more, -more))

    def has_edge(self, size: int) -> bool:
        """Whether what a layer makes of `size` x `size` pixels has the padding of the next one, which pools.

        Of odd images a pooling drops the last row and column: with the padding of the first ones only, those are not
        computed.
        """
        return size % 2 == 1 and self.recipe.edges

    def through(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Layers `first` up to and without `last`."""
        r = self.recipe
        for k in range(first, last):
            p, bias = self.filters[k], self.biases[k]
            n = len(bias)
            edge = k % 2 == 1 and k + 1 < len(self.filters) and self.has_edge(x.shape[-1])
            x = pooled_norm_silu(
                F.conv2d(x, p, padding=0 if self.edged else 1), bias, self.means[k, :n], self.variances[k, :n],
                pool=k % 2 == 0, training=self.training, momentum=r.norm_momentum, eps=1e-12, edge=edge,
                eager=not r.kernels,
            )  # fmt: skip
            self.edged = edge
        return x

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the last layer's result."""
        largest = global_max(x, eager=not self.recipe.kernels)
        return F.linear(largest, self.head) / self.head.shape[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of what the whitening layer made, [n, features, size - 1, size - 1]."""
        return self.end(self.through(x, 0, len(self.filters)))


@dataclass
class Phase:
    """Steps of one kind, and the replays of their graphs by number of steps, once recorded."""

    size: int
    steps: int
    graphs: dict[int, Callable[[], None]] = field(default_factory=dict, repr=False)

    def counts(self, unroll: int) -> list[int]:
        """How many steps each graph has, in turn."""
        return [unroll] * (self.steps // unroll) + ([self.steps % unroll] if self.steps % unroll else [])


def phases_of(recipe: Recipe, n: int) -> list[Phase]:
    """A run over n images, parted wherever the size changes; what a phase rounds off, the next one makes up for."""
    phases: list[Phase] = []
    due = 0.0
    for epochs, size in recipe.sizes:
        due += epochs * n / recipe.batch
        phases.append(Phase(size, round(due)))
        due -= phases[-1].steps
    return [p for p in phases if p.steps]
